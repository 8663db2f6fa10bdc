"""What a data source offers, and how a `data:` block is checked and opened. No torch: the launcher checks too."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices
from gradus.data.split import Split
from gradus.schema.errors import unknown_name

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
    note: str | None = None  # what was done to the data that its user should know

    def __init__(self, length: int) -> None:
        self.length = length

    @abstractmethod
    def fetch(self, indices: Indices) -> Batch:
        """These samples as one raw batch: integer arrays with leading dimension len(indices)."""

    @abstractmethod
    def finish(self, batch: Any, dtype: Any) -> Any:
        """A raw batch, by then tensors on the training device, as the model sees it; real numbers get `dtype`."""

    @property
    def columns(self) -> Batch | None:
        """All samples as one raw batch if they are in memory, to be kept on the device: batch = column[indices].

        To be asked for once: it may be put together on the spot.
        """
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
    """What a source does once before it can be opened quickly: tokenise. A launcher may, else the first rank does."""
    source_options(use, options).prepare()


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
