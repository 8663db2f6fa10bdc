"""Job report: what a job was given, what it used of that, what was lost, and what to ask for next time."""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass
from typing import Any

from gradus.launcher.job_facts import JobFacts, job_facts
from gradus.record import strict_json
from gradus.record.directory import RunDirectory
from gradus.record.format import bytes_text, count_text, duration_text
from gradus.record.goodput import FORMULA
from gradus.schema.scheduler import slurm_time

REPORT_FILE = "report.json"
# What runs vary by from one to the next is not known here; a quarter is room for it, and little enough to start early.
_ROOM = 1.25
_TIME_STEP_SECONDS = 300  # nobody asks for 1:23:45
# Below this, so much is left that a smaller request would have done; above, it is about right.
_MOSTLY_UNUSED = 0.5
_WAITS_FOR_DATA = 0.1  # of a step: more than that is worth a sentence
_NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Flag:
    """An option of `gradus submit` for the next time, and why."""

    flag: str
    reason: str


def job_report(run: RunDirectory, facts: JobFacts | None = None) -> str:
    """The report of this process's job as text; its numbers also lie in `job/report.json`.

    It is printed before a job goes back into the queue, and must not keep it from that: what goes wrong is its text.
    """
    try:
        facts = facts or job_facts(run)
        if run.job.is_dir():
            with contextlib.suppress(OSError):  # the text is in the log all the same
                (run.job / REPORT_FILE).write_text(strict_json.pretty(report_document(facts)) + "\n")
        return report_text(facts)
    except Exception as error:
        return f"job report: could not be made ({type(error).__name__}: {error})"


def report_document(facts: JobFacts) -> dict[str, Any]:
    """The report as JSON."""
    return {
        **asdict(facts),
        "goodput": facts.goodput.document(),
        "allocated_seconds": facts.allocated_seconds,
        "flags": [asdict(flag) for flag in flags(facts)],
    }


def report_text(facts: JobFacts) -> str:
    """The report for people."""
    lines = [
        ("time", _time_text(facts)),
        ("GPUs", _gpu_text(facts)),
        ("CPUs", _cpu_text(facts)),
        ("memory", _memory_text(facts)),
        ("goodput", _goodput_text(facts)),
        *((f"attempt {failure.attempt}", f"{failure.what} → {failure.decision}") for failure in facts.failures),
    ]
    found = flags(facts)
    width = max(len(label) for label, _ in [*lines, ("next time", "")])
    text = [f"job report: {_what(facts)}", *(f"  {label:<{width}}  {said}" for label, said in lines)]
    same = "the same again is fine" if facts.state in ("finished", "stopped") else "first mend what failed"
    if facts.state == "stopped" and not facts.is_script and not facts.goodput.kept_seconds:
        same = "a longer --time: this job ended before its first step"
    text.append(f"  {'next time':<{width}}  {' '.join(flag.flag for flag in found) or same}")
    text += [f"  {'':<{width}}  {flag.flag}: {flag.reason}" for flag in found]
    return "\n".join(text)


def flags(facts: JobFacts) -> list[Flag]:
    """What to ask for next time, as far as this job shows it: one that failed before its work began shows nothing."""
    if facts.state not in ("finished", "stopped") and not facts.goodput.kept_seconds:
        return []
    return [flag for flag in (_time_flag(facts), _cpu_flag(facts), _memory_flag(facts), _gpu_flag(facts)) if flag]


# -- flags ------------------------------------------------------------------------------------------------------------


def _time_flag(facts: JobFacts) -> Flag | None:
    limit = facts.time_limit_seconds
    if facts.state == "finished" and facts.only_job:
        wanted = _rounded_up(facts.allocated_seconds * _ROOM + facts.lead_seconds)
        if limit is not None and wanted > limit * _MOSTLY_UNUSED and wanted <= limit:
            return None
        took = duration_text(facts.allocated_seconds)
        return Flag(_time_option(wanted), f"it took {took}, and a quarter more is room; a shorter job starts sooner")
    left = _seconds_left(facts)
    if left is None or facts.state == "failed":
        return None
    wanted, longest = _rounded_up(left * _ROOM + facts.lead_seconds), facts.longest_seconds
    if limit is not None and limit * _MOSTLY_UNUSED < wanted <= limit:
        return None
    assert facts.steps_total is not None
    steps = f"{facts.steps_total - facts.step} of {facts.steps_total} steps are left"
    pace = f"{steps}, {duration_text(left)} at the pace of this job"
    if longest is None or wanted <= longest:
        return Flag(_time_option(wanted), f"{pace}; then one job is enough")
    if limit is not None and limit >= longest:
        return None  # it has what there is, and goes on by itself
    return Flag(_time_option(longest), f"{pace}, and the partition allows no more; the run goes on by itself")


