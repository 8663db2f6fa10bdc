"""Loader: the micro-batches of one rank, from any step on, on the training device.

Which samples a step needs follows from the global order alone, so there is no sampler and no state: to resume is to
start at another step. Data that is small and in memory lives on the device; the rest comes through loader workers,
pinned memory and copies that overlap with the step before.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from gradus.data.collate import collated
from gradus.data.order import indices_at
from gradus.data.source import RESIDENT_BYTES, Source
from gradus.data.split import Part
from gradus.schema.errors import GradusError, InputError
from gradus.schema.stable_hash import stable_hash
from gradus.schema.user_code import user_code

Inputs = Mapping[str, Any] | tuple[Any, ...]
Request = tuple[int, int]  # (first position, real samples) of a micro-batch

INDICES_AT_ONCE = 32768  # of data on the device: computing and sending them one batch at a time would show


class MicroBatch(NamedTuple):
    inputs: Inputs
    samples: int  # real ones; 0 means that the inputs are padding of weight zero
    position: int  # of the first sample in the global stream


@dataclass(frozen=True)
class Slices:
    """Which positions of the global stream belong to a rank: contiguous slices of each step's batch."""

    batch: int
    micro_batch: int
    accumulate: int
    data_rank: int
    total_samples: int  # the stream ends here; only the last batch may be short

    def of_step(self, step: int) -> Iterator[Request]:
        """The micro-batches of one step."""
        first = step * self.batch + self.data_rank * self.micro_batch * self.accumulate
        for index in range(self.accumulate):
            start = first + index * self.micro_batch
            yield start, max(0, min(self.micro_batch, self.total_samples - start))

    def between(self, start_step: int, end_step: int) -> Iterator[Request]:
        for step in range(start_step, end_step):
            yield from self.of_step(step)


