"""Loader: the micro-batches of one rank, from any step on, on the training device.

Which samples a step needs follows from the global order alone, so there is no sampler and no state: to resume is to
start at another step. Data that is small and in memory lives on the device; the rest comes through loader workers,
pinned memory and copies that overlap with the step before.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from gradus.data.collate import collated
from gradus.data.order import AsLaid, Indices, Order, Ranges, Shuffled, Words, noise, past_skipped
from gradus.data.sample_log import delivered_digest, delivered_digests
from gradus.data.source import RESIDENT_BYTES, Source
from gradus.data.split import Part
from gradus.data.transfer import closed_after, copied_ahead, mapped, pinned, pinned_ahead
from gradus.data.worker_count import WorkerCount, worker_count
from gradus.data.workers import Workers
from gradus.schema.errors import GradusError, InputError
from gradus.schema.stable_hash import stable_hash
from gradus.schema.user_code import user_code

Inputs = Mapping[str, Any] | tuple[Any, ...]
Request = tuple[int, int]  # of a micro-batch: how many samples the run has taken before it, and its real samples

INDICES_AT_ONCE = 32768  # of data on the device: computing and sending them one batch at a time would show
# What a worker is asked for at once: asking and answering take 0.12 ms of processor time (400 in a row, best of five,
# one core of an EPYC, November 2026), which would show with micro-batches of one. Not more than takes a moment: steps
# should come evenly.
SAMPLES_AT_ONCE = 32
SECONDS_AT_ONCE = 0.005
NUMBERS_SHOWN = 8  # of samples, in an error


class MicroBatch(NamedTuple):
    inputs: Inputs
    samples: int  # real ones; 0 means that the inputs are padding of weight zero
    position: int  # of the first sample in the global stream
    numbers_digest: int = 0  # of which samples came at which positions, as they were fetched


@dataclass(frozen=True)
class Slices:
    """Which positions of the global stream belong to a rank: contiguous slices of each step's batch."""

    batch: int
    micro_batch: int
    accumulate: int
    data_rank: int
    total_samples: int  # the stream ends here; only the last batch may be short
    skipped: Ranges = ()  # positions of the stream that are left out

    def of_step(self, step: int) -> Iterator[Request]:
        """The micro-batches of one step."""
        first = step * self.batch + self.data_rank * self.micro_batch * self.accumulate
        for index in range(self.accumulate):
            start = first + index * self.micro_batch
            yield start, max(0, min(self.micro_batch, self.total_samples - start))

    def positions(self, request: Request) -> Indices:
        """Where in the stream the samples of a micro-batch are; a rank without a real one still gets one to work on."""
        start, count = request
        return past_skipped(np.arange(start, start + _fetched(count), dtype=np.int64), self.skipped)

    def of_steps_from(self, step: int) -> Iterator[Request]:
        """The micro-batches of this step and those after it, as far as the stream goes."""
        return self.between(step, -(-self.total_samples // self.batch))

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
                own_loop = field.startswith("run.")
                itself = "pass its dataset, loader.dataset" if own_loop else "return the dataset itself"
                hint = f"{itself}: batches are made from the recipe's `batch`"
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

    def fetch(self, indices: Indices, seed: int = 0, positions: Indices | None = None) -> Any:
        """A batch in raw form, as tensors in host memory; `positions` are those of its samples in the stream."""
        if self.source is not None:
            if positions is None:
                return _tensors(self.source.fetch(indices))
            return _tensors(self.source.fetch_drawn(indices, _draws(seed, positions)))
        items: list[Any] = []
        positions = np.zeros_like(indices) if positions is None else positions
        for index, number, position in zip(indices, self.numbers_of(indices), positions, strict=True):
            _seed_for_sample(seed, int(position))
            with user_code("data.use", f"item {number}"):
                item = self.dataset[int(index)]
            # A user's own collate may know what to do with other items of a batch.
            if not isinstance(item, (Mapping, tuple, list)) and (self._collate is collated or not items):
                raise _not_a_sample(item, number)
            items.append(item)
        with user_code("data.use", "collate"):
            ours = self._collate is collated
            batch = collated(items, self.numbers_of(indices).tolist()) if ours else self._collate(items)
        return tuple(batch) if isinstance(batch, list) else batch

    def drawn(self, seed: int, positions: Indices) -> Indices | None:
        """What the samples at these positions are augmented by on the device, if they are."""
        return None if self.source is None else self.source.drawn(_draws(seed, positions))

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
            finished = mapped(batch, lambda t: t.to(dtype) if t.dtype == wide else t)
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
        order: Order | None = None,
        workers: int = 0,
        timeout_seconds: float | None = None,
        on_device: bool = True,
        channels_last: bool = False,
        part_of: Callable[[Inputs], Inputs] | None = None,
        copying: AbstractContextManager[object] | None = None,
    ) -> None:
        """Without an `order`, a seed shuffles each epoch, and without a seed samples come as they lie.

        A worker that gives no answer for `timeout_seconds` ends the run. Where ranks share a sample, `part_of` cuts
        this rank's part out of a batch. What copies batches to the device does so inside `copying`, which may be
        entered again and again.
        """
        self.slices = slices
        default = AsLaid(dataset.length) if seed is None else Shuffled(seed, dataset.length)
        self._fetch = _Fetch(dataset, slices, order or default, seed or 0)
        self._dataset = dataset
        self._device = device
        self._dtype = dtype
        self.workers = workers
        self._timeout_seconds = timeout_seconds
        self._channels_last = channels_last
        self._part_of = part_of
        self._copying = copying or nullcontext()
        self._columns = _resident_columns(dataset, device) if on_device else None

    def micro_batches(self, start_step: int, end_step: int) -> Iterator[MicroBatch]:
        """All micro-batches of the steps from `start_step` up to, not including, `end_step`."""
        requests = self.slices.between(start_step, end_step)
        raw = self._gathered(requests) if self._columns is not None else self._loaded(requests)
        wanted = self.slices.between(start_step, end_step)
        with closed_after(raw):
            for (number, samples), found in zip(wanted, raw, strict=True):
                if isinstance(found, GradusError):
                    raise found
                batch, digest = found
                inputs = self._dataset.finish(batch, self._dtype)
                if self._channels_last:
                    inputs = mapped(inputs, _to_channels_last)
                if self._part_of is not None:
                    inputs = self._part_of(inputs)
                yield MicroBatch(inputs, samples, int(self.slices.positions((number, 1))[0]), digest)

    def choose_workers(self, step: int, cores: int) -> WorkerCount | None:
        """As many as a measurement on the micro-batches from `step` on asks for; None where data is on the device."""
        if self._columns is not None:
            return None
        chosen = worker_count(self._fetch, self.slices.of_steps_from(step), cores)
        self.workers = chosen.workers
        return chosen

    def _gathered(self, requests: Iterator[Request]) -> Iterator[Any]:
        """From the columns on the device: only indices and draws travel, those of many micro-batches together."""
        per_chunk = max(1, INDICES_AT_ONCE // self.slices.micro_batch)
        while chunk := list(itertools.islice(requests, per_chunk)):
            positions, numbers = self._fetch.positions(chunk), self._fetch.indices(chunk)
            fetched, real = [_fetched(count) for _, count in chunk], [count for _, count in chunk]
            drawn = self._fetch.drawn(positions)
            sent = torch.from_numpy(np.stack([numbers] if drawn is None else [numbers, drawn]))
            if self._device.type == "cuda":
                with self._copying:
                    sent = sent.pin_memory().to(self._device, non_blocking=True)
            digests = delivered_digests(positions, numbers, fetched, real)
            for (wanted, *beside), digest in zip(torch.split(sent, fetched, dim=1), digests, strict=True):
                batch = mapped(self._columns, partial(torch.index_select, dim=0, index=wanted))
                yield (*batch, *beside) if beside else batch, digest

    def _loaded(self, requests: Iterator[Request]) -> Iterator[Any]:
        on_gpu = self._device.type == "cuda"
        if not self.workers:
            raw = map(self._fetch, requests)
            return copied_ahead(map(self._pinned, raw), self._device, self._copying) if on_gpu else raw
        workers = Workers(self._fetch.several, self.workers, self._fetch.described, self._timeout_seconds)
        batches = self._from(workers, requests)
        if on_gpu:
            return copied_ahead(pinned_ahead(batches, self._device, workers.kill), self._device, self._copying)
        return batches

    def _pinned(self, batch: Any) -> Any:
        with self._copying:
            return pinned(batch)

    def _from(self, workers: Workers[list[Request]], requests: Iterator[Request]) -> Iterator[Any]:
        at_once = 1
        most = max(1, SAMPLES_AT_ONCE // self.slices.micro_batch)

        def tasks() -> Iterator[list[Request]]:
            """A few micro-batches at a time where they are small and quick; one until that is known."""
            while task := list(itertools.islice(requests, at_once)):
                yield task

        wanted = True
        try:
            for seconds, batches in workers.answers(tasks()):
                at_once = max(1, min(most, round(SECONDS_AT_ONCE * len(batches) / seconds)))
                yield from batches
            wanted = False
        finally:
            workers.close(at_once=wanted)


class _Fetch:
    """What loader workers run: a slice of the stream in, a raw batch out."""

    def __init__(self, dataset: Indexed, slices: Slices, order: Order, seed: int) -> None:
        self._dataset, self._slices, self._order, self._seed = dataset, slices, order, seed

    def positions(self, requests: Sequence[Request]) -> Indices:
        return np.concatenate([self._slices.positions(request) for request in requests])

    def indices(self, requests: Sequence[Request]) -> Indices:
        """Dataset indices of the slices, one after the other."""
        return self._order.at(self.positions(requests))

    def drawn(self, positions: Indices) -> Indices | None:
        return self._dataset.drawn(self._seed, positions)

    def __call__(self, request: Request) -> Any:
        """The batch, with the digest of what it really holds."""
        positions, real = self._slices.positions(request), request[1]
        try:
            numbers = self._order.at(positions)
            batch = self._dataset.fetch(numbers, self._seed, positions)
            return batch, delivered_digest(positions[:real], numbers[:real])
        except GradusError as error:
            return error  # raised when its turn has come: the micro-batches before it are good

    def several(self, requests: list[Request]) -> tuple[float, list[Any]]:
        """The batches, and how many seconds they took."""
        begun = time.perf_counter()
        batches = [self(request) for request in requests]
        return time.perf_counter() - begun, batches

    def described(self, requests: list[Request]) -> str:
        numbers = self._dataset.numbers_of(self.indices(requests)).tolist()
        shown = ", ".join(map(str, numbers[:NUMBERS_SHOWN])) + (", …" if len(numbers) > NUMBERS_SHOWN else "")
        first = int(self._slices.positions((requests[0][0], 1))[0])
        return f"{len(numbers)} samples from position {first} on (items {shown})"


def _not_a_sample(item: Any, number: int) -> InputError:
    hint = "return (input, target), or a dict whose keys are the model's arguments"
    if item is None:
        hint = "is a `return` missing? leave samples that cannot be used out of the dataset and its length; " + hint
    return InputError(
        f"data.use: item {number} is {type(item).__name__}, allowed: a dict or a tuple", hint=hint, field="data.use"
    )


def _draws(seed: int, positions: Indices) -> Words:
    """For each sample a random word, from which all chance in its augmentation comes."""
    return noise(stable_hash("augment", seed), positions)


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
    return mapped(_tensors(columns), lambda tensor: tensor.to(device))


def _tensors(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in batch.items()}
    return tuple(torch.from_numpy(np.ascontiguousarray(value)) for value in batch)


def _to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
