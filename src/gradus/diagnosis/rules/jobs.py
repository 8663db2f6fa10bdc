"""Jobs: a run that waits in Slurm's queue, that Slurm ended, or that nobody tells the end of."""

from __future__ import annotations

import re
from typing import Any

from gradus.checkpoint.manifest import committed_steps
from gradus.diagnosis.demise import Demise
from gradus.diagnosis.finding import Finding
from gradus.launcher.slurm.reasons import ended_words

# Ends that are Slurm's doing, by its own name of them, with what to do.
_BY_SLURM = ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED", "DEADLINE", "BOOT_FAIL", "REVOKED")
# What slurmstepd writes into a job's output, where no accounts are kept that could be asked.
_SAID: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"DUE TO TIME LIMIT", re.IGNORECASE), "TIMEOUT"),
    (re.compile(r"DUE TO PREEMPTION", re.IGNORECASE), "PREEMPTED"),
    (re.compile(r"DUE TO NODE FAILURE|NODE_FAIL", re.IGNORECASE), "NODE_FAIL"),
    (re.compile(r"oom[-_ ]?kill event|OOM Killed|Exceeded (?:job|step) memory limit", re.IGNORECASE), "OUT_OF_MEMORY"),
    (re.compile(r"\*\*\* (?:JOB|STEP) \S+ ON \S+ CANCELLED AT", re.IGNORECASE), "CANCELLED"),
)


def job_pending(demise: Demise) -> Finding | None:
    now = demise.standing
    if demise.state != "queued" or now is None:
        return None
    reason = now.reason
    evidence: dict[str, Any] = {"state": "queued", "job_id": now.job_id}
    if reason is not None:
        evidence["slurm_reason"] = reason.slurm
    if now.starts_at is not None:
        evidence["expected_start"] = now.starts_at.isoformat()
    name = f"{demise.run.name}/{demise.run.id}"
    advice = reason.advice.replace("RUN", name).replace("JOB", now.job_id or "JOB") if reason is not None else ""
    words = reason.text if reason is not None else "Slurm does not say why"
    change = advice or f"nothing: it starts by itself; gradus runs cancel {name} takes it out of the queue"
    return Finding("job-pending", f"job {now.job_id} waits: {words}", evidence, change, None, "high", "fatal")


def ended_by_slurm(demise: Demise) -> Finding | None:
    """For a reason of Slurm's own: time, memory, a node, a more important job, a person."""
    if not demise.is_an_effect:
        return None
    how, said = _end_of_job(demise)
    return _by_slurm(demise, how, said) if how is not None else None


def killed(demise: Demise) -> Finding | None:
    """A rank by a signal, and nobody says why."""
    signal = demise.error.get("signal") or _signal(demise.message)
    if not demise.is_an_effect or signal not in ("SIGKILL", "SIGTERM", "SIGHUP"):
        return None
    verdict = f"{demise.who} was killed by {signal}, and nobody says by whom"
    evidence = {**demise.facts, "signal": signal}
    change = (
        f"{demise.again}; if it comes again: `dmesg -T | grep -i kill` on that node tells whether the kernel "
        "did it for lack of memory (then fewer workers or a smaller micro-batch help)"
    )
    return Finding("job-killed", verdict, evidence, change, None, "medium", "fatal")


def lost(demise: Demise) -> Finding | None:
    """Nobody wrote how it ended."""
    if demise.state != "lost":
        return None
    note = demise.standing.note if demise.standing is not None else None
    saved = max(committed_steps(demise.run.checkpoints), default=None)
    evidence: dict[str, Any] = {**demise.facts, "saved_step": saved}
    status = demise.evidence.status
    if status is not None:
        evidence |= {"last_sign_of_life": status.updated_at.isoformat(timespec="seconds"), "host": status.host}
    why = note or "its launcher was killed, or its machine went down, before it could write how the run ended"
    kept = f"from step {saved}" if saved is not None else "from the beginning: nothing was saved"
    last = [line for line in demise.job_lines if line.strip()][-1:]
    if last:
        evidence["last_line_of_the_job"] = last[0]
    change = f"{demise.resume} goes on {kept}"
    return Finding("lost", f"the run is lost: {why}", evidence, change, None, "high", "fatal")


def _end_of_job(demise: Demise) -> tuple[str | None, str | None]:
    """Slurm's name of the end, and the line that says so."""
    job = demise.standing.job if demise.standing is not None else None
    if job is not None and job.is_over:
        state = job.state.split(" ")[0]
        if state in _BY_SLURM:
            return state, None
    for line in reversed(demise.log.splitlines()):
        for words, state in _SAID:
            if state == "CANCELLED" and demise.state != "lost":
                continue  # so ends what is left of a job whose rank has failed, too
            if words.search(line) and ("slurm" in line.lower() or "error:" in line.lower()):
                return state, line.strip()
    return None, None


def _by_slurm(demise: Demise, how: str, said: str | None) -> Finding:
    saved = max(committed_steps(demise.run.checkpoints), default=None)
    job = demise.standing.job_id if demise.standing is not None else None
    evidence: dict[str, Any] = {**demise.facts, "slurm_state": how, "job_id": job, "saved_step": saved}
    if said is not None:
        evidence["slurm_said"] = said
    kept = f"{demise.resume} goes on from step {saved}" if saved is not None else f"{demise.resume} starts again"
    change = {
        "TIMEOUT": f"{kept}; a longer --time, or saving more often (--set checkpoint.every=10m), loses less",
        "PREEMPTED": f"{kept}; another --qos or --partition is not preempted",
        "NODE_FAIL": f"{kept}, on other nodes",
        "OUT_OF_MEMORY": '--sbatch "--mem=0" gives the job all memory of its nodes (scheduler.mem: 0 in the cluster '
        f"file); or fewer workers: --set plan.workers=0; then {kept}",
    }.get(how, kept)
    words = ended_words(how) or how
    verdict = f"{f'job {job}' if job else 'the job'} was ended by Slurm: {words} ({how})"
    return Finding("job-killed", verdict, evidence, change, None, "high", "fatal")


def _signal(message: str) -> str | None:
    found = re.search(r"was killed by (SIG\w+)", message)
    return found[1] if found is not None else None
