"""Loader: all ranks together read exactly the global order, from any step on, by any way that data can take."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from user_runs import line_recipe

from gradus.data.loader import Indexed, Loader, MicroBatch, Slices
from gradus.data.order import sample_indices
from gradus.data.source import Batch, Source, open_source
from gradus.data.workers import WorkerFailed, Workers
from gradus.schema.errors import GradusError, InputError
from gradus.training.building import open_data

CPU = torch.device("cpu")
SEED = 9


class Numbered:
    """Item i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(index), torch.tensor(float(index), dtype=torch.float32)


def loader(data: Any, slices: Slices, *, seed: int | None = SEED, dtype: Any = torch.float32, **options: Any) -> Loader:
    return Loader(Indexed(data), slices, CPU, dtype, seed=seed, **options)


def plain_slices(batch: int, total: int) -> Slices:
    return Slices(batch, batch, 1, 0, total)


def same_batches(found: list[MicroBatch], expected: list[MicroBatch]) -> bool:
    def tensors(inputs: Any) -> list[tuple[Any, torch.Tensor]]:
        return list(inputs.items()) if isinstance(inputs, dict) else list(enumerate(inputs))

    return len(found) == len(expected) and all(
        a[1:] == b[1:]
        and all(
            k == m and x.dtype == y.dtype and torch.equal(x, y)
            for (k, x), (m, y) in zip(tensors(a.inputs), tensors(b.inputs), strict=True)
        )
        for a, b in zip(found, expected, strict=True)
    )


def indices_of_step(batches: list[MicroBatch]) -> list[int]:
    return [int(index) for micro in batches for index in micro.inputs[0][: micro.samples]]  # type: ignore[index]


