"""Runs as Prometheus reads them: text format 0.0.4, over HTTP or as a file for node-exporter's textfile collector.

Base units throughout: seconds, bytes, joules, hertz, ratios from 0 to 1. What nobody measured has no sample.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradus.diagnosis.live.followed import Snapshot
from gradus.record.metrics import validation_results
from gradus.record.timings import mean_seconds, mean_step_seconds

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("queued", "starting", "running", "stopped", "finished", "failed", "lost", "unknown")
# A node whose sampler is gone has no utilisation any more, not the last one.
_STALE_SECONDS = 60.0

Labels = Mapping[str, str]


class _Family(NamedTuple):
    kind: Literal["gauge", "counter"]
    help: str


FAMILIES = {
    "gradus_runs": _Family("gauge", "Runs in the watched folder, also those too old to be told of here."),
    "gradus_run_state": _Family("gauge", "1 for the state the run is in, 0 for the others."),
    "gradus_run_step": _Family("gauge", "The last optimizer step that was logged."),
    "gradus_run_steps_planned": _Family("gauge", "Steps after which the run is done."),
    "gradus_run_loss": _Family("gauge", "Training loss of the last logged step; may be NaN."),
    "gradus_run_validation": _Family("gauge", "Loss and metrics of the last evaluation, by name."),
    "gradus_run_learning_rate": _Family("gauge", "Learning rate of the last logged step."),
    "gradus_run_gradient_norm": _Family("gauge", "Norm of the gradient at the last logged step."),
    "gradus_run_tokens_per_second": _Family("gauge", "Tokens per second over all ranks, median of recent rows."),
    "gradus_run_samples_per_second": _Family("gauge", "Samples per second over all ranks at the last logged step."),
    "gradus_run_mfu": _Family("gauge", "Model FLOPs utilisation, 0 to 1; only where the device's peak is known."),
    "gradus_run_step_seconds": _Family("gauge", "Seconds of a step by kind, mean over ranks and the last log window."),
    "gradus_run_step_duration_seconds": _Family("gauge", "Seconds of a whole step by the wall clock."),
    "gradus_run_rank_own_seconds": _Family("gauge", "Seconds of a step that are a rank's own work, without waiting."),
    "gradus_run_rank_memory_peak_bytes": _Family("gauge", "Most memory that a rank held."),
    "gradus_run_eta_seconds": _Family("gauge", "Seconds to the last step at the present speed."),
    "gradus_run_goodput": _Family("gauge", "Seconds in steps that were kept over seconds allocated, 0 to 1."),
    "gradus_run_allocated_seconds": _Family("gauge", "Seconds for which the run has had its nodes."),
    "gradus_run_restarts_total": _Family("counter", "Attempts after the first one."),
    "gradus_run_lost_steps_total": _Family("counter", "Steps that had to be made again."),
    "gradus_run_saved_step": _Family("gauge", "Step of the newest whole checkpoint."),
    "gradus_run_last_checkpoint_timestamp_seconds": _Family("gauge", "Unix time of the newest whole checkpoint."),
    "gradus_run_last_update_timestamp_seconds": _Family("gauge", "Unix time of the last sign of life."),
    "gradus_run_last_progress_timestamp_seconds": _Family("gauge", "Unix time at which a step was last logged."),
    "gradus_run_findings": _Family("gauge", "What gradus explain finds, by severity."),
    "gradus_run_finding_gain_ratio": _Family("gauge", "Share of the step time that a finding could save at most."),
    "gradus_gpu_utilisation_ratio": _Family("gauge", "Share of the time in which any kernel ran."),
    "gradus_gpu_memory_used_bytes": _Family("gauge", "Memory in use on the GPU, by everybody."),
    "gradus_gpu_memory_total_bytes": _Family("gauge", "Memory of the GPU."),
    "gradus_gpu_power_watts": _Family("gauge", "Power that the GPU draws."),
    "gradus_gpu_power_limit_watts": _Family("gauge", "Power that the GPU may draw."),
    "gradus_gpu_temperature_celsius": _Family("gauge", "Temperature of the GPU."),
    "gradus_gpu_clock_hertz": _Family("gauge", "Clock of the multiprocessors."),
    "gradus_gpu_clock_max_hertz": _Family("gauge", "Highest clock of the multiprocessors."),
    "gradus_gpu_throttled": _Family("gauge", "1 for each reason for which the clock is held down."),
    "gradus_gpu_energy_joules_total": _Family("counter", "The driver's energy counter."),
    "gradus_host_cpu_utilisation_ratio": _Family("gauge", "Of the cores that the job may use."),
    "gradus_host_memory_used_bytes": _Family("gauge", "Memory in use on the host, of the job's limit if it has one."),
    "gradus_host_memory_total_bytes": _Family("gauge", "Memory that the job may use."),
}


class Sample(NamedTuple):
    """One line."""

    name: str
    labels: Labels
    value: float


def exposition(snapshots: Sequence[Snapshot], runs: int | None = None, now: float | None = None) -> str:
    """All there is to say of these runs; `runs` is how many there are in all."""
    now = time.time() if now is None else now
    found: dict[str, list[Sample]] = {name: [] for name in FAMILIES}
    if runs is not None:
        found["gradus_runs"].append(Sample("gradus_runs", {}, runs))
    for snapshot in snapshots:
        for sample in samples_of(snapshot, now):
            found[sample.name].append(sample)
    lines: list[str] = []
    for name, family in FAMILIES.items():
        if found[name]:
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
            lines += [_line(sample) for sample in found[name]]
    return "".join(f"{line}\n" for line in lines)


def samples_of(snapshot: Snapshot, now: float) -> Iterator[Sample]:
    """Of one run, those that have a value."""
    run = {"run": snapshot.view.run.id, "name": snapshot.view.run.name}
    candidates = [*_of_run(snapshot, run), *_of_ranks(snapshot, run), *_of_devices(snapshot, run, now)]
    for name, labels, value in candidates:
        if isinstance(value, (int, float)):
            yield Sample(name, labels, value)


_Candidate = tuple[str, Labels, Any]


def _of_run(snapshot: Snapshot, run: Labels) -> Iterator[_Candidate]:
    view, row = snapshot.view, snapshot.row
    for state in STATES:
        yield "gradus_run_state", {**run, "state": state}, int(view.state == state)
    yield "gradus_run_step", run, view.step
    yield "gradus_run_steps_planned", run, view.steps_total
    yield "gradus_run_loss", run, row.get("loss")
    for metric, result in validation_results(row).items():
        yield "gradus_run_validation", {**run, "metric": metric}, result
    yield "gradus_run_learning_rate", run, row.get("lr")
    yield "gradus_run_gradient_norm", run, row.get("grad_norm")
    yield from _of_speed(snapshot, run)
    goodput = view.goodput
    if goodput is not None:
        yield "gradus_run_goodput", run, goodput.share
        yield "gradus_run_allocated_seconds", run, goodput.allocated_seconds
        yield "gradus_run_lost_steps_total", run, goodput.lost_steps
    yield "gradus_run_restarts_total", run, max(0, view.attempt - 1)
    yield "gradus_run_saved_step", run, view.saved_step
    yield "gradus_run_last_checkpoint_timestamp_seconds", run, view.saved_at.timestamp() if view.saved_at else None
    yield "gradus_run_last_update_timestamp_seconds", run, snapshot.updated_at
    yield "gradus_run_last_progress_timestamp_seconds", run, snapshot.progressed_at
    for severity in ("fatal", "quality", "slow", "waste"):
        if snapshot.findings is not None:
            count = sum(finding.severity == severity for finding in snapshot.findings)
            yield "gradus_run_findings", {**run, "severity": severity}, count
    gains = {finding.id: finding.gain_at_most for finding in reversed(snapshot.findings or ())}
    for finding, gain in sorted(gains.items()):
        yield "gradus_run_finding_gain_ratio", {**run, "finding": finding}, gain


def _of_speed(snapshot: Snapshot, run: Labels) -> Iterator[_Candidate]:
    """Only of a run that goes on: the speed of one that is over is history."""
    view, row = snapshot.view, snapshot.row
    if view.state != "running":
        return
    tokens = view.speed is not None and view.speed.unit == "tok"
    yield "gradus_run_tokens_per_second", run, view.speed.per_second if view.speed is not None and tokens else None
    yield "gradus_run_samples_per_second", run, row.get("samples_per_second")
    yield "gradus_run_mfu", run, row.get("mfu")
    yield "gradus_run_eta_seconds", run, view.eta_seconds
    for kind, seconds in mean_seconds(snapshot.timings).items():
        yield "gradus_run_step_seconds", {**run, "kind": kind}, seconds
    whole = mean_step_seconds(snapshot.timings)
    yield "gradus_run_step_duration_seconds", run, whole if whole is not None else view.step_seconds


def _of_ranks(snapshot: Snapshot, run: Labels) -> Iterator[_Candidate]:
    if snapshot.view.state != "running":
        return
    for one in snapshot.timings:
        rank = {**run, "node": one.node, "rank": str(one.rank)}
        yield "gradus_run_rank_own_seconds", rank, one.own_seconds
        yield "gradus_run_rank_memory_peak_bytes", rank, one.memory_peak_bytes


def _of_devices(snapshot: Snapshot, run: Labels, now: float) -> Iterator[_Candidate]:
    for sample in snapshot.devices:
        if snapshot.view.state != "running" or now - sample.time > _STALE_SECONDS:
            continue
        node = {**run, "node": sample.node}
        host = sample.host
        yield "gradus_host_cpu_utilisation_ratio", node, host.cpu_utilisation
        yield "gradus_host_memory_used_bytes", node, host.memory_used_bytes
        yield "gradus_host_memory_total_bytes", node, host.memory_total_bytes
        for gpu in sample.gpus or ():
            one = {**node, "gpu": str(gpu.index)}
            yield "gradus_gpu_utilisation_ratio", one, gpu.utilisation
            yield "gradus_gpu_memory_used_bytes", one, gpu.memory_used_bytes
            yield "gradus_gpu_memory_total_bytes", one, gpu.memory_total_bytes
            yield "gradus_gpu_power_watts", one, gpu.power_watts
            yield "gradus_gpu_power_limit_watts", one, gpu.power_limit_watts
            yield "gradus_gpu_temperature_celsius", one, gpu.temperature_celsius
            yield "gradus_gpu_clock_hertz", one, gpu.clock_mhz * 1e6 if gpu.clock_mhz is not None else None
            yield "gradus_gpu_clock_max_hertz", one, gpu.clock_max_mhz * 1e6 if gpu.clock_max_mhz is not None else None
            for reason in gpu.throttle or ():
                yield "gradus_gpu_throttled", {**one, "reason": reason}, 1
            yield "gradus_gpu_energy_joules_total", one, gpu.energy_joules


def _line(sample: Sample) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}} {_number(sample.value)}" if labels else f"{sample.name} {_number(sample.value)}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(int(value))


def write_textfile(path: Path, text: str) -> None:
    """Replace the file at once: the collector reads whenever it likes. Others may read it, as node-exporter must."""
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # no `.prom` at its end
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
