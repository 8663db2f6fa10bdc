"""Dead runs: why a run failed, was lost, or has not begun. One finding, the first cause that explains it."""

from __future__ import annotations

from collections.abc import Callable

from gradus.diagnosis.demise import Demise, demise_of
from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.rules.collective_timeout import collective_timeout
from gradus.diagnosis.rules.jobs import ended_by_slurm, job_pending, killed, lost
from gradus.diagnosis.rules.not_a_number import not_a_number
from gradus.diagnosis.rules.out_of_memory import out_of_memory
from gradus.diagnosis.rules.starting import import_error, no_process_group


def why_it_is_dead(evidence: Evidence) -> Finding | None:
    """None for a run that goes on, ended well, or was stopped because somebody asked for it."""
    demise = demise_of(evidence)
    if demise is None:
        return None
    return next((finding for cause in _CAUSES if (finding := cause(demise)) is not None), None)


def crash(demise: Demise) -> Finding | None:
    """Anything else: the first rank that failed, with what it said and where in the user's code."""
    if not demise.message:
        return None
    place, said = demise.place, demise.last_output
    verdict = f"{demise.who} failed: {demise.first_line}"
    if said:
        verdict = f"{demise.who} left with: {said[-1]}"
    if place is not None:
        verdict += f" (at {place})"
    facts = {**demise.facts, "kind": demise.error.get("kind"), "error": demise.first_line, "output": said or None}
    facts |= {name: demise.error[name] for name in ("signal", "rank_exit_code", "field") if name in demise.error}
    hint = demise.error.get("hint")
    if hint:
        change = str(hint)
    elif "line" in facts:
        change = f"mend {facts['file']}, line {facts['line']}; then {demise.again}"
    else:
        change = f"see gradus runs logs {demise.run.name}/{demise.run.id}; then {demise.again}"
    return Finding("crash", verdict, facts, change, None, "high" if place or hint else "medium", "fatal")


# Slurm's word comes before that of ranks, which only see the signal; and what a rank says before that others miss it.
_CAUSES: tuple[Callable[[Demise], Finding | None], ...] = (
    *(job_pending, ended_by_slurm, out_of_memory, not_a_number, no_process_group, import_error, collective_timeout),
    *(killed, crash, lost),
)
RULES = (why_it_is_dead,)
