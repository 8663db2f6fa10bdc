"""An origin: units of samples, and what it takes to be one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from gradus.data.shards.tar import Member
from gradus.data.split import Split

SPLITS: tuple[Split, ...] = ("train", "validation")
TEXT = "text"  # the name of the part that is a document
LABELS = ("label", "labels", "class", "cls", "target")


class Sample(NamedTuple):
    key: str
    members: dict[str, Member]  # part → what lies in the tar file
    label: int | None
    document: tuple[str, ...] | None  # the text, or pieces of a long one
    weight: int  # bytes that had to be read for it, about


@dataclass(frozen=True)
class Unit:
    """Some samples of one split, which follow each other."""

    split: Split
    weight: int  # bytes to read, about; for the display of progress
    what: Any


class Origin(Protocol):
    @property
    def identity(self) -> Any:
        """What changes when the content does; JSON."""

    @property
    def classes(self) -> tuple[str, ...] | None: ...

    def units(self, shard_bytes: int) -> list[Unit]: ...

    def samples(self, number: int, unit: Unit) -> Iterator[Sample]: ...


def grouped(sizes: Sequence[int], at_most: int) -> Iterator[slice]:
    """Neighbours that together have at most so many bytes, or one that alone has more."""
    start, total = 0, 0
    for number, size in enumerate(sizes):
        if number > start and total + size > at_most:
            yield slice(start, number)
            start, total = number, 0
        total += size
    if len(sizes) > start:
        yield slice(start, len(sizes))


class Sent:
    """Travels to other processes as what it was made from, without what it has found out."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]


def part_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def label_of(values: Mapping[str, Any]) -> int | None:
    for name in LABELS:
        value = values.get(name)
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return int(value)
    return None
