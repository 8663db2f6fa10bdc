"""Position: where in the stream of samples a run is, and what makes it the same stream.

Nothing else about the data is stored. Which sample is at which position follows from the specification; positions that
are skipped are never trained on; and the k-th sample that a run trains on is at position k plus those skipped before.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices, Ranges, past_skipped
from gradus.schema.differences import began_and_found, differences
from gradus.schema.errors import InputError
from gradus.schema.recipe import DataBlock, Recipe

if TYPE_CHECKING:
    from gradus.data.loader import Indexed
    from gradus.data.order import Order

# Keys of a `data:` block that say where and how the data is read, and not what it is.
ABOUT_READING = frozenset({"cache", "path", "stage", "timeout", "verify", "workers"})
PROBED = 64  # positions at which two orders are compared; further apart with each
ACCEPT = "--accept-changed-data"


@dataclass(frozen=True)
class DataPosition:
    """How far a run is in its stream of samples. All that a checkpoint has to know of the data."""

    seed: int
    samples: int  # trained on so far
    skipped: tuple[tuple[int, int], ...] = ()  # positions of the stream that are left out, ascending and apart
    specification: str = ""  # `specification_hash` of what decides which samples come

    def document(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "samples": self.samples,
            "skipped": [list(span) for span in self.skipped],
            "specification": self.specification,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> DataPosition:
        skipped = as_ranges((first, stop) for first, stop in document["skipped"])
        return cls(document["seed"], document["samples"], skipped, document["specification"])


def as_ranges(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans in any order, some of which may overlap or touch, as ranges."""
    joined: list[tuple[int, int]] = []
    for first, stop in sorted(spans):
        assert first >= 0, f"position {first} is negative"
        if stop <= first:
            continue
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((first, stop))
    return tuple(joined)


def with_skipped(before: Ranges, asked: Iterable[Sequence[int]], trained: int) -> tuple[tuple[int, int], ...]:
    """What is left out of a stream by now and from now on, after `trained` samples.

    What was left out before stays so. What was trained on cannot be left out any more.
    """
    here = int(past_skipped(np.array([trained - 1]), before)[0]) + 1 if trained else 0
    for first, end in as_ranges((first, end) for first, end in asked):
        begun, done = consumed_before(np.array([first, max(first, min(end, here))]), before)
        if done > begun:
            low, high = past_skipped(np.array([begun, done - 1]), before)
            raise InputError(
                f"data.skip: of positions {first} to {end - 1}, the run has trained on {low} to {high} already; "
                f"it goes on at position {here}",
                hint=f"leave out positions from {here} on; to undo what was trained, start a new run",
                field="data.skip",
                found=[first, end],
                allowed=f"positions from {here} on",
            )
    return as_ranges([*before, *((first, end) for first, end in asked)])


def consumed_before(positions: NDArray[Any], skipped: Ranges) -> Indices:
    """How many samples a run takes before it comes to these positions: `past_skipped` the other way round."""
    consumed = np.asarray(positions).astype(np.int64)
    for first, end in reversed(skipped):  # the last first: each takes away only what lies behind its beginning
        consumed = np.where(consumed > first, np.maximum(consumed - (end - first), first), consumed)
    return consumed


def requested_of(recipe: Recipe) -> dict[str, Any]:
    """What a recipe says about which samples come; known before the data is opened."""
    return {"batch": recipe.batch, "seed": recipe.seed, "data": _requested(recipe.data)}


def specification_of(recipe: Recipe, data: Indexed, order: Order) -> dict[str, Any]:
    """All that decides which sample is at which position: neither paths nor workers nor the mesh are part of it."""
    from gradus.data.fingerprint import fingerprint_of  # late: it knows the sources, which build on this package

    fingerprint = fingerprint_of(data.dataset)
    return {
        **requested_of(recipe),
        "samples": data.length,
        "tokenizer": getattr(data.source, "tokenizer_hash", None),
        "fingerprint": fingerprint,
        # Of data that cannot say what it is, its name has to do.
        "names": _names(recipe.data) if fingerprint is None else None,
        "order": probe(order),
    }


def specification_hash(specification: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(specification, sort_keys=True, default=str).encode()).hexdigest()[:24]


class Change(NamedTuple):
    """What of a specification is not as it was."""

    field: str
    message: str  # names what changed, from what to what
    before: Any
    now: Any