class Indexed:
    """A dataset of any kind, fetched by arrays of indices: built-in sources, and the user's own map-style datasets."""

    def __init__(self, dataset: Any, field: str = "data.use") -> None:
        by_number = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
        try:
            if not by_number:
                raise TypeError
            self.length = len(dataset)
        except TypeError:
            what = "has no length" if by_number else "does not give a sample by its number"
            hint = "samples are shuffled, shared among ranks and resumed by their numbers: collect them in a list"
            if isinstance(dataset, DataLoader):
                hint = "return the dataset itself: batches are made from the recipe's `batch`"
            raise InputError(
                f"{field}: {type(dataset).__name__} {what}, allowed: a dataset with __len__ and __getitem__",
                hint=hint,
                field=field,
            ) from None
        if self.length == 0:
            raise InputError(f"{field}: the dataset has length 0, allowed: at least one sample", field=field, found=0)
        self.dataset = dataset
        self.source = dataset if isinstance(dataset, Source) else None
        self._collate = getattr(dataset, "collate", None) or collated

    @property
    def note(self) -> str | None:
        """What was done to the data that its user should know: how much is held out, what was cut."""
        if self.source is not None:
            return self.source.note
        # Of a user's only dataset, a part is held out although nothing in it says so.
        part = getattr(self.dataset, "part", None)
        return part.note if isinstance(part, Part) else None

    def fetch(self, indices: np.ndarray[Any, Any], seed: int = 0, position: int = 0) -> Any:
        """A batch in raw form, as tensors in host memory; `position` is that of its first sample in the stream."""
        if self.source is not None:
            return _tensors(self.source.fetch(indices))
        items: list[Any] = []
        for offset, (index, number) in enumerate(zip(indices, self.numbers_of(indices), strict=True)):
            _seed_for_sample(seed, position + offset)
            with user_code("data.use", f"item {number}"):
                item = self.dataset[int(index)]
            # A user's own collate may know what to do with other items of a batch.
            if not isinstance(item, (Mapping, tuple, list)) and (self._collate is collated or not items):
                raise _not_a_sample(item, number)
            items.append(item)
        with user_code("data.use", "collate"):
            batch = self._collate(items)
        return tuple(batch) if isinstance(batch, list) else batch

    def numbers_of(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """The samples as the whole dataset numbers them: those held out for validation are counted too."""
        part = getattr(self.dataset, "part", None)
        return indices if part is None else np.asarray(part.locate(indices))

    def finish(self, batch: Any, dtype: torch.dtype) -> Inputs:
        """What the model sees, from a raw batch on the device."""
        if self.source is not None:
            finished: Inputs = self.source.finish(batch, dtype)
        else:  # numpy's numbers are float64 unless somebody asked for less; the model's are what the plan says
            wide = torch.float32 if dtype == torch.float64 else torch.float64
            finished = _mapped(batch, lambda t: t.to(dtype) if t.dtype == wide else t)
        return finished


class Loader:
    """Streams of micro-batches for one rank."""

    def __init__(
        self,
        dataset: Indexed,
        slices: Slices,
        device: torch.device,
        dtype: torch.dtype,
        *,
        seed: int | None,
        workers: int = 0,
        on_device: bool = True,
        channels_last: bool = False,
        part_of: Callable[[Inputs], Inputs] | None = None,
    ) -> None:
        """With a seed, epochs are shuffled by the global order; without, samples come as they lie.

        Where ranks share a sample, `part_of` cuts this rank's part out of a batch.
        """
        self.slices = slices
        self._fetch = _Fetch(dataset, seed)
        self._dataset = dataset
        self._device = device
        self._dtype = dtype
        self._workers = workers
        self._channels_last = channels_last
        self._part_of = part_of
        self._columns = _resident_columns(dataset, device) if on_device else None

    def micro_batches(self, start_step: int, end_step: int) -> Iterator[MicroBatch]:
        """All micro-batches of the steps from `start_step` up to, not including, `end_step`."""
        requests = self.slices.between(start_step, end_step)
        raw = self._gathered(requests) if self._columns is not None else self._loaded(requests)
        wanted = self.slices.between(start_step, end_step)
        for (position, samples), batch in zip(wanted, raw, strict=True):
            if isinstance(batch, GradusError):
                raise batch
            inputs = self._dataset.finish(batch, self._dtype)
            if self._channels_last:
                inputs = _mapped(inputs, _to_channels_last)
            if self._part_of is not None:
                inputs = self._part_of(inputs)
            yield MicroBatch(inputs, samples, position)

    def _gathered(self, requests: Iterator[Request]) -> Iterator[Any]:
        """From the columns on the device: only indices travel, those of many micro-batches together."""
        per_chunk = max(1, INDICES_AT_ONCE // self.slices.micro_batch)
        while chunk := list(itertools.islice(requests, per_chunk)):
            indices = torch.from_numpy(self._fetch.indices(chunk))
            if self._device.type == "cuda":
                indices = indices.pin_memory().to(self._device, non_blocking=True)
            for wanted in torch.split(indices, [_fetched(count) for _, count in chunk]):
                yield _mapped(self._columns, partial(torch.index_select, dim=0, index=wanted))

    def _loaded(self, requests: Iterator[Request]) -> Iterator[Any]:
        on_gpu = self._device.type == "cuda"
        loader: DataLoader[Any] = DataLoader(
            self._fetch,
            batch_size=None,
            sampler=requests,
            collate_fn=_as_fetched,
            num_workers=self._workers,
            pin_memory=on_gpu,
            prefetch_factor=4 if self._workers else None,
        )
        return _copied_ahead(iter(loader), self._device) if on_gpu else iter(loader)


class _Fetch(Dataset[Any]):
    """What loader workers run: a slice of the stream in, a raw batch out."""

    def __init__(self, dataset: Indexed, seed: int | None) -> None:
        self._dataset = dataset
        self._seed = seed

    def indices(self, requests: Sequence[Request]) -> np.ndarray[Any, Any]:
        """Dataset indices of the slices, one after the other."""
        positions = np.concatenate(
            [np.arange(start, start + _fetched(count), dtype=np.int64) for start, count in requests]
        )
        if self._seed is None:
            return positions % self._dataset.length
        return indices_at(self._seed, self._dataset.length, positions)

    def __getitem__(self, request: Request) -> Any:
        try:
            return self._dataset.fetch(self.indices([request]), self._seed or 0, request[0])
        except GradusError as error:
            return error  # raised by whoever asked: torch would wrap it in the traceback of its worker


def _not_a_sample(item: Any, number: int) -> InputError:
    hint = "return (input, target), or a dict whose keys are the model's arguments"
    if item is None:
        hint = "is a `return` missing? leave samples that cannot be used out of the dataset and its length; " + hint
    return InputError(
        f"data.use: item {number} is {type(item).__name__}, allowed: a dict or a tuple", hint=hint, field="data.use"
    )


def _as_fetched(batch: Any) -> Any:
    """In place of torch's default for `DataLoader`, which would turn tuples into lists."""
    return batch


def _seed_for_sample(seed: int, position: int) -> None:
    """Random transforms in a user's dataset depend on the position in the stream, not on the worker or the rank."""
    value = stable_hash("sample", seed, position)
    torch.default_generator.manual_seed(value & (2**63 - 1))  # of the CPU: nothing here is for a device
    np.random.seed(value & (2**32 - 1))
    random.seed(value)


def _fetched(count: int) -> int:
    """A rank without a real sample still has to take part in the step: it computes on one sample of weight zero."""
    return max(1, count)


def _resident_columns(dataset: Indexed, device: torch.device) -> Any:
    """The whole dataset as tensors on the device, if it is small enough to live there."""
    columns = dataset.source.columns if dataset.source is not None else None
    if columns is None:
        return None
    arrays = list(columns.values()) if isinstance(columns, Mapping) else list(columns)
    if sum(array.nbytes for array in arrays) > RESIDENT_BYTES:
        return None
    return _mapped(_tensors(columns), lambda tensor: tensor.to(device))


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Copy each batch to the device on a stream of its own, one batch ahead of the one in use."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(batch: Any) -> tuple[Any, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            moved = _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return moved, done

    ahead = None
    for batch in batches:
        following = copied(batch)
        if ahead is not None:
            yield _arrived(*ahead)
        ahead = following
    if ahead is not None:
        yield _arrived(*ahead)


def _arrived(batch: Any, done: torch.cuda.Event) -> Any:
    current = torch.cuda.current_stream()
    current.wait_event(done)

    def used_here(tensor: torch.Tensor) -> torch.Tensor:
        # The allocator must not give this memory to the copy stream again while the step still reads it.
        tensor.record_stream(current)
        return tensor

    return _mapped(batch, used_here)


def _tensors(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in batch.items()}
    return tuple(torch.from_numpy(np.ascontiguousarray(value)) for value in batch)


def _mapped(batch: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The batch with every tensor in it changed."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: _mapped(value, change) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return tuple(_mapped(value, change) for value in batch)
    return batch


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
