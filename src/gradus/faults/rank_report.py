"""Rank report: what each rank says of itself every few seconds, and how it gets to the rank that gathers them.

Through the store of the run, over a connection of its own: a client of a TCPStore does one thing at a time, and the
thread that trains may be waiting with its own for something that never comes. No rank reads more than one key at a time
but the one that gathers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, cast

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from gradus.faults.whereabouts import Phase

_ORDER, _SUSPECTED = "watcher", "suspected"  # keys of the store
STORE_SECONDS = 20.0  # that an answer of the store may take; longer, and it counts as out of reach


@dataclass(frozen=True)
class RankReport:
    number: int  # of this rank's reports: one that does not grow comes from a rank that is silent
    rank: int
    node: str
    pid: int
    step: int
    moves: int  # changes whenever the rank comes on
    phase: Phase
    phase_seconds: float
    waiting_seconds: float | None = None  # for other ranks, or for the device
    own_seconds: float | None = None  # that it works in a step, without waiting
    data_seconds: float | None = None  # of them
    memory_peak_bytes: int = 0
    kind: int = 0  # ranks of one kind do the same work: a stage of a pipeline is one

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> RankReport:
        return cls(**json.loads(text))


class Exchange:
    """Reports, orders and answers to them. What cannot be sent or read raises a RuntimeError of torch's."""

    def __init__(self, store: Store, size: int) -> None:
        self._store = own_connection(store)
        self._size = size
        self._there: set[str] = set()  # keys that exist

    def say(self, report: RankReport) -> None:
        self._store.set(_report(report.rank), report.to_json())

    def reports(self, ranks: Iterable[int] | None = None) -> dict[int, RankReport]:
        """The last report of each rank that has sent any, or of each of these."""
        keys = [_report(rank) for rank in (range(self._size) if ranks is None else ranks)]
        return {report.rank: report for report in map(RankReport.from_json, self._values(keys))}

    def give_order(self, order: Mapping[str, Any]) -> None:
        """By the one that watches: it says that it does, and what it wants."""
        self._post(_ORDER, order)

    def order(self) -> dict[str, Any] | None:
        return self._read(_ORDER)

    def answer(self, rank: int, document: Mapping[str, Any]) -> None:
        """For a rank: its own, or that of one beside this that cannot."""
        self._post(_answer(rank), document)

    def answers(self, ranks: Iterable[int]) -> list[dict[str, Any]]:
        """Those that are there."""
        return [json.loads(value) for value in self._values([_answer(rank) for rank in ranks])]

    def suspect(self, what: str) -> None:
        """Say why this rank thinks that the run hangs."""
        self._post(_SUSPECTED, {"what": what})

    def suspicion(self) -> str | None:
        told = self._read(_SUSPECTED)
        return None if told is None else str(told["what"])

    def _post(self, key: str, document: Mapping[str, Any]) -> None:
        self._store.set(key, json.dumps(document, separators=(",", ":")))

    def _read(self, key: str) -> dict[str, Any] | None:
        found = self._values([key])
        return cast(dict[str, Any], json.loads(found[0])) if found else None

    def _values(self, keys: list[str]) -> list[bytes]:
        # Asking for a key that is not there waits for it, and a question about several is answered for all at once.
        for key in keys:
            if key not in self._there and self._store.check([key]):
                self._there.add(key)
        there = [key for key in keys if key in self._there]
        if self._store.has_extended_api():  # type: ignore[attr-defined]
            return self._store.multi_get(there) if there else []
        return [self._store.get(key) for key in there]


def own_connection(store: Store) -> Store:
    """The same store for another thread, with less patience."""
    base = store
    while isinstance(base, PrefixStore):
        base = base.underlying_store
    if not isinstance(base, TCPStore):  # a file needs none, and each copy of it would count as one more user
        return store
    copy = store.clone()  # type: ignore[attr-defined]
    copy.set_timeout(timedelta(seconds=STORE_SECONDS))
    return cast(Store, copy)


def _report(rank: int) -> str:
    return f"report-{rank}"


def _answer(rank: int) -> str:
    return f"told-{rank}"
