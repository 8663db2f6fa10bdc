"""Grouped by length, samples come once per epoch all the same, in batches that need little padding."""

from __future__ import annotations

import json
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from user_runs import line_recipe

from gradus.data.grouping import Grouped, padding_share
from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.order import AsLaid, Shuffled
from gradus.data.orders import order_for
from gradus.data.source import open_source
from gradus.schema.errors import InputError
from gradus.schema.recipe import DataBlock
from gradus.training.building import open_data


@st.composite
def grouped_orders(draw: st.DrawFn) -> Grouped:
    seed, count = draw(st.integers(0, 2**31)), draw(st.integers(1, 120))
    lengths = np.random.default_rng(seed).integers(1, 30, count)
    return Grouped(Shuffled(seed, count), lengths, seed, draw(st.integers(1, 17)), draw(st.integers(1, 6)))


@given(order=grouped_orders())
@settings(max_examples=30)
def test_every_epoch_has_every_sample_once(order: Grouped) -> None:
    for epoch in order.at(np.arange(3 * order.length)).reshape(3, -1):
        assert sorted(epoch) == list(range(order.length))


@given(order=grouped_orders())
@settings(max_examples=30)
def test_a_window_keeps_its_samples(order: Grouped) -> None:
    size = order.window * order.batch
    for start in range(0, 3 * order.length, size):
        positions = np.arange(start, start + size)
        assert sorted(order.at(positions)) == sorted(order.order.at(positions))


@given(order=grouped_orders())
@settings(max_examples=30)
def test_batches_of_a_window_do_not_overlap_in_length(order: Grouped) -> None:
    """Batches as steps have them, in every epoch: those of one window have a range of lengths each to themselves."""
    lengths = order.lengths[order.at(np.arange(3 * order.length))]
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start in range(0, len(lengths) - order.batch + 1, order.batch):
        epoch, batch = start // order.length, lengths[start : start + order.batch]
        if epoch == (start + order.batch - 1) // order.length:
            ranges.setdefault((epoch, start // order.batch // order.window), []).append((min(batch), max(batch)))
    for of_window in ranges.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(of_window)))


@given(order=grouped_orders(), data=st.data())
@settings(max_examples=20)
def test_a_sample_does_not_depend_on_how_it_is_asked_for(order: Grouped, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, 10**9), max_size=10))
    together = order.at(np.array(positions, np.int64))
    fresh = pickle.loads(pickle.dumps(order))
    assert together.tolist() == [int(fresh.at(np.array([position]))[0]) for position in reversed(positions)][::-1]


def test_batches_come_in_another_order_than_their_lengths() -> None:
    order = Grouped(AsLaid(1000), np.arange(1000), 1, 10, 50)
    firsts = order.at(np.arange(0, 500, 10))
    assert sorted(firsts) == list(range(0, 500, 10))
    assert firsts.tolist() != sorted(firsts)


def test_padding_is_counted_as_it_is_and_told_with_and_without_grouping() -> None:
    assert padding_share(np.array([1, 3, 2, 2, 5]), 2) == pytest.approx(2 / 15)
    order = Grouped(AsLaid(400), np.tile([10, 90], 200), 1, 10, 20)
    assert order.note(400) == "grouped by length: padding is 0.0% of the batches; it would be 44.4% ungrouped"


def test_the_order_is_the_one_of_all_versions() -> None:
    """Frozen: a run that resumes under a newer version must see the samples that are left, and no other."""
    order = Grouped(Shuffled(1, 11), np.array([5, 3, 8, 1, 9, 2, 7, 4, 6, 11, 10]), 1, 2, 3)
    assert order.at(np.arange(22)).tolist() == [3, 5, 2, 9, 0, 8, 1, 7, 6, 4, 10, 6, 4, 9, 0, 2, 3, 5, 1, 7, 8, 10]


def chat(folder: Path, **options: Any) -> dict[str, Any]:
    answers = ["word " * (1 + 7 * number % 40) for number in range(60)]
    records = [json.dumps({"prompt": f"say {number}", "answer": answer}) for number, answer in enumerate(answers)]
    (folder / "chat.jsonl").write_text("\n".join(records))
    return {"use": "chat", "path": str(folder / "chat.jsonl"), "context": 128, "validation": 0, **options}


