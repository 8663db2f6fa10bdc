"""Runs that never ran: directories with the files of a run, as a test wants them. For hardware that no test has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradus.record.append_log import AppendLog
from gradus.record.device_log import DeviceLog
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter, rank_writer
from gradus.record.status import Status, write_status
from gradus.record.timings import TimingLog
from gradus.schema.breakdown import KINDS, Breakdown
from gradus.schema.cluster import Cluster
from gradus.schema.device_sample import DeviceSample, GpuSample, HostSample
from gradus.schema.plan import Plan
from gradus.schema.prediction import PREDICTION_FILE, Prediction
from gradus.schema.recipe import Recipe

GIB = 2**30
BEGAN = 1_800_000_000.0
RECIPE: dict[str, Any] = {
    "name": "made-up",
    "model": {"use": "gpt", "layers": 2, "width": 64, "heads": 4, "context": 64},
    "data": {"use": "synthetic-tokens", "context": 64},
    "batch": 32,
    "steps": 100,
    "optimizer": {"use": "adamw", "lr": 1e-3},
}
STEP = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}  # seconds of a sound step
H200 = "NVIDIA H200"
ON_GPU = Cluster(name="made-up", gpus_per_node=1, gpu="h200-sxm", cpu_cores=16, memory_gib=128.0)
ON_CPU = Cluster(name="made-up", cpu_cores=4, memory_gib=16.0)


def run_with(
    folder: Path,
    *,
    recipe: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    planned: dict[str, Any] | None = None,
    cluster: Cluster = ON_CPU,
    seconds: dict[int, dict[str, float]] | dict[str, float] | None = None,
    own: dict[int, float] | None = None,
    steps: int = 40,
    gpu: dict[str, Any] | None = None,
    host: dict[str, Any] | None = None,
    events: list[dict[str, Any]] | None = None,
    rows: list[dict[str, Any]] | None = None,
    prediction: Prediction | None = None,
    state: Any = "finished",
    log: str | None = None,
    name: str = "made-up",
    run_id: str = "x",
    **of_each: Any,
) -> RunDirectory:
    """A run of one attempt. `seconds` by kind, or by rank and kind, are those of each step; `gpu` makes it one of GPUs;
    `planned` is what the planner chose besides the recipe's own `plan`.

    A number of the host that is a list goes from its first to its second value while the run goes on.
    """
    document = {**RECIPE, **(recipe or {}), **({"plan": plan} if plan else {})}
    found = Recipe.from_document(document)
    made = RunDirectory.create(folder, name, run_id)
    full = Plan(**{"micro_batch": 32, **(planned or {}), **{key: getattr(found.plan, key) for key in found.plan.fixed}})
    environment = {"gpus": [{"name": H200}] if gpu is not None else [], "packages": {"torch": "2.13.0"}}
    files = {
        "recipe.yaml": found.to_yaml(),
        "plan.yaml": full.to_yaml(),
        "cluster.yaml": cluster.to_yaml(),
        "environment.json": json.dumps(environment),
        **({PREDICTION_FILE: prediction.to_json()} if prediction else {}),
    }
    made.new_attempt(files)
    ranks = full.mesh.world_size
    begin = EventWriter(made, rank_writer(1))
    device = "cuda" if gpu is not None else "cpu"
    begin.write("start", attempt=1, step=0, ranks=ranks, device=device, threads=1, parameters=10**6)
    for event in events or []:
        begin.write(event.pop("event"), attempt=1, **event)
    begin.close()
    by_rank: dict[int, dict[str, float]]
    given = seconds if seconds is not None else STEP
    by_rank = given if all(isinstance(key, int) for key in given) else dict.fromkeys(range(ranks), given)  # type: ignore[assignment]
    of_gpu = (
        {"memory_reserved_bytes": 40 * GIB, "memory_peak_bytes": 30 * GIB, "memory_retries": 0}
        if gpu is not None
        else {}
    )
    for rank, kinds in by_rank.items():
        timings = TimingLog(made, rank)
        total = sum(kinds.values())
        for step in range(1, steps + 1):
            timings.write(
                Breakdown(
                    **{
                        "time": BEGAN + step * total,
                        "attempt": 1,
                        "rank": rank,
                        "node": "n1",
                        "step": step,
                        "steps": 1,
                        "measured_steps": 1,
                        "step_seconds": total,
                        "seconds": {kind: kinds.get(kind, 0.0) for kind in KINDS},
                        "own_seconds": (own or {}).get(rank, total - kinds.get("exposed_communication", 0.0)),
                        **of_gpu,
                        **of_each,
                    }
                )
            )
        timings.close()
    total = max(sum(kinds.values()) for kinds in by_rank.values())
    _write_devices(made, steps * total, gpu, {"cores": cluster.cpu_cores, **(host or {})})
    metrics = AppendLog(made.metrics_path)
    for row in (
        rows if rows is not None else [{"step": n, "loss": 2.0, "samples_per_second": 320.0} for n in range(1, 41)]
    ):
        metrics.write({"attempt": 1, **row})
    metrics.close()
    write_status(made, Status(state, step=steps, steps_total=steps, attempt=1))
    if log is not None:
        made.log_path(1, "n1").write_text(log)
    return made


def _write_devices(run: RunDirectory, seconds: float, gpu: dict[str, Any] | None, host: dict[str, Any]) -> None:
    devices, samples = DeviceLog(run, "n1"), 11
    for number in range(samples):
        share = number / (samples - 1)
        values = {key: v[0] + (v[1] - v[0]) * share if isinstance(v, list) else v for key, v in host.items()}
        whole = {key: int(value) if key.endswith("bytes") else value for key, value in values.items()}
        gpus = None
        if gpu is not None:
            usual = {"index": 0, "name": H200, "utilisation": 0.95, "memory_total_bytes": 140 * GIB, "processes": 1}
            many = gpu.get("each", [{}])
            plain = {key: value for key, value in gpu.items() if key != "each"}
            gpus = tuple(GpuSample(**{**usual, "index": at, **plain, **own}) for at, own in enumerate(many))
        devices.write(
            DeviceSample(time=BEGAN + share * seconds, attempt=1, node="n1", gpus=gpus, host=HostSample(**whole))
        )
    devices.close()
