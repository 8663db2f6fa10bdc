"""Data: steps that wait for samples, and why: no workers, too few of them, dear samples, or a slow disk."""

from __future__ import annotations

import math

from gradus.diagnosis.evidence import ENOUGH_STEPS, FEWEST_STEPS, WARM_UP_STEPS, Evidence
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.user_source.files import user_files
from gradus.diagnosis.user_source.loaders import training_loader
from gradus.record.format import count_text

# Of a step. Below, other things decide; a loader that is just fast enough makes a step wait now and then.
# On a CPU, loading and computing take turns on the same cores, and whoever else is there takes from both.
LEAST_SHARE, LEAST_SHARE_ON_CPU = 0.2, 0.35
# To hand over a small batch takes a fraction of a millisecond on any machine; in steps of a few milliseconds, as of toy
# models, that is a large share, and nothing to act on.
LEAST_SECONDS = 0.003
MOST_WORKERS = 16
ROOM = 1.25  # workers that are just fast enough on average are late every other time
# Of the node's cores that the job itself keeps busy: above, another worker only takes time from the others.
CORES_ARE_BUSY = 0.85
# Storage that is read at this rate while steps wait and cores idle is what they wait for. Below, so little is read that
# it is something else: a dataset that computes, sleeps, or asks a server.
READS_MUCH_BYTES_PER_SECOND = 4 * 2**20
WAITING_CORES = 0.5
COMPUTES = 0.5  # cores of each rank: from here on, samples are computed and not waited for


def waits_for_data(evidence: Evidence) -> Finding | None:
    """data-bound, too-few-workers or slow-storage: the three are one symptom, so that one of them is named."""
    # That every rank waits: if only one does, the others wait for it, and it is a straggler.
    waited, step = min(evidence.by_rank("data").values(), default=0.0), evidence.judged_step_seconds
    least = LEAST_SHARE if evidence.has_gpu else LEAST_SHARE_ON_CPU
    if not step or waited < max(LEAST_SECONDS, least * (evidence.training_seconds or step)):
        return None
    workers, cores, used = evidence.workers, evidence.cores, evidence.cores_used
    facts = {
        "data_seconds": waited,
        "step_seconds": step,
        "share": waited / step,
        "workers": workers,
        "steps": evidence.steps_measured,
    }
    facts |= {"cores": cores, "cores_used": None if used is None else round(used, 2)}
    missing = () if used is not None else ("how busy the cores were",)
    share = f"{waited / step:.0%} of a step"
    if _waits_for_disk(evidence):
        rate = evidence.read_bytes_per_second
        return Finding(
            "slow-storage",
            f"{share} is waiting for samples, which come from storage as slowly as it is read",
            {**facts, "read_bytes_per_second": rate},
            "--set data.stage=auto (copies the data to each node's own disk first); many small files: gradus data pack",
            waited / step,
            "medium" if evidence.confidence == "high" else "low",
            not_measured=("how fast the storage could be: gradus bench storage",),
        )
    free = _cores_are_free(evidence)
    if workers and free and _were_asked_for(evidence):
        wanted = _workers_wanted(workers * step, step - waited, workers, _fitting(evidence))
        return Finding(
            "too-few-workers",
            f"{share} is waiting for samples: {workers} worker{'s do' if workers > 1 else ' does'} not keep up, "
            "and cores are free",
            facts,
            f"--set plan.workers={wanted}",
            waited / step,
            evidence.confidence,
            not_measured=missing,
        )
    if workers and free:
        change = f"--set plan.workers={_workers_wanted(workers * step, step - waited, workers, _fitting(evidence))}"
        why = f"the {count_text(workers, 'worker')} that gradus chose cannot keep up with such samples"
    elif workers:
        change = "make samples cheaper: decode and resize once and store them (gradus data pack), or take more cores"
        why = f"{workers} workers do not keep up, and the cores are busy"
    elif workers == 0:
        change = f"--set plan.workers={_workers_wanted(waited, step - waited, 0, _fitting(evidence))}"
        why = "they are loaded in the training process itself (plan.workers is 0)"
        if not free:
            change += "; the cores are busy, so cheaper samples may gain more: gradus data pack"
    else:
        change, why = "load samples in other processes: --set plan.workers=auto", "how they are loaded is not known"
    return Finding(
        "data-bound",
        f"{share} is waiting for samples: {why}",
        facts,
        change,
        waited / step,
        evidence.confidence,
        not_measured=missing,
    )