@pytest.mark.parametrize("form", ["tokens", "huggingface", "seq2seq"])
def test_conversations_are_padded_to_the_longest_of_their_batch(tmp_path: Path, form: str) -> None:
    """What the model sees of a sample is the same as with padding to the context, less padding."""
    recipe = line_recipe(data=chat(tmp_path, form=form, group_by_length=4))
    data, wide = open_data(recipe, "train"), Indexed(open_source("chat", recipe.data.options | {}, "train", 7))
    assert data is not None
    assert data.source is not None
    order = order_for(data, recipe.data, 7, 6)
    assert order.length == 60
    widths = set()
    for start in range(0, 60, 6):
        numbers = order.at(np.arange(start, start + 6))
        narrow = data.finish(data.fetch(numbers), torch.float32)
        full = wide.finish(wide.fetch(numbers), torch.float32)
        for name, column in narrow.items():  # type: ignore[union-attr]
            whole = full[name]  # type: ignore[call-overload, index]
            assert torch.equal(column, whole[:, : column.shape[1]])
            rest = whole[:, column.shape[1] :]
            assert (rest == (-100 if name in ("targets", "labels") else rest[..., -1:])).all(), "padding, and no more"
        widths.add(max(column.shape[1] for column in narrow.values()))  # type: ignore[union-attr]
        if form != "seq2seq":
            longest = int(data.source.lengths[numbers].max())  # type: ignore[index]
            assert max(column.shape[1] for column in narrow.values()) == longest - (form == "tokens")  # type: ignore[union-attr]
    assert len(widths) > 3


class Sentences:
    """A user's dataset with samples of different lengths, and how to pad them."""

    def __init__(self, samples: int = 40) -> None:
        self.lengths = [1 + 7 * number % 23 for number in range(samples)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((self.lengths[number],), number)}

    @staticmethod
    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {"x": torch.nn.utils.rnn.pad_sequence([item["x"] for item in items], batch_first=True)}


def test_a_users_dataset_is_grouped_by_its_lengths_also_where_a_part_is_held_out() -> None:
    recipe = line_recipe(data={"use": f"{__file__}:Sentences", "validation": 0.25, "group_by_length": 3})
    data = open_data(recipe, "train")
    assert data is not None
    order = order_for(data, recipe.data, 1, 5)
    slices = Slices(5, 5, 1, 0, 30)
    loader = Loader(data, slices, torch.device("cpu"), torch.float32, seed=1, order=order)
    batches = [micro.inputs["x"] for micro in loader.micro_batches(0, 6)]  # type: ignore[call-overload]
    places = sum(batch.numel() for batch in batches)
    plain = Loader(data, slices, torch.device("cpu"), torch.float32, seed=1)
    without = sum(micro.inputs["x"].numel() for micro in plain.micro_batches(0, 6))  # type: ignore[call-overload]
    assert places < 0.8 * without
    samples = {int(row.max()) for batch in batches for row in batch}
    assert samples == set(data.numbers_of(np.arange(30)).tolist())


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        ([(torch.ones(1), 0)] * 4, "list does not say how long its samples are"),
        (open_source("synthetic-tokens", {"context": 4, "samples": 9}, "train", 1), "are all of one width"),
    ],
)
def test_data_without_lengths_cannot_be_grouped(dataset: Any, said: str) -> None:
    block = DataBlock(use="synthetic-tokens", group_by_length=5)
    with pytest.raises(InputError, match=said) as caught:
        order_for(Indexed(dataset), block, 1, 2)
    assert caught.value.details["field"] == "data.group_by_length"


@pytest.mark.parametrize("lengths", [[1, 2], [1.5] * 40, [[1]] * 40])
def test_lengths_that_are_none_are_refused(lengths: Any) -> None:
    data = Indexed(Sentences())
    data.dataset.lengths = lengths
    with pytest.raises(InputError, match="allowed: a whole number for each of 40 samples"):
        order_for(data, DataBlock(use="x.py:f", group_by_length=5), 1, 2)
