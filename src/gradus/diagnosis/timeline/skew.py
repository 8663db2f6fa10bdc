"""Skew: of the time that ranks spend in collectives, what they wait for the slowest, and what the transfer takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gradus.diagnosis.timeline.trace_analysis import Collective, Skew, TraceAnalysis
from gradus.schema.errors import InputError


def skew(analyses: Sequence[TraceAnalysis]) -> Skew:
    """Over traces of the same steps, one of each rank. Ranks' clocks need not agree: only durations are compared."""
    ranks = [analysis.rank if analysis.rank is not None else number for number, analysis in enumerate(analyses)]
    twice = {rank for rank in ranks if ranks.count(rank) > 1}
    if twice:
        raise InputError(f"traces: several are of rank {min(twice)}; give one of each rank", found=sorted(ranks))
    by_group: dict[str, dict[int, list[Collective]]] = defaultdict(lambda: defaultdict(list))
    for rank, analysis in zip(ranks, analyses, strict=True):
        for one in analysis.collectives:
            by_group[one.group or ""][rank].append(one)
    transfer, met, last = 0.0, 0, dict.fromkeys(ranks, 0)
    waiting = dict.fromkeys(ranks, 0.0)
    for members in by_group.values():
        if len(members) < 2:
            continue
        for together in zip(*(members[rank] for rank in sorted(members)), strict=False):
            seconds = dict(zip(sorted(members), (one.seconds for one in together), strict=True))
            shortest = min(seconds.values())
            met += 1
            transfer += shortest
            last[min(seconds, key=lambda rank: seconds[rank])] += 1
            for rank, found in seconds.items():
                waiting[rank] += found - shortest
    slowest = min(waiting, key=lambda rank: waiting[rank]) if met else None
    return Skew(
        ranks=tuple(sorted(ranks)),
        collectives=met,
        transfer_seconds=transfer,
        waiting_seconds=waiting,
        slowest=slowest,
        slowest_share=last[slowest] / met if slowest is not None else 0.0,
        steps=min((analysis.steps for analysis in analyses), default=0),
    )