def check_same_data(before: Mapping[str, Any], now: Mapping[str, Any], *, accept: bool) -> str | None:
    """Refuse data whose positions would mean other samples; if that is wanted (`accept`), a note about what changed.

    Both are what `specification_of` or `requested_of` gave; only what both know is compared.
    """
    changes = changes_between(before, now)
    if not changes:
        return None
    told = "; ".join(change.message for change in changes)
    fixed = next((change for change in changes if change.field == "batch"), None)
    if accept and fixed is None:
        return f"goes on with changed data, as asked: {told}"
    blamed = fixed or changes[0]
    acceptable = f", or go on with it all the same: {ACCEPT}"
    raise InputError(
        told,
        hint=f"start a new run for that, or bring the old {_noun(blamed)} back{'' if fixed else acceptable}",
        field=blamed.field,
        found=blamed.now,
        allowed=blamed.before,
    )


def changes_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """What changed from one specification to another, what a person wrote first."""
    changes = [
        _change(key, before[key], now[key], "its samples would be others")
        for key in ("batch", "seed")
        if key in before and key in now and before[key] != now[key]
    ]
    if "data" in before and "data" in now:
        changes += [
            _change(other.key, other.before, other.now, "its samples would be others")
            for other in differences({"data": before["data"]}, {"data": now["data"]})
        ]
    if "samples" in before and "samples" in now and before["samples"] != now["samples"]:
        began, found = before["samples"], now["samples"]
        why = f"data: the run began with {began} training samples, found {found}: their order would be another"
        changes.append(Change("data", why, began, found))
    changes += _changed_content(before, now)
    if not changes and before.get("order") != now.get("order") and "order" in before and "order" in now:
        why = "data: the same recipe gives other samples at the same positions than when the run began"
        changes.append(Change("data", why, before["order"], now["order"]))
    return changes


def _changed_content(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Where one of the two does not know, nothing is said."""
    changes = []
    began, found = before.get("tokenizer"), now.get("tokenizer")
    if began is not None and found is not None and began != found:
        why = f"data.tokenizer: the run began with another tokenizer (hash {began[:12]}, found {found[:12]}): token "
        changes.append(Change("data.tokenizer", why + "numbers would mean other text", began, found))
    began, found = before.get("fingerprint"), now.get("fingerprint")
    same_length = before.get("samples") == now.get("samples")  # else that is what is told
    if began is not None and found is not None and began != found and same_length:
        why = f"data: the run began with other content (fingerprint {began[:12]}, found {found[:12]})"
        changes.append(Change("data", why, began, found))
    began, found = before.get("names"), now.get("names")
    if began is not None and found is not None and began != found:
        changes.append(_change("data.path", began, found, "whether it is the same data, nothing here can tell"))
    return changes


def _change(field: str, began: Any, found: Any, why: str) -> Change:
    return Change(field, f"{began_and_found(field, began, found)}: {why}", began, found)


def _noun(change: Change) -> str:
    return change.field.rpartition(".")[2] if change.field in ("batch", "seed", "data.tokenizer") else "data"


def _requested(block: DataBlock) -> dict[str, Any]:
    general = {name: field.default for name, field in DataBlock.model_fields.items()}
    said = _said_of({**block.model_dump(), **block.options}, general)
    said.pop("skip", None)  # no sample comes at another position by it; `with_skipped` says what may change
    return said


def _said_of(block: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a block that are about what the data is, as far as they are not at their defaults.

    A key that a later version adds, with a default that means what was before, is then no change.
    """
    from gradus.data.sources import BUILT_IN  # late: the sources build on the modules below this one

    source = BUILT_IN.get(str(block.get("use")))
    known = {**defaults, **({name: field.default for name, field in source.model_fields.items()} if source else {})}
    said: dict[str, Any] = {}
    for key, value in block.items():
        if key in ABOUT_READING or (key != "use" and key in known and known[key] == value):
            continue
        said[key] = _without_places(value)
    return said


def _without_places(value: Any) -> Any:
    """A file may move: of a path, its last part counts."""
    if isinstance(value, str):
        return os.path.basename(value) if "/" in value else value
    if isinstance(value, Mapping):
        return _said_of(value, {}) if "use" in value else {key: _without_places(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_places(item) for item in value]
    return value


def _names(block: DataBlock) -> list[str]:
    """The last parts of the paths in a block, those of the sources of a mixture as well."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                if key == "path" and isinstance(item, (str, os.PathLike)):
                    found.append(os.path.basename(os.path.normpath(item)))
                else:
                    collect(item)

    collect(block.options)
    return found


def probe(order: Order) -> str:
    """A digest of what an order has at some positions: near the start each, then further and further apart."""
    far = np.unique(np.geomspace(1, 4 * max(order.length, 2), PROBED).astype(np.int64))
    positions = np.concatenate([[0], far])
    return hashlib.sha256(np.asarray(order.at(positions)).astype("<i8").tobytes()).hexdigest()[:24]
