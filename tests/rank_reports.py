"""Reports of ranks as tests of watchdog and stragglers make them up."""

from __future__ import annotations

from typing import Any

from gradus.faults.rank_report import RankReport


def report(rank: int, **changes: Any) -> RankReport:
    usual: dict[str, Any] = {
        "number": 1,
        "rank": rank,
        "node": f"n{rank // 2}",
        "pid": 1000 + rank,
        "step": 40,
        "moves": 400,
        "phase": "forward-backward",
        "phase_seconds": 300.0,
    }
    return RankReport(**{**usual, **changes})


def reports(count: int, **of_rank: dict[str, Any]) -> dict[int, RankReport]:
    """All wait for others but those that are described, as `r2={...}`."""
    waiting = {"waiting_seconds": 300.0}
    return {rank: report(rank, **{**waiting, **of_rank.get(f"r{rank}", {})}) for rank in range(count)}
