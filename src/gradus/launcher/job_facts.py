"""Job facts: what a job was given and what it used of that, from Slurm where it answers and from the run's files."""

from __future__ import annotations

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from gradus.launcher.job_place import read_place
from gradus.launcher.ledger import read_ledger
from gradus.launcher.script import COMMAND_FILE
from gradus.launcher.slurm.commands import SlurmError, records, run_slurm, slurm_moment
from gradus.launcher.slurm.description import JOBS_FILE, JobDescription
from gradus.launcher.slurm.node_ending import node_endings
from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.format import first_line
from gradus.record.goodput import Goodput, run_goodput
from gradus.record.status import read_status
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan
from gradus.schema.prediction import PREDICTION_FILE
from gradus.schema.scheduler import job_seconds

_WARM_UP_ROWS = 3  # compilation and caches: not what the speed is
_PATIENCE_SECONDS = 10.0  # the job is about to give its nodes back, and the report is not worth keeping them
_UNITS = {"": 2**20, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # Slurm's, powers of two; MiB where it says none


@dataclass(frozen=True)
class Failure:
    """An attempt of the job that did not end well, and what followed."""

    attempt: int
    what: str
    decision: str


@dataclass(frozen=True)
class JobFacts:
    """Allocated and used, of one job. None is what nobody measured."""

    goodput: Goodput
    state: str = "unknown"
    job_id: str | None = None
    nodes: tuple[str, ...] = ()
    ranks_per_node: int | None = None
    is_script: bool = False
    only_job: bool = True  # of the run: it has had no other

    cpus: int | None = None  # allocated, on all nodes
    gpus: int | None = None
    memory_bytes: int | None = None
    time_limit_seconds: float | None = None
    longest_seconds: float | None = None  # that its partition allows
    lead_seconds: float = 0.0  # before its time limit, a job is asked to stop
    waited_seconds: float | None = None  # in the queue

    cpu_seconds: float | None = None
    cpu_wall_seconds: float | None = None  # that these were counted over, summed over nodes
    silent_nodes: int = 0  # node and attempt pairs that left no word of what they used
    largest_process_bytes: int | None = None
    processes_per_node: int | None = None  # ranks, and their loaders' workers
    mfu: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_memory_limit_bytes: int | None = None
    step_seconds: float | None = None
    data_share: float | None = None  # of a step's time, waiting for data

    step: int = 0
    steps_total: int | None = None
    failures: tuple[Failure, ...] = ()

    @property
    def allocated_seconds(self) -> float:
        return self.goodput.allocated_seconds


def job_facts(run: RunDirectory, variables: Mapping[str, str] = os.environ) -> JobFacts:
    """The facts of the job that this process is part of; else, of the last job or launch of the run."""
    places = {number: read_place(run, number) for number in run.attempts}
    last = places.get(max(places, default=0))
    job_id = variables.get("SLURM_JOB_ID") or (str(last.job_id) if last else None)
    restart = int(variables.get("SLURM_RESTART_COUNT") or (last.restart if last else 0))
    of_job = [n for n, place in places.items() if place and (str(place.job_id), place.restart) == (job_id, restart)]
    mine = of_job or sorted(places)[-1:]
    record = _slurm_record("job", job_id) if job_id is not None else {}
    given = allocated_in_record(record)
    now, began = datetime.now(timezone.utc), slurm_moment(record.get("StartTime", ""))
    goodput = run_goodput(run, attempts=mine, since=began, until=now, running=max(mine, default=None))
    status = read_status(run)
    folder = run.attempt_path(max(mine, default=0))
    place = places.get(max(mine, default=0))
    nodes = place.nodes if place else ()
    ranks = _ranks_per_node(run, mine, len(nodes))
    return JobFacts(
        goodput,
        status.state if status else "unknown",
        job_id,
        nodes,
        ranks,
        is_script=(folder / COMMAND_FILE).exists(),
        only_job=len(mine) == len(places),
        **given,
        longest_seconds=_longest_seconds(record.get("Partition")),
        lead_seconds=_lead_seconds(run),
        waited_seconds=_waited(run, job_id, began, mine),
        **_used(run, mine, len(nodes)),
        processes_per_node=_processes(folder / "plan.yaml", ranks),
        gpu_memory_limit_bytes=_device_bytes(folder / PREDICTION_FILE),
        **_steps(run, mine, on_gpus=bool(given["gpus"])),
        step=status.step if status else 0,
        steps_total=status.steps_total if status else None,
        failures=_failures(run, mine),
    )


def allocated_in_record(record: Mapping[str, str]) -> dict[str, Any]:
    """CPUs, GPUs, memory and time in what `scontrol show job` prints, in any version.

    >>> allocated_in_record({"TRES": "cpu=4,mem=2G,node=2,billing=4,gres/gpu=4", "TimeLimit": "00:10:00"})
    {'cpus': 4, 'gpus': 4, 'memory_bytes': 2147483648, 'time_limit_seconds': 600.0}
    """
    text = record.get("AllocTRES") or record.get("TRES") or ""
    counted = dict(item.split("=", 1) for item in text.split(",") if "=" in item)
    memory = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", counted.get("mem", ""))
    return {
        "cpus": _number(counted.get("cpu")),
        "gpus": _number(counted.get("gres/gpu")) or _gpus_asked_for(record),
        "memory_bytes": int(float(memory[1]) * _UNITS[memory[2]]) if memory else None,
        "time_limit_seconds": _limit_seconds(record.get("TimeLimit", "")),
    }


def _gpus_asked_for(record: Mapping[str, str]) -> int | None:
    """Where a site does not count GPUs (AccountingStorageTRES), a job is given what it asked for.

    >>> _gpus_asked_for({"TresPerNode": "gres:gpu:a100:2", "NumNodes": "2"})
    4
    """
    found = re.search(r"gpu(?::[^:,()]*[^:,()\d][^:,()]*)?(?::(\d+))?(?=[,(]|$)", record.get("TresPerNode", ""))
    nodes = re.match(r"\d+", record.get("NumNodes", ""))
    return int(found[1] or 1) * int(nodes[0]) if found and nodes else None


def _limit_seconds(text: str) -> float | None:
    try:
        seconds = job_seconds(text)
    except ValueError:
        return None
    return seconds if seconds != float("inf") else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _slurm_record(kind: str, name: str) -> dict[str, str]:
    try:
        found = records(run_slurm(["scontrol", "show", kind, name], timeout=_PATIENCE_SECONDS))
    except SlurmError:
        return {}
    return found[0] if found else {}


def _longest_seconds(partition: str | None) -> float | None:
    return _limit_seconds(_slurm_record("partition", partition).get("MaxTime", "")) if partition else None


def _lead_seconds(run: RunDirectory) -> float:
    try:
        return float(JobDescription.load(run).lead_seconds)
    except (OSError, ValueError, KeyError, TypeError):  # no job of ours
        return 0.0


def _waited(run: RunDirectory, job_id: str | None, began: datetime | None, mine: Sequence[int]) -> float | None:
    """From when it was submitted, or from when the job gave its nodes back, until it was given nodes."""
    if began is None:
        return None
    lines = read_lines(run.job / JOBS_FILE).records
    since = [_moment(line.get("submitted_at")) for line in lines if str(line.get("job_id")) == job_id]
    earlier = [number for number in run.attempts if number < min(mine, default=0)]
    if earlier:
        told = [event.get("time") for event in read_events(run) if event.get("attempt") in earlier]
        since += [_moment(moment) for moment in told]
    known = [moment for moment in since if moment is not None and moment <= began + timedelta(seconds=1)]
    return max(0.0, (began - max(known)).total_seconds()) if known else None


def _used(run: RunDirectory, mine: Sequence[int], nodes: int) -> dict[str, Any]:
    """What the nodes counted of their processes, as each left it when its part of an attempt was over."""
    found = [ending for attempt in mine for ending in node_endings(run, attempt)]
    counted = [(one.cpu_seconds, one.wall_seconds) for one in found if one.cpu_seconds is not None and one.wall_seconds]
    peaks = [one.peak_memory_bytes for one in found if one.peak_memory_bytes]
    return {
        "cpu_seconds": sum(cpu for cpu, _ in counted) if counted else None,
        "cpu_wall_seconds": sum(wall for _, wall in counted) if counted else None,
        "silent_nodes": max(0, len(mine) * nodes - len(counted)),
        "largest_process_bytes": max(peaks) if peaks else None,
    }


def _steps(run: RunDirectory, mine: Sequence[int], *, on_gpus: bool) -> dict[str, Any]:
    rows = [row for row in read_lines(run.metrics_path).records if row.get("attempt") in mine]

    def usual(name: str) -> float | None:
        values = [float(row[name]) for row in rows if isinstance(row.get(name), (int, float))]
        return statistics.median(values[_WARM_UP_ROWS:] or values) if values else None

    seconds, data = usual("step_seconds"), usual("data_seconds")
    memory = [row["memory_peak_bytes"] for row in rows if isinstance(row.get("memory_peak_bytes"), int)]
    return {
        "mfu": usual("mfu"),
        "gpu_memory_bytes": max(memory) if memory and on_gpus else None,  # on CPUs it is that of a process
        "step_seconds": seconds,
        "data_share": data / seconds if seconds and data is not None else None,
    }


def _ranks_per_node(run: RunDirectory, mine: Sequence[int], nodes: int) -> int | None:
    told = [event["ranks"] for event in read_events(run) if event.get("attempt") in mine and event.get("ranks")]
    return int(told[-1]) // max(1, nodes) if told else None


def _processes(plan: Path, ranks: int | None) -> int | None:
    """How many processes a node has that load or compute; None where a script or a measurement decides."""
    try:
        workers = Plan.load(plan).workers
    except InputError:
        return None
    return ranks * (1 + workers) if ranks is not None and isinstance(workers, int) else None


def _device_bytes(prediction: Path) -> int | None:
    try:
        return _number(str(json.loads(prediction.read_text()).get("limit_bytes")))
    except (OSError, ValueError, AttributeError):
        return None


def _failures(run: RunDirectory, mine: Sequence[int]) -> tuple[Failure, ...]:
    lines = [line for line in read_ledger(run) if line.ended.attempt in mine and line.ended.state in ("failed", "lost")]
    return tuple(
        Failure(
            line.ended.attempt,
            first_line(line.ended.error_message or line.ended.error_kind or "no error was recorded"),
            line.verdict.decision,
        )
        for line in lines
    )


def _moment(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None
