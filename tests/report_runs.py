"""Made-up run directories, written by the real writers: for tests of what reads them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from gradus.record.append_log import AppendLog
from gradus.record.device_log import DeviceLog
from gradus.record.directory import RunDirectory
from gradus.record.status import Status, write_status
from gradus.record.timings import TimingLog
from gradus.schema.breakdown import Breakdown
from gradus.schema.device_sample import DeviceSample, GpuSample, HostSample
from gradus.schema.plan import Mesh, Plan

BEGIN = 1_800_000_000.0
KINDS = {"data": 0.01, "forward": 0.03, "backward": 0.05, "optimizer": 0.005, "other": 0.005}
GIB = 2**30


def made_up_run(
    root: Path,
    run_id: str = "one",
    *,
    name: str = "made-up",
    ranks: int = 2,
    steps: int = 60,
    attempts: tuple[tuple[int, int], ...] | None = None,
    timings: bool = True,
    gpus: int | None = 2,
    devices: bool = True,
    state: str = "finished",
    batch: int = 8,
    width: int = 64,
    parameters: int | None = None,
    tokens: int = 256,
    floor: float = 2.0,
    rate: float = 80.0,
    slow_rank: int | None = None,
) -> RunDirectory:
    """`attempts` are (first step, last step) of each; `gpus=None` is a node without a driver."""
    run = RunDirectory.create(root, name, run_id)
    metrics = AppendLog(run.metrics_path)
    spans = attempts or ((1, steps),)
    now = BEGIN
    for _ in spans:
        attempt = run.new_attempt(_files(batch, width, ranks, bool(gpus)))
        first, last = spans[attempt - 1]
        events = AppendLog(run.events / f"rank-0-attempt-{attempt}.jsonl")
        launcher = AppendLog(run.events / f"launcher-attempt-{attempt}.jsonl")
        launcher.write(_event(now, "launch", attempt, ranks=ranks))
        counted = {"parameters": parameters} if parameters else {}
        events.write(_event(now + 1, "start", attempt, step=first - 1, steps_total=steps, ranks=ranks, **counted))
        if attempt > 1:
            events.write(_event(now + 1.1, "resume", attempt, step=first - 1, message=f"goes on from step {first - 1}"))
        _write_steps(run, metrics, events, attempt, first, last, now, batch, tokens, floor, rate)
        if timings:
            _write_timings(run, attempt, ranks, first, last, now, slow_rank)
        if devices:
            _write_devices(run, attempt, last - first + 1, now, gpus)
        now += 0.1 * (last - first + 1) + 5
        final = attempt == len(spans)
        ended = state if final else "failed"
        error = {"kind": "exception", "message": "a node <died>"} if ended == "failed" else None
        if error:
            events.write(_event(now - 1, "fault", attempt, **error))
        launcher.write(_event(now, "end", attempt, state=ended, exit_code=int(error is not None), error=error))
        now += 60
    metrics.close()
    status = Status(state=state, step=spans[-1][1], steps_total=steps, attempt=len(spans))  # type: ignore[arg-type]
    write_status(run, replace(status, updated_at=datetime.now(timezone.utc)))
    return run


def _event(at: float, event: str, attempt: int, **fields: object) -> dict[str, object]:
    time = datetime.fromtimestamp(at, timezone.utc).isoformat(timespec="milliseconds")
    return {"time": time, "writer": "made-up", "event": event, "attempt": attempt, **fields}


def _files(batch: int, width: int, ranks: int, gpu: bool) -> dict[str, str]:
    recipe = f"""name: made-up
