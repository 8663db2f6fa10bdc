"""What a data source offers, and how a `data:` block is checked and opened. No torch: the launcher checks too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices, Order, Words
from gradus.data.split import Split
from gradus.schema.errors import unknown_name
from gradus.schema.recipe import Shuffle

if TYPE_CHECKING:
    from gradus.data.sources.options import Options

Batch = dict[str, NDArray[Any]] | tuple[NDArray[Any], ...]

RESIDENT_BYTES = 2 * 1024**3  # larger datasets are not kept on the device


class Source(ABC):
    """Samples by index, read in batches in a compact raw form and finished on the training device."""

    sample_shape: tuple[int, ...]
    tokens_per_sample: int | None = None
    vocabulary: int | None = None
    classes: int | None = None
    tokenizer_hash: str | None = None  # of the tokenizer's content: another one would give the numbers another meaning
    fingerprint: str | None = None  # of the content, where it has one: the same samples have the same anywhere
    note: str | None = None  # what was done to the data that its user should know
    lengths: NDArray[Any] | None = None  # of all samples, where they are padded because they differ
    pads_to_longest = False  # whether a batch is as wide as its longest sample, and not as any sample can be

    def __init__(self, length: int) -> None:
        self.length = length

    @abstractmethod
    def fetch(self, indices: Indices) -> Batch:
        """These samples as one raw batch: integer arrays with leading dimension len(indices)."""

    def fetch_drawn(self, indices: Indices, draws: Words) -> Batch:
        """The same for training, with a random word for each sample: augmentation takes all its chance from there."""
        return self.fetch(indices)

    def drawn(self, draws: Words) -> Indices | None:
        """What `finish` augments by, a number for each sample: one more column of what `fetch_drawn` gives, at its end.

        None where nothing is augmented on the device.
        """
        return None

    @abstractmethod
    def finish(self, batch: Any, dtype: Any) -> Any:
        """A raw batch, by then tensors on the training device, as the model sees it; real numbers get `dtype`."""

    @property
    def columns(self) -> Batch | None:
        """All samples as one raw batch if they are in memory, to be kept on the device: batch = column[indices].

        To be asked for once: it may be put together on the spot.
        """
        return None

    def order(self, seed: int, batch: int, shuffle: Shuffle) -> Order | None:
        """An order of its own for training in batches of `batch`, if it has one; `shuffle` is the recipe's."""
        return None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Batch:
        if not -self.length <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        batch = self.fetch(np.array([index % self.length]))
        if isinstance(batch, dict):
            return {name: column[0] for name, column in batch.items()}
        return tuple(column[0] for column in batch)


def prepare_source(use: str, options: Mapping[str, Any]) -> None:
    """What a source does once before it can be opened quickly: tokenise. A launcher may, else the first rank does.

    What is in the cache is compared with its digests here, once for all ranks.
    """
    from gradus.data.token_cache import check_content

    found = source_options(use, options).prepare()
    for prepared in found if isinstance(found, list) else [found]:
        if prepared is not None:
            check_content(prepared.folder)


def open_source(use: str, options: Mapping[str, Any], split: Split, seed: int) -> Source:
    """One split of a built-in source. The split does not depend on the seed."""
    return source_options(use, options).open(split, seed)


def source_options(use: str, options: Mapping[str, Any]) -> Options:
    """The checked options of a built-in source. Loads nothing.

    Refused are an unknown source, an unknown or mistyped option, and a path that does not exist.
    """
    from gradus.data.sources import BUILT_IN  # late: the sources build on this module

    if use not in BUILT_IN:
        hint = "your own source is named file.py:function or package.module:function"
        raise unknown_name("data source", use, BUILT_IN, field="data.use", hint=hint)
    return BUILT_IN[use].parse(options)