def _seconds_left(facts: JobFacts) -> float | None:
    """Steps cost what they did, with what was done between them and what failures took; starting costs once."""
    spent = facts.goodput
    if facts.steps_total is None or facts.step >= facts.steps_total or not facts.step_seconds or not spent.kept_seconds:
        return None
    besides = spent.lost_seconds + spent.evaluation_seconds + spent.saving_seconds
    starting = (spent.starting_seconds + spent.other_seconds) / max(1, spent.attempts)
    return (facts.steps_total - facts.step) * facts.step_seconds * (1 + besides / spent.kept_seconds) + starting


def _cpu_flag(facts: JobFacts) -> Flag | None:
    cores, used = _cores_per_node(facts), _used_cores_per_node(facts)
    if cores is None or used is None or facts.ranks_per_node is None or facts.silent_nodes:
        return None
    # One core for each process that works: an average hides that all of them work at the same moment.
    least = facts.processes_per_node or facts.ranks_per_node
    wanted = max(least, math.ceil(used * _ROOM))
    if wanted > cores * _MOSTLY_UNUSED:
        return None
    return Flag(
        f"--sbatch --cpus-per-task={wanted}",
        f"of {cores} cores on a node {used:.1f} were busy on average, and {least} processes need one each",
    )


def _memory_flag(facts: JobFacts) -> Flag | None:
    most = _memory_at_most(facts)
    nodes = max(1, len(facts.nodes))
    if most is None or facts.memory_bytes is None or facts.silent_nodes:
        return None
    wanted = max(1, math.ceil(most / 2**30))
    if wanted * 2**30 > facts.memory_bytes / nodes * _MOSTLY_UNUSED:
        return None
    given = bytes_text(facts.memory_bytes / nodes)
    why = f"at most {bytes_text(most)} of {given} on a node were in use: {_processes_at_most(facts)} processes, the "
    return Flag(f"--sbatch --mem={wanted}G", f"{why}largest of {bytes_text(facts.largest_process_bytes or 0)}")


def _gpu_flag(facts: JobFacts) -> Flag | None:
    nodes = len(facts.nodes)
    if not facts.gpus or not nodes or facts.ranks_per_node is None or facts.gpus // nodes <= facts.ranks_per_node:
        return None
    given = facts.gpus // nodes
    return Flag(
        f"--sbatch --gres=gpu:{facts.ranks_per_node}",
        f"each node had {given} GPUs and {facts.ranks_per_node} ranks: {given - facts.ranks_per_node} did nothing",
    )


# -- lines ------------------------------------------------------------------------------------------------------------


def _what(facts: JobFacts) -> str:
    job = f"job {facts.job_id}" if facts.job_id else "this launch"
    where = f" on {count_text(len(facts.nodes), 'node')}" if facts.nodes else ""
    each = facts.ranks_per_node
    ranks = f" × {count_text(each, 'rank')}" if each else ""
    how_far = "" if facts.is_script and not facts.step else f", step {facts.step}"
    of_all = f" of {facts.steps_total}" if facts.steps_total and how_far else ""
    return f"{job}{where}{ranks}: {facts.state}{how_far}{of_all}"


def _time_text(facts: JobFacts) -> str:
    used = duration_text(facts.allocated_seconds)
    limit = facts.time_limit_seconds
    text = f"{used} of {duration_text(limit)} allowed ({facts.allocated_seconds / limit:.0%})" if limit else used
    waited = facts.waited_seconds
    return f"{text}; waited {duration_text(waited)} in the queue" if waited is not None else text