@pytest.mark.parametrize("total", [24, 36, 25, 30, 35])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_ranks_together_have_exactly_the_global_batch_in_order(ranks: int, accumulate: int, total: int) -> None:
    batch = 24 if accumulate == 2 else 12
    micro_batch = batch // ranks // accumulate
    if micro_batch * ranks * accumulate != batch:
        micro_batch, batch = 1, ranks * accumulate
    length = 17  # so that a step crosses from one epoch into the next
    steps = -(-total // batch)
    of_rank = []
    for rank in range(ranks):
        slices = Slices(batch, micro_batch, accumulate, rank, total)
        of_rank.append(list(loader(Numbered(length), slices).micro_batches(0, steps)))
        assert len(of_rank[-1]) == steps * accumulate, "every rank takes part in every step"
    for step in range(steps):
        found = []
        for batches in of_rank:
            found += indices_of_step(batches[step * accumulate : (step + 1) * accumulate])
        count = min(batch, total - step * batch)
        assert found == sample_indices(SEED, length, step * batch, count).tolist()


def test_a_micro_batch_beyond_the_end_is_one_sample_of_weight_zero() -> None:
    (micro,) = loader(Numbered(10), Slices(4, 2, 1, 1, 5)).micro_batches(1, 2)
    assert micro.samples == 0
    assert len(micro.inputs[0]) == 1  # type: ignore[index]


def test_each_micro_batch_knows_its_position_in_the_stream() -> None:
    batches = loader(Numbered(100), Slices(12, 3, 2, 1, 100)).micro_batches(2, 4)
    assert [(micro.position, micro.samples) for micro in batches] == [(30, 3), (33, 3), (42, 3), (45, 3)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("start", [1, 4])
def test_to_start_at_a_step_is_to_skip_those_before(start: int, workers: int) -> None:
    data, slices = Numbered(23), Slices(6, 2, 3, 0, 100)
    everything = list(loader(data, slices).micro_batches(0, 6))
    assert same_batches(list(loader(data, slices, workers=workers).micro_batches(start, 6)), everything[start * 3 :])


def test_without_a_seed_samples_come_as_they_lie() -> None:
    batches = list(loader(Numbered(5), plain_slices(2, 5), seed=None).micro_batches(0, 3))
    assert [micro.inputs[0].tolist() for micro in batches] == [[0, 1], [2, 3], [4]]  # type: ignore[index]


@pytest.mark.parametrize("data_name", ["numbered", "random", "tokens"])
def test_workers_change_nothing(data_name: str, tmp_path: Path) -> None:
    data = {"numbered": lambda: Numbered(23), "random": lambda: Augmented(23), "tokens": lambda: mapped(tmp_path)}
    slices = plain_slices(4, 30)
    none, two = (
        list(loader(data[data_name](), slices, workers=workers, on_device=False).micro_batches(0, 8))
        for workers in (0, 2)
    )
    assert same_batches(two, none)


class Augmented(Numbered):
    """As the usual image transforms do: random numbers drawn from the global generators of three libraries."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.rand(()) + float(np.random.rand()) + random.random()
        return torch.tensor(index), drawn


def drawn_by_position(slices: list[Slices], start: int, end: int, workers: int = 0) -> dict[int, float]:
    found = {}
    for of_rank in slices:
        for micro in loader(Augmented(9), of_rank, workers=workers).micro_batches(start, end):
            for offset in range(micro.samples):
                found[micro.position + offset] = float(micro.inputs[1][offset])  # type: ignore[index]
    return found


def test_random_numbers_of_a_users_dataset_depend_on_the_position_alone() -> None:
    """Not on the rank, the worker, the size of a micro-batch, or where the run was resumed."""
    alone = drawn_by_position([plain_slices(6, 18)], 0, 3)
    assert len(set(alone.values())) == 18, "the second epoch has other random numbers than the first"
    torch.manual_seed(5)
    assert drawn_by_position([Slices(6, 1, 3, rank, 18) for rank in (0, 1)], 0, 3) == alone
    resumed = drawn_by_position([plain_slices(6, 18)], 1, 3, workers=1)
    assert resumed == {position: value for position, value in alone.items() if position >= 6}


def text(folder: Path, dtype: str) -> Source:
    file = folder / f"{dtype}.bin"
    np.random.default_rng(1).integers(0, 60_000, 2_000).astype(dtype).tofile(file)
    return open_source("tokens", {"path": str(file), "context": 16, "dtype": dtype}, "train", SEED)


def mapped(folder: Path) -> Source:
    return text(folder, "uint16")


class InMemory(Source):
    """Columns of one type, kept in memory."""

    def __init__(self, dtype: str) -> None:
        super().__init__(50)
        high = min(60_000, np.iinfo(dtype).max)
        self.tokens = np.random.default_rng(1).integers(0, high, (50, 7)).astype(dtype)

    def fetch(self, indices: Any) -> Batch:
        return {"tokens": self.tokens[indices]}

    def finish(self, batch: Any, dtype: Any) -> Any:
        return {"tokens": batch["tokens"].long()}

    @property
    def columns(self) -> Batch:
        return {"tokens": self.tokens}


SOURCES = {
    "uint8": lambda: InMemory("uint8"),
    "uint16": lambda: InMemory("uint16"),
    "uint32": lambda: InMemory("uint32"),
    "int64": lambda: InMemory("int64"),
    "stdlib-text": lambda: open_source("stdlib-text", {"context": 8, "max_bytes": 4000}, "train", SEED),
    "masked": lambda: open_source(
        "stdlib-text", {"context": 8, "max_bytes": 4000, "objective": "masked"}, "train", SEED
    ),
    "synthetic-images": lambda: open_source("synthetic-images", {"size": 8, "samples": 40}, "train", SEED),
    "augmented": lambda: open_source("digits", {"augment": "standard", "limit": 40}, "train", SEED),
}


@pytest.mark.parametrize("name", SOURCES)
def test_data_on_the_device_and_data_from_the_loader_are_the_same(name: str) -> None:
    slices = plain_slices(6, 100)
    resident = list(loader(SOURCES[name](), slices, on_device=True).micro_batches(0, 17))
    loaded = list(loader(SOURCES[name](), slices, on_device=False, workers=1).micro_batches(0, 17))
    assert same_batches(loaded, resident)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_gives_its_tokens_with_and_without_workers(tmp_path: Path, dtype: str) -> None:
    source = text(tmp_path, dtype)
    raw = np.fromfile(tmp_path / f"{dtype}.bin", dtype).astype(np.int64)
    slices = plain_slices(5, 40)
    for workers in (0, 2):
        batches = list(loader(source, slices, seed=None, workers=workers).micro_batches(0, 8))
        starts = source.part.locate(np.arange(40)) * 16  # type: ignore[attr-defined]
        expected = np.stack([raw[start : start + 17] for start in starts])
        tokens = torch.cat([micro.inputs["tokens"] for micro in batches])  # type: ignore[call-overload]
        targets = torch.cat([micro.inputs["targets"] for micro in batches])  # type: ignore[call-overload]
        assert np.array_equal(tokens.numpy(), expected[:, :-1])
        assert np.array_equal(targets.numpy(), expected[:, 1:])


def test_a_dataset_that_is_too_large_stays_off_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradus.data.loader.RESIDENT_BYTES", 50)
    assert loader(InMemory("uint8"), plain_slices(5, 10))._columns is None
    monkeypatch.setattr("gradus.data.loader.RESIDENT_BYTES", 50 * 7)
    assert loader(InMemory("uint8"), plain_slices(5, 10))._columns is not None


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tuple_stays_a_tuple(workers: int) -> None:
    (micro,) = loader(Numbered(5), plain_slices(2, 2), workers=workers).micro_batches(0, 1)
    assert isinstance(micro.inputs, tuple)


def test_real_numbers_become_fp64_where_the_run_is_in_fp64_and_whole_numbers_do_not() -> None:
    (micro,) = loader(Numbered(5), plain_slices(2, 2), dtype=torch.float64).micro_batches(0, 1)
    assert [tensor.dtype for tensor in micro.inputs] == [torch.int64, torch.float64]  # type: ignore[union-attr]


def test_images_can_be_laid_out_with_channels_last() -> None:
    source = open_source("synthetic-images", {"size": 8, "samples": 40}, "train", SEED)
    (micro,) = loader(source, plain_slices(4, 4), channels_last=True).micro_batches(0, 1)
    assert micro.inputs[0].is_contiguous(memory_format=torch.channels_last)  # type: ignore[index]


class Dying(Numbered):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        os._exit(3)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_dies_is_an_error_and_not_a_hang(workers: int) -> None:
    message = (
        r"loader worker \d of .* ended itself with exit code 3 while fetching 2 samples from position \d on \(items "
    )
    with pytest.raises(WorkerFailed, match=message):
        list(loader(Dying(20), plain_slices(2, 20), workers=workers).micro_batches(0, 10))


def asked_at_once(monkeypatch: pytest.MonkeyPatch, data: Any, micro_batch: int, samples: int = 800) -> list[int]:
    """How many micro-batches a worker was asked for at a time."""
    found: list[int] = []

    class Watched(Workers[list[Any]]):
        def answers(self, tasks: Any, ahead: int = 4) -> Any:
            def watched() -> Any:
                for task in tasks:
                    found.append(len(task))
                    yield task

            return super().answers(watched(), ahead)

    monkeypatch.setattr("gradus.data.loader.Workers", Watched)
    steps = samples // micro_batch
    streamed = loader(data, plain_slices(micro_batch, samples), workers=1, on_device=False)
    assert len(list(streamed.micro_batches(0, steps))) == sum(found) == steps
    return found


def test_a_worker_is_asked_for_several_micro_batches_at_once_if_they_are_small_and_quick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Asking and answering takes time; but the first step must not wait for more than it needs, nor any for long."""

    class Slow(Numbered):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            time.sleep(0.006)
            return super().__getitem__(index)

    small = asked_at_once(monkeypatch, open_source("synthetic-images", {"size": 4, "samples": 40}, "train", 1), 2, 300)
    assert small[:4] == [1, 1, 1, 1]
    assert 4 < max(small) <= 16
    assert set(asked_at_once(monkeypatch, Numbered(23), 80)) == {1}
    assert set(asked_at_once(monkeypatch, Slow(23), 10, 120)) == {1}


def test_a_stream_that_is_given_up_leaves_no_process() -> None:
    before = mp.active_children()  # of tests before
    batches = loader(Numbered(50), plain_slices(2, 4000), workers=2).micro_batches(0, 2000)
    next(batches)
    workers = [process for process in mp.active_children() if process not in before]
    assert len(workers) == 2
    batches.close()  # type: ignore[attr-defined]
    assert not [worker for worker in workers if worker.is_alive()]


class Broken(Numbered):
    def __init__(self, length: int, error: type[Exception]) -> None:
        super().__init__(length)
        self.error = error

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 13:
            raise self.error(f"cannot read image {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("error", "exit_code"), [(ValueError, 2), (OSError, 1)])  # a disk may work the next time
def test_an_item_that_raises_is_told_with_its_number_and_the_users_line(
    workers: int, error: type[Exception], exit_code: int
) -> None:
    with pytest.raises(GradusError) as caught:
        list(loader(Broken(20, error), plain_slices(2, 20), seed=None, workers=workers).micro_batches(6, 10))
    assert caught.value.message == f"data.use: item 13 raised {error.__name__}: cannot read image 13"
    assert caught.value.exit_code == exit_code
    assert f"the error is in {__file__}, line " in str(caught.value.hint)
    assert "raise self.error(" in str(caught.value.hint)


@pytest.mark.parametrize("workers", [0, 1])
def test_one_item_that_is_none_is_told_with_its_number(workers: int) -> None:
    data = [None if number == 13 else (torch.ones(2), number) for number in range(20)]
    with pytest.raises(InputError) as caught:
        list(loader(data, plain_slices(4, 20), seed=None, workers=workers).micro_batches(0, 5))
    assert caught.value.message == "data.use: item 13 is NoneType, allowed: a dict or a tuple"
    assert "`return`" in str(caught.value.hint)


def test_an_item_is_told_with_the_number_that_the_users_own_dataset_gives_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def data():\n    return [None] * 10\n")
    train = open_data(line_recipe(data={"use": f"{tmp_path}/mine.py:data", "validation": 0.5}), "train")
    assert train is not None
    indices = np.arange(3)
    number = train.numbers_of(indices)[0]
    with pytest.raises(InputError, match=f"item {number} is NoneType"):
        train.fetch(indices)


def test_a_users_collate_may_drop_an_item_and_is_named_when_it_raises() -> None:
    class Own(list[Any]):
        def collate(self, items: list[Any]) -> Any:
            return {"x": torch.tensor([item["x"] for item in items if item is not None])}

    assert Indexed(Own([{"x": 1}, None])).fetch(np.arange(2))["x"].tolist() == [1]
    with pytest.raises(InputError, match=r"data\.use: collate raised KeyError: 'x'") as caught:
        Indexed(Own([{"y": 1}])).fetch(np.arange(1))
    assert __file__ in str(caught.value.hint)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_input_found_by_a_worker_arrives_as_it_was_raised(workers: int) -> None:
    """Without the worker's traceback in its message, and with its hint."""
    with pytest.raises(InputError) as caught:
        list(loader([1.0, 2.0], plain_slices(2, 2), workers=workers).micro_batches(0, 1))
    assert caught.value.message == "data.use: item 0 is float, allowed: a dict or a tuple"
    assert "(input, target)" in str(caught.value.hint)
    assert caught.value.details["field"] == "data.use"


def test_what_is_held_out_of_a_users_only_dataset_is_said() -> None:
    recipe = line_recipe()  # 64 points, and nothing about validation
    train = open_data(recipe, "train")
    assert train is not None
    assert train.note == "6 of 64 samples are held out for validation (data.validation: 0.1)"
    nothing = open_data(line_recipe(data={"use": recipe.data.use, "validation": 0}), "train")
    assert nothing is not None
    assert nothing.note is None
