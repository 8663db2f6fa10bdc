"""Stragglers: one rank that needs longer for its own part of a step, while all others wait for it."""

from __future__ import annotations

from statistics import median
from typing import Any

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.rules.pipeline import stage_of
from gradus.diagnosis.timeline.skew import skew

# As for the warning while a run goes on (faults/stragglers.py, where the measurements are).
SLOW = 1.5
LEAST_SHARE = 0.1  # of a step
LASTING = 0.6  # of the time: one slow moment is no straggler
LASTING_IN_TRACES = 0.8  # of the collectives in a few steps
_EVERY_RANKS_LINES = "steps=5,ranks=all,stacks"  # as ProfileRequest reads it


def straggler(evidence: Evidence) -> list[Finding]:
    step, own = evidence.judged_step_seconds, evidence.own_seconds
    if not step or len(own) < 2:
        return []
    found = []
    for rank, seconds in own.items():
        others = [other for other in own if other != rank and _same_work(evidence, rank, other)]
        if not others:
            continue
        usual = median(own[other] for other in others)
        if seconds < SLOW * usual or seconds - usual < LEAST_SHARE * step or not _lasts(evidence, rank, usual):
            continue
        found.append(_finding(evidence, rank, others, usual))
    # With two ranks there is one other, and with many the slowest decides for all.
    return sorted(found, key=lambda one: -(one.gain_at_most or 0))[:1]


def _same_work(evidence: Evidence, rank: int, other: int) -> bool:
    plan = evidence.plan
    return plan is None or plan.mesh.pipeline == 1 or stage_of(plan, rank) == stage_of(plan, other)


def _lasts(evidence: Evidence, rank: int, usual: float) -> bool:
    own = [one.own_seconds for one in evidence.steady if one.rank == rank and one.own_seconds is not None]
    return sum(seconds >= (1 + SLOW) / 2 * usual for seconds in own) >= LASTING * len(own)


def _finding(evidence: Evidence, rank: int, others: list[int], usual: float) -> Finding:
    assert evidence.step_seconds is not None
    own = evidence.own_seconds[rank]
    node = next(one.node for one in evidence.steady if one.rank == rank)
    data = evidence.by_rank("data")
    by_data = data[rank] - median(data[other] for other in others)
    why = "loading its data" if by_data >= (own - usual) / 2 else "computing"
    facts: dict[str, Any] = {
        "rank": rank,
        "node": node,
        "own_seconds": own,
        "others_own_seconds": usual,
        "ratio": round(own / usual, 2) if usual > 0 else None,
        "step_seconds": evidence.step_seconds,
        "why": why,
    }
    brakes = sorted(
        {b for s in evidence.device_samples if s.node == node for g in s.gpus or () for b in g.throttle or ()}
    )
    if brakes:
        facts["gpu_clock_held_down_by"] = brakes
    leave_out = f"leave the node out: gradus submit --resume {_name(evidence)} --exclude {node}"
    alone = len({one.node for one in evidence.steady}) == 1
    if why == "loading its data":
        change = f"look at how rank {rank} loads: its part of the data, what your dataset does on it alone, its disk"
        change += "" if alone else f"; or {leave_out}"
    elif alone:
        change = f"look at what else runs on the cores or the GPU of rank {rank}, or what your code does on it alone"
    else:
        change = leave_out
    if evidence.is_own_loop:
        change += _naming_the_line(evidence)
    return Finding(
        "straggler",
        f"rank {rank} on {node} needs {own / max(usual, 1e-9):.1f} times as long as the others for {why}; they wait",
        facts,
        change,
        min(1.0, (own - usual) / evidence.step_seconds),
        evidence.confidence,
    )


def _naming_the_line(evidence: Evidence) -> str:
    return f"; `{evidence.profiling(_EVERY_RANKS_LINES)}` records the lines that each rank is in"


def _name(evidence: Evidence) -> str:
    return f"{evidence.run.name}/{evidence.run.id}" if evidence.run else "RUN"


def straggler_in_traces(evidence: Evidence) -> Finding | None:
    """Of a script, which has no timings: in traces of several ranks, who comes last to most collectives."""
    traces = {trace.rank: trace for trace in evidence.traces if trace.rank is not None}
    if evidence.own_seconds or len(traces) < 2:
        return None
    found = skew(list(traces.values()))
    span = median(trace.span_seconds for trace in traces.values())
    if found.slowest is None or found.slowest_share < LASTING_IN_TRACES or span <= 0:
        return None
    waited = median(seconds for rank, seconds in found.waiting_seconds.items() if rank != found.slowest)
    if waited < LEAST_SHARE * span:
        return None
    return Finding(
        "straggler",
        f"rank {found.slowest} comes last to {found.slowest_share:.0%} of the collectives; the others wait for it",
        {
            "rank": found.slowest,
            "waiting_seconds_of_others": waited / max(found.steps, 1),
            "transfer_seconds": found.transfer_seconds / max(found.steps, 1),
            "collectives": found.collectives,
            "share": waited / span,
        },
        f"look at what rank {found.slowest} does that the others do not, and at what else runs on its node"
        f"{_naming_the_line(evidence)}",
        min(1.0, waited / span),
        "medium",
        not_measured=("why: its own time by kind",),
    )


RULES = (straggler, straggler_in_traces)