def _gpu_text(facts: JobFacts) -> str:
    if not facts.gpus:
        return "none allocated"
    hours = facts.gpus * facts.allocated_seconds / 3600
    text = f"{facts.gpus} for {duration_text(facts.allocated_seconds)} = {hours:.3g} GPU-hours"
    used = f"MFU {facts.mfu:.1%} while in steps" if facts.mfu is not None else f"utilisation {_NOT_MEASURED}"
    memory = ""
    if facts.gpu_memory_bytes and facts.gpu_memory_limit_bytes:
        of_all = f" of {bytes_text(facts.gpu_memory_limit_bytes)}"
        memory = f"; memory {bytes_text(facts.gpu_memory_bytes)}{of_all} on rank 0"
    return f"{text}; {used}{memory}"


def _cpu_text(facts: JobFacts) -> str:
    used, cores = _used_cores_per_node(facts), _cores_per_node(facts)
    silent = (
        f" ({facts.silent_nodes} of the nodes' parts left no word and are not counted)" if facts.silent_nodes else ""
    )
    if used is None:
        return f"{f'{facts.cpus} allocated; ' if facts.cpus else ''}use {_NOT_MEASURED}"
    of_all = f" of {cores} cores on a node ({used / cores:.0%})" if cores else " cores on a node"
    data = ""
    if facts.data_share is not None and facts.data_share > _WAITS_FOR_DATA:
        data = f"; {facts.data_share:.0%} of a step waited for data"
    return f"{used:.1f}{of_all} busy on average{data}{silent}"


def _memory_text(facts: JobFacts) -> str:
    nodes = max(1, len(facts.nodes))
    given = f" of {bytes_text(facts.memory_bytes / nodes)} allocated" if facts.memory_bytes else ""
    if facts.largest_process_bytes is None:
        return f"{_NOT_MEASURED}{given}"
    most = _memory_at_most(facts)
    if most is None:
        return f"largest process {bytes_text(facts.largest_process_bytes)}; of a whole node {_NOT_MEASURED}{given}"
    return (
        f"at most {bytes_text(most)}{given} on a node: {_processes_at_most(facts)} processes, the largest of "
        f"{bytes_text(facts.largest_process_bytes)}"
    )


def _goodput_text(facts: JobFacts) -> str:
    found = facts.goodput
    again = count_text(found.attempts, "attempt")
    if found.share is None:
        return f"{_NOT_MEASURED}: no step was recorded; {again}"
    parts = [
        f"{found.share:.0%} = {FORMULA} = {found.kept_seconds:.0f} ÷ {found.allocated_seconds:.0f}",
        f"lost {count_text(found.lost_steps, 'step')} ({found.lost_seconds:.0f} s)",
        f"starting {found.starting_seconds:.0f} s in {again}",
        f"evaluation {found.evaluation_seconds:.0f} s",
        f"saving {found.saving_seconds:.0f} s",
        f"other {found.other_seconds:.0f} s",
    ]
    return "; ".join(parts)


def _cores_per_node(facts: JobFacts) -> int | None:
    return facts.cpus // max(1, len(facts.nodes)) if facts.cpus else None


def _used_cores_per_node(facts: JobFacts) -> float | None:
    if facts.cpu_seconds is None or not facts.cpu_wall_seconds:
        return None
    return facts.cpu_seconds / facts.cpu_wall_seconds


def _memory_at_most(facts: JobFacts) -> float | None:
    """Of a node. The system tells only the largest process of those that ended; the others were no larger."""
    processes = _processes_at_most(facts)
    return facts.largest_process_bytes * processes if facts.largest_process_bytes and processes else None


def _processes_at_most(facts: JobFacts) -> int | None:
    """Of a node: ranks and loaders, a process of each rank that writes checkpoints, torchrun and the node's task."""
    if facts.processes_per_node is None or facts.ranks_per_node is None:
        return None
    return facts.processes_per_node + facts.ranks_per_node + 2


def _rounded_up(seconds: float) -> float:
    return math.ceil(seconds / _TIME_STEP_SECONDS) * _TIME_STEP_SECONDS


def _time_option(seconds: float) -> str:
    return f"--time {slurm_time(seconds)}"
