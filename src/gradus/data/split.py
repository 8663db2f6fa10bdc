"""Which samples are held out for validation: a pure function of (length, fraction), on any hardware, with any seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices, permuted
from gradus.schema.stable_hash import stable_hash

Split = Literal["train", "validation"]

# Held-out text is taken from this many places, so that it is as varied as the rest, in pieces as long as possible.
TEXT_BLOCKS = 16
SCATTER_KEY = stable_hash("validation split")
LARGEST_TABLE = 2**24  # held-out samples; with more, the others are not looked up but come in random order


@dataclass(frozen=True)
class Part:
    """Some samples of a dataset: `length` of them, and `locate`, which turns their numbers into dataset indices."""

    length: int
    locate: Callable[[Indices], Indices]
    note: str | None = None  # how it came about, where nobody asked for it
    drawn: Callable[[Indices], Indices] | None = None  # in place of `locate` for the first few, if those lie alike

    def first(self, limit: int | None) -> Part:
        if limit is None or limit >= self.length:
            return self
        return replace(self, length=limit, locate=self.drawn or self.locate)


def held_out(length: int, fraction: float) -> int:
    """How many samples validation gets: at least one if any are asked for, but never all."""
    return 0 if fraction == 0 or length < 2 else min(max(round(length * fraction), 1), length - 1)


def held_out_documents(count: int, fraction: float) -> NDArray[np.bool_] | None:
    """For each document whether it is held out; None where there are too few for a fair share to be one or more."""
    if round(count * fraction) < 1 or count < 2:
        return None
    part = scattered(count, fraction, "validation")
    chosen = np.zeros(count, np.bool_)
    chosen[part.locate(np.arange(part.length))] = True
    return chosen


def whole(length: int) -> Part:
    """All samples: for data that is published as a training set and a test set."""
    return Part(length, np.asarray)


def scattered(length: int, fraction: float, split: Split) -> Part:
    """Independent samples, of which some from anywhere are held out. Those for training come as they lie.

    Where only a few are taken they come in random order, so that those of a dataset sorted by class are not of one
    class.
    """
    held = held_out(length, fraction)
    note = f"{held} of {length} samples are held out for validation (data.validation: {fraction:g})" if held else None
    if split == "validation":
        return Part(held, partial(_scatter, length, length - held), note)
    drawn = partial(_scatter, length, 0)
    in_order = _InOrder(length, held) if held <= LARGEST_TABLE else drawn
    return Part(length - held, in_order, note, drawn)


@dataclass(frozen=True)
class _InOrder:
    """Numbers of the samples that are not held out, as they lie."""

    length: int
    held: int

    def __call__(self, numbers: Indices) -> Indices:
        return numbers + np.searchsorted(self._before, numbers, side="right")

    @cached_property
    def _before(self) -> Indices:
        """Of each held-out sample, in order, how many others lie before it."""
        found = np.sort(_scatter(self.length, self.length - self.held, np.arange(self.held, dtype=np.int64)))
        return found - np.arange(self.held)

    def __getstate__(self) -> dict[str, int]:
        return {"length": self.length, "held": self.held}  # the table is made where it is needed


def _scatter(length: int, start: int, numbers: Indices) -> Indices:
    return permuted(SCATTER_KEY, length, numbers + start)


def blocks(length: int, fraction: float, split: Split) -> Part:
    """Windows of a text: neighbours continue each other, so validation holds out long runs at even distances."""
    held = held_out(length, fraction)
    stripes = max(min(held, TEXT_BLOCKS), 1)
    # Stripe k of the text is training windows train_at[k] to train_at[k + 1], then the held-out ones of the same k.
    train_at, held_at = (
        np.array([count * k // stripes for k in range(stripes + 1)], np.int64) for count in (length - held, held)
    )
    if split == "train":
        return Part(length - held, partial(_skip, train_at, held_at))
    return Part(held, partial(_skip, held_at[:-1], train_at[1:]))


def _skip(starts: Indices, skipped: Indices, numbers: Indices) -> Indices:
    """Numbers on one side of the split, plus the windows of the other side that lie before their stripe's."""
    return numbers + skipped[np.searchsorted(starts, numbers, side="right") - 1]