def waits_for_data_in_a_trace(evidence: Evidence) -> Finding | None:
    """Of a trace without a run, which knows nothing of workers and cores."""
    traces = [trace for trace in evidence.traces if trace.span_seconds > 0]
    if evidence.timings or not traces:
        return None
    share = min(trace.data_wait_seconds / trace.span_seconds for trace in traces)
    on_gpu = traces[0].device == "cuda"
    least, least_seconds = (LEAST_SHARE, 0.0) if on_gpu else (LEAST_SHARE_ON_CPU, LEAST_SECONDS)
    waited = min(trace.per_step(trace.data_wait_seconds) for trace in traces)
    if share < least or waited < least_seconds:
        return None
    steps = sum(trace.steps for trace in traces)
    loader = training_loader(user_files(evidence)) if evidence.run is not None else None
    workers = loader.workers if loader is not None else None
    change = "more workers: DataLoader(num_workers=...), or plan.workers in a recipe; or cheaper samples"
    if loader is not None:
        loading = waited if not workers else workers * waited / share
        wanted = _workers_wanted(loading, waited / share - waited, workers or 0, _fitting(evidence))
        change = f"{loader.place}: num_workers={wanted} in `{loader.code}`; or cheaper samples"
    return Finding(
        "data-bound",
        f"{share:.0%} of the traced steps is waiting for samples",
        {
            "data_wait_seconds": sum(trace.data_wait_seconds for trace in traces),
            "span_seconds": sum(trace.span_seconds for trace in traces),
            "share": share,
            "steps": steps,
            "workers": workers,
        },
        change,
        share,
        "medium",
        not_measured=("how busy the workers are",) if workers is not None else ("how many workers load",),
    )


def waits_for_data_by_metrics(evidence: Evidence) -> Finding | None:
    """Of a run without timings, as older versions left them: its metrics have the waits of rank 0."""
    if evidence.timings:
        return None
    rows = [row for row in evidence.rows if row.get("step_seconds") and row.get("data_seconds") is not None]
    rows = rows[WARM_UP_STEPS:]
    waited, step = sum(row["data_seconds"] for row in rows), sum(row["step_seconds"] for row in rows)
    if len(rows) < FEWEST_STEPS or waited < max(LEAST_SECONDS * len(rows), LEAST_SHARE * step):
        return None
    return Finding(
        "data-bound",
        f"{waited / step:.0%} of a step is waiting for samples",
        {
            "data_seconds": waited / len(rows),
            "step_seconds": step / len(rows),
            "share": waited / step,
            "workers": evidence.workers,
        },
        f"--set plan.workers={_workers_wanted(waited, step - waited, evidence.workers or 0)}",
        waited / step,
        "medium" if len(rows) >= ENOUGH_STEPS else "low",
        not_measured=("other ranks, and how busy the cores were",),
    )


def _waits_for_disk(evidence: Evidence) -> bool:
    rate, used, cores = evidence.read_bytes_per_second, evidence.cores_used, evidence.cores
    if rate is None or used is None or not cores:
        return False
    return rate >= READS_MUCH_BYTES_PER_SECOND and used < WAITING_CORES * cores


def _cores_are_free(evidence: Evidence) -> bool:
    """By what the job itself used; where that was not sampled, by counting processes."""
    if not evidence.cores:
        return True
    if evidence.cores_used is not None:
        return evidence.cores_used < CORES_ARE_BUSY * evidence.cores
    return ((evidence.workers or 0) + 1) * evidence.ranks_on_a_node < evidence.cores


def _were_asked_for(evidence: Evidence) -> bool:
    """Whether the recipe says how many workers there are. If not, it is the samples that are dear."""
    return evidence.recipe is not None and "workers" in evidence.recipe.plan.fixed


def _fitting(evidence: Evidence) -> int:
    """Workers that there can be for each rank: where loading keeps a core busy, each needs one."""
    cores, ranks, used = evidence.cores, evidence.ranks_on_a_node, evidence.cores_used
    if not cores or used is None or used < COMPUTES * ranks:
        return MOST_WORKERS
    return min(MOST_WORKERS, max(1, cores // max(1, ranks) - 1))


def _workers_wanted(loading_seconds: float, rest_seconds: float, now: int, most: int = MOST_WORKERS) -> int:
    """That load a step's samples, `loading_seconds` of one worker's time, while the rest of the step goes on."""
    needed = math.ceil(ROOM * loading_seconds / max(rest_seconds, 1e-3))
    return max(now + 1, min(most, needed))


RULES = (waits_for_data, waits_for_data_in_a_trace, waits_for_data_by_metrics)
