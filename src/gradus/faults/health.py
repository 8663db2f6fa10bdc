"""health.json: how each rank of a run is, replaced every few seconds."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

from gradus.faults.rank_report import RankReport
from gradus.faults.stragglers import Straggler
from gradus.record import strict_json
from gradus.record.directory import RunDirectory
from gradus.record.node import node_name


def write_health(
    run: RunDirectory, reports: Mapping[int, RankReport], silent: set[int], stragglers: Iterable[Straggler]
) -> None:
    """Raises OSError when it cannot be written."""
    document = {
        "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        "step": max((report.step for report in reports.values()), default=0),
        "ranks": [
            {
                "rank": rank,
                "node": report.node,
                "step": report.step,
                "phase": "silent" if rank in silent else report.phase,
                "phase_seconds": round(report.phase_seconds, 3),
                "own_seconds": report.own_seconds,
                "data_seconds": report.data_seconds,
                "memory_peak_bytes": report.memory_peak_bytes,
            }
            for rank, report in sorted(reports.items())
        ],
        "stragglers": [
            {"rank": one.rank, "node": one.node, "ratio": round(one.ratio, 3), "since_step": one.since_step}
            for one in stragglers
        ],
    }
    temporary = run.path / f".health.{node_name()}.{os.getpid()}.tmp"
    temporary.write_text(strict_json.encode(document) + "\n")
    temporary.replace(run.path / "health.json")
