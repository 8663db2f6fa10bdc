"""How an attempt ended on each node of a job, left by that node for whoever decides what follows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gradus.launcher.ending import Departure
from gradus.record import strict_json
from gradus.record.directory import RunDirectory

_SAID_LINES = 100  # of each rank, of what was printed last


@dataclass(frozen=True)
class NodeEnding:
    node: str
    number: int  # from 0, in the order of the job's node list
    return_code: int  # of its torchrun
    ended_by: str | None = None  # who asked for the end at once
    after_others: bool = False  # ended because another node's ranks had failed
    stop_reason: str | None = None  # why the ranks of a script were sent SIGTERM
    said: Mapping[int, Sequence[str]] = field(default_factory=dict)  # the last lines of each rank
    cpu_seconds: float | None = None
    peak_memory_bytes: int | None = None  # of its largest process
    wall_seconds: float | None = None


def write_node_ending(run: RunDirectory, attempt: int, ending: NodeEnding) -> None:
    """It appears whole or not at all."""
    folder = _folder(run, attempt)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    said = {rank: list(lines)[-_SAID_LINES:] for rank, lines in ending.said.items()}
    temporary = folder / f".{ending.number}.tmp"
    temporary.write_text(strict_json.encode({**asdict(ending), "said": said}))
    temporary.replace(folder / f"{ending.number}.json")


def node_endings(run: RunDirectory, attempt: int) -> list[NodeEnding]:
    """Those that are there, by their numbers. A node that died has left none, or, with its disk, none that is whole."""
    found = []
    for path in _folder(run, attempt).glob("[0-9]*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            document = strict_json.decode(path.read_bytes())
            said = {int(rank): lines for rank, lines in document["said"].items()}
            found.append(NodeEnding(**{**document, "said": said}))
    return sorted(found, key=lambda ending: ending.number)


def ended_badly(run: RunDirectory, attempt: int, but: int) -> bool:
    """Whether the ranks of another node have failed."""
    return any(ending.return_code != 0 and ending.number != but for ending in node_endings(run, attempt))


def departure_of(endings: Sequence[NodeEnding], code: int) -> Departure:
    """How the ranks of all nodes left, where srun left with a code."""
    returned = next((e.return_code for e in endings if e.return_code and not e.after_others), code)
    return Departure(
        returned,
        next((e.ended_by for e in endings if e.ended_by), None),
        next((e.stop_reason for e in endings if e.stop_reason), None),
        {rank: lines for e in endings for rank, lines in e.said.items()},
    )


def _folder(run: RunDirectory, attempt: int) -> Path:
    return run.control / "nodes" / str(attempt)
