"""Node health: what health.json says of a run's ranks, in a line for each node, the worst first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gradus.record import strict_json
from gradus.record.directory import RunDirectory

HEALTH_FILE = "health.json"


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others."""

    rank: int
    node: str
    ratio: float
    since_step: int | None = None


@dataclass(frozen=True)
class NodeHealth:
    """The ranks of a node, as the worst of them is."""

    node: str
    ranks: int
    silent: int  # ranks that have not been heard of
    step: int  # of the one that is furthest behind
    behind: int  # steps, of that one behind the run
    phase: str  # what the one does that has done it longest
    phase_seconds: float
    slowest_ratio: float | None  # of its stragglers
    own_seconds: float | None  # the most that a rank of it needs for its own part of a step
    data_seconds: float | None
    memory_peak_bytes: int | None


@dataclass(frozen=True)
class Health:
    time: datetime | None
    step: int
    ranks: int
    nodes: tuple[NodeHealth, ...]
    stragglers: tuple[Straggler, ...]


def read_health(run: RunDirectory) -> Health | None:
    """The health last written; None if there is none that can be read."""
    try:
        return health_of(strict_json.decode((run.path / HEALTH_FILE).read_bytes()))
    except (OSError, ValueError):
        return None


def health_of(document: Mapping[str, Any]) -> Health:
    """Of a document in which anything may be missing: it is for looking at, and must not end who looks."""
    ranks = [entry for entry in _entries(document.get("ranks")) if isinstance(entry.get("rank"), int)]
    stragglers = [
        Straggler(
            entry["rank"],
            str(entry.get("node", "?")),
            _number(entry.get("ratio")) or 0.0,
            _whole(entry.get("since_step")),
        )
        for entry in _entries(document.get("stragglers"))
        if isinstance(entry.get("rank"), int)
    ]
    furthest = max((_whole(entry.get("step")) or 0 for entry in ranks), default=0)
    step = max(furthest, _whole(document.get("step")) or 0)
    by_node: dict[str, list[Mapping[str, Any]]] = {}
    for entry in ranks:
        by_node.setdefault(str(entry.get("node", "?")), []).append(entry)
    nodes = [_node(name, entries, step, stragglers) for name, entries in by_node.items()]
    worst_first = sorted(
        nodes, key=lambda n: (-n.silent, -(n.slowest_ratio or 0.0), -n.behind, -n.phase_seconds, n.node)
    )
    slowest_first = sorted(stragglers, key=lambda one: (-one.ratio, one.rank))
    return Health(_moment(document.get("time")), step, len(ranks), tuple(worst_first), tuple(slowest_first))


def _node(name: str, entries: list[Mapping[str, Any]], step: int, stragglers: list[Straggler]) -> NodeHealth:
    longest = max(entries, key=lambda entry: _number(entry.get("phase_seconds")) or 0.0)
    behind_most = min(_whole(entry.get("step")) or 0 for entry in entries)

    def most(key: str) -> float | None:
        return max((value for entry in entries if (value := _number(entry.get(key))) is not None), default=None)

    memory = most("memory_peak_bytes")
    return NodeHealth(
        node=name,
        ranks=len(entries),
        silent=sum(entry.get("phase") == "silent" for entry in entries),
        step=behind_most,
        behind=step - behind_most,
        phase=str(longest.get("phase", "?")),
        phase_seconds=_number(longest.get("phase_seconds")) or 0.0,
        slowest_ratio=max((one.ratio for one in stragglers if one.node == name), default=None),
        own_seconds=most("own_seconds"),
        data_seconds=most("data_seconds"),
        memory_peak_bytes=int(memory) if memory is not None else None,
    )


def _entries(value: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in value if isinstance(entry, Mapping)] if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _moment(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None
