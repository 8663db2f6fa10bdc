"""Cores: more threads or loader workers than there are cores, so that they take turns and wait for each other."""

from __future__ import annotations

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.record.format import count_text

# Workers mostly wait; only when there are twice as many processes as cores, and the cores are busy, do they get in the
# way of training.
PROCESSES_PER_CORE = 2
BUSY = 0.8


def threads_beyond_cores(evidence: Evidence) -> bool:
    """Whether ranks that compute on a CPU have more threads than there are cores.

    One thread for each rank is as little as there can be: ranks may share a core, to try things out.
    """
    threads, cores = evidence.start.get("threads"), evidence.cores
    if evidence.has_gpu or not isinstance(threads, int) or not cores or threads < 2:
        return False
    return threads * evidence.ranks_on_a_node > cores


def cpu_oversubscription(evidence: Evidence) -> Finding | None:
    cores, ranks = evidence.cores, evidence.ranks_on_a_node
    if not cores or not evidence.step_seconds:
        return None
    if threads_beyond_cores(evidence):
        threads = int(evidence.start["threads"])
        working = sum(evidence.share(kind) for kind in ("forward", "backward", "optimizer", "exposed_communication"))
        return Finding(
            "cpu-oversubscription",
            f"{count_text(ranks, 'rank')} with {threads} threads each share "
            f"{count_text(cores, 'core')}, and take turns",
            {
                "threads_of_a_rank": threads,
                "ranks_on_a_node": ranks,
                "cores": cores,
                "cores_used": evidence.cores_used,
                "step_seconds": evidence.step_seconds,
            },
            f"OMP_NUM_THREADS={max(1, cores // ranks)} (or leave it unset: gradus train then shares out the cores)",
            working * (1 - cores / (threads * ranks)),
            evidence.confidence,
        )
    return _workers_beyond_cores(evidence, cores, ranks)


def _workers_beyond_cores(evidence: Evidence, cores: int, ranks: int) -> Finding | None:
    workers, used = evidence.workers, evidence.cores_used
    if not workers or used is None or used < BUSY * cores:
        return None
    processes = (workers + 1) * ranks
    if processes <= PROCESSES_PER_CORE * cores:
        return None
    fitting = max(1, cores // ranks - 1)
    working = sum(evidence.share(kind) for kind in ("data", "forward", "backward", "optimizer"))
    return Finding(
        "cpu-oversubscription",
        f"{ranks * workers} loader workers and {ranks} ranks share {cores} cores, which are busy",
        {"workers": workers, "ranks_on_a_node": ranks, "cores": cores, "cores_used": used},
        f"--set plan.workers={fitting}",
        working * (1 - cores / processes),
        "medium",
        not_measured=("how long processes waited for a core",),
    )


RULES = (cpu_oversubscription,)
