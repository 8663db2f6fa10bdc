"""Orders: which one a `data:` block asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.block_shuffle import BlockShuffled
from gradus.data.grouping import Grouped
from gradus.data.order import AsLaid, Order, Shuffled
from gradus.schema.errors import InputError
from gradus.schema.recipe import DataBlock, Shuffle

if TYPE_CHECKING:
    from gradus.data.loader import Indexed


def order_for(data: Indexed, block: DataBlock, seed: int, batch: int) -> Order:
    """The order in which a run with batches of `batch` samples trains on the data."""
    order = data.source.order(seed, batch, block.shuffle) if data.source is not None else None
    if order is None:
        order = shuffled(block.shuffle, seed, data.length)
    if block.group_by_length is None:
        return order
    return Grouped(order, lengths_of(data, block), seed, batch, block.group_by_length)


def shuffled(shuffle: Shuffle, seed: int, length: int) -> Order:
    """The order of one dataset by the key `shuffle`."""
    if shuffle == "full":
        return Shuffled(seed, length)
    if shuffle == "none":
        return AsLaid(length)
    return BlockShuffled(seed, length, shuffle.blocks, shuffle.window)


def note_of(order: Order, samples: int) -> str | None:
    """What there is to say about an order in a run of so many samples."""
    notes: list[str] = []
    while True:
        note = getattr(order, "note", None)
        if note is not None:
            notes.append(note(samples))
        if not isinstance(order, Grouped):
            return "; ".join(notes) or None
        order = order.order


def lengths_of(data: Indexed, block: DataBlock) -> NDArray[Any]:
    """How long each sample is, as the dataset says."""

    def refused(why: str, hint: str | None = None) -> InputError:
        message = f"data.group_by_length: found {block.group_by_length}, but {why}"
        return InputError(message, hint=hint, field="data.group_by_length", found=block.group_by_length)

    found: Any = getattr(data.dataset, "lengths", None)
    if found is None and data.source is not None:
        hint = "leave it out; what can be grouped is `chat`, and a dataset of your own with an attribute `lengths`"
        raise refused(f"batches of {block.use!r} are all of one width", hint)
    if found is None:
        what = getattr(data.dataset, "what", type(data.dataset).__name__)  # of which a part may be held out
        hint = "give it an attribute `lengths` with a whole number for each sample"
        raise refused(f"{what} does not say how long its samples are", hint)
    lengths = np.asarray(found)
    if lengths.shape != (data.length,) or lengths.dtype.kind not in "iu":
        shown = f"{lengths.dtype} {list(lengths.shape)}"
        raise refused(f"the dataset's `lengths` is {shown}, allowed: a whole number for each of {data.length} samples")
    return lengths
