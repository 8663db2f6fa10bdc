"""A user's own dataset, sample by sample."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gradus.data.shards.origins.origin import SPLITS, TEXT, Sample, Sent, Unit, label_of, part_name
from gradus.data.shards.parts import encoded
from gradus.data.shards.tar import BLOCK
from gradus.data.split import Split
from gradus.schema.errors import InputError
from gradus.schema.stable_hash import stable_hash
from gradus.schema.user_code import user_code

MEASURED_SAMPLES = 16  # of a dataset whose samples tell their size only when they are asked for


@dataclass(frozen=True)
class OwnDataset(Sent):
    """A user's map-style dataset. Processes open it themselves: `opened` is a function that can be sent to them."""

    name: str
    opened: Callable[[Split], Any]  # None: there is no such split
    seed: int = 1
    source: str | None = None  # digest of the file that defines it, and its options
    text: str = TEXT

    classes = None

    @cached_property
    def _splits(self) -> dict[Split, Any]:
        found: dict[Split, Any] = {}
        for split in SPLITS:
            dataset = self.opened(split)
            if dataset is not None and len(dataset):
                found[split] = dataset
        return found

    @property
    def identity(self) -> Any:
        lengths = {split: len(dataset) for split, dataset in self._splits.items()}
        return {"dataset": self.name, "lengths": lengths, "source": self.source, "seed": self.seed}

    def units(self, shard_bytes: int) -> list[Unit]:
        units: list[Unit] = []
        for split, dataset in self._splits.items():
            length = len(dataset)
            measured = sorted({length * i // MEASURED_SAMPLES for i in range(MEASURED_SAMPLES)})
            sizes = [
                sum(BLOCK + len(m.data) + -len(m.data) % BLOCK for m in self._sample(split, i).members.values())
                for i in measured
            ]
            mean = max(1, sum(sizes) // len(sizes))
            count = max(1, shard_bytes // mean)
            for start in range(0, length, count):
                end = min(start + count, length)
                units.append(Unit(split, (end - start) * mean, (start, end, mean)))
        return units

    def samples(self, number: int, unit: Unit) -> Iterator[Sample]:
        start, end, mean = unit.what
        for index in range(start, end):
            yield self._sample(unit.split, index)._replace(weight=mean)

    def _sample(self, split: Split, index: int) -> Sample:
        _seed(self.seed, split, index)
        with user_code("data.use", f"item {index}"):
            item = self._splits[split][index]
        if isinstance(item, Mapping):
            values = {str(name): value for name, value in item.items()}
        elif isinstance(item, (tuple, list)):
            values = {str(place): value for place, value in enumerate(item)}
        else:
            message = f"data.use: item {index} is {type(item).__name__}, allowed: a dict or a tuple"
            raise InputError(message, field="data.use", found=type(item).__name__, allowed="a dict or a tuple")
        members = {}
        for name, value in values.items():
            member = encoded(part_name(name), value, f"item {index}")
            if member is not None:
                members[part_name(name)] = member
        label = label_of(values)
        if label is None and not isinstance(item, Mapping):
            label = label_of({"label": item[-1]}) if len(item) else None
        text = values.get(self.text)
        document = (text,) if isinstance(text, str) else None
        return Sample(f"{split}-{index:09d}", members, label, document, 0)


def _seed(seed: int, split: str, index: int) -> None:
    """A dataset that draws at random gives the same sample whichever process asks."""
    value = stable_hash("packed sample", seed, split, index)
    random.seed(value)
    np.random.seed(value & (2**32 - 1))
    if "torch" in sys.modules:
        import torch

        torch.default_generator.manual_seed(value & (2**63 - 1))