model: {{use: gpt, layers: 2, width: {width}, heads: 2, context: 64}}
data: {{use: stdlib-text}}
batch: {batch}
steps: 60
"""
    plan = Plan(mesh=Mesh(replicate=ranks), micro_batch=max(1, batch // ranks)).to_yaml()
    found = {
        "python": "3.11.7",
        "platform": "Linux",
        "hostname": "n1",
        "packages": {"torch": "2.13.0", "gradus": "0.1.0"},
        "git": {"commit": "0123abcd" * 5, "diff": "-old <line>\n+new line", "diff_is_whole": True},
        "gpus": [{"name": "NVIDIA H200"}] * 2 if gpu else [],
        "command": ["/somewhere/bin/gradus", "train", "recipe.yaml", "--set", "steps=60"],
    }
    return {"recipe.yaml": recipe, "plan.yaml": plan, "environment.json": json.dumps(found)}


def _write_steps(
    run: RunDirectory,
    metrics: AppendLog,
    events: AppendLog,
    attempt: int,
    first: int,
    last: int,
    now: float,
    batch: int,
    tokens: int,
    floor: float,
    rate: float,
) -> None:
    for step in range(first, last + 1):
        wobble = 1 + 0.01 * math.sin(step * 1.7)
        metrics.write(
            {
                "step": step,
                "attempt": attempt,
                "samples": step * batch,
                "tokens": step * batch * tokens,
                "loss": floor + 3 * math.exp(-step / 15) + 0.02 * math.sin(step * 2.3) + 0.001 * attempt,
                "lr": 1e-3 * min(1, step / 10),
                "grad_norm": 1.5 * wobble,
                "step_seconds": batch / (rate * wobble),
                "data_seconds": 0.01,
                "samples_per_second": rate * wobble,
                "tokens_per_second": rate * wobble * tokens,
                "mfu": None,
                "memory_peak_bytes": 3 * GIB,
            }
        )
        if step % 20 == 0:
            metrics.write({"step": step, "attempt": attempt, "validation_loss": floor + 3 * math.exp(-step / 15)})
            path = f"checkpoints/step-{step:08}"
            events.write(_event(now + 1 + 0.1 * (step - first), "checkpoint", attempt, step=step, path=path))
    events.close()


def _write_timings(
    run: RunDirectory, attempt: int, ranks: int, first: int, last: int, now: float, slow_rank: int | None
) -> None:
    for rank in range(ranks):
        log = TimingLog(run, rank)
        more = 0.03 if rank == slow_rank else 0.0
        for step in range(first, last + 1):
            seconds = {**KINDS, "forward": KINDS["forward"] + more, "exposed_communication": 0.03 - more}
            log.write(
                Breakdown(
                    time=now + 1 + 0.1 * (step - first + 1),
                    attempt=attempt,
                    rank=rank,
                    node=f"n{rank // 8 + 1}",
                    step=step,
                    steps=1,
                    measured_steps=1,
                    step_seconds=sum(seconds.values()),
                    seconds=seconds,
                    own_seconds=sum(KINDS.values()) + more,
                    memory_peak_bytes=(3 + rank) * GIB,
                    memory_reserved_bytes=(4 + rank) * GIB,
                )
            )
        log.close()


def _write_devices(run: RunDirectory, attempt: int, count: int, now: float, gpus: int | None) -> None:
    log = DeviceLog(run, "n1")
    for number in range(count):
        found = None
        if gpus is not None:
            found = tuple(
                GpuSample(
                    index=index,
                    uuid=f"GPU-{index}",
                    name="NVIDIA H200",
                    utilisation=0.9,
                    memory_used_bytes=40 * GIB,
                    memory_total_bytes=140 * GIB,
                    power_watts=500.0 + index,
                    temperature_celsius=60.0 + number % 3,
                    clock_mhz=1900,
                    clock_max_mhz=1980,
                    throttle=("sw_power_cap",) if number % 4 == 0 else (),
                    energy_joules=1000.0 + 1000.0 * number,
                )
                for index in range(gpus)
            )
        host = HostSample(cpu_utilisation=0.3, cores=8, memory_used_bytes=9 * GIB, memory_total_bytes=64 * GIB)
        log.write(DeviceSample(time=now + 2.0 * number, attempt=attempt, node="n1", gpus=found, host=host))
    log.close()
