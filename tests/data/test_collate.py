"""Samples become a batch however they are written, and samples that do not fit say which entry differs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from gradus.data.collate import collated
from gradus.data.loader import Indexed
from gradus.schema.errors import InputError


def test_lists_of_numbers_are_tensors_as_a_tokenizer_means_them() -> None:
    batch = collated(
        [{"input_ids": [1, 2, 3], "weights": [[0.5], [1.5]]}, {"input_ids": [4, 5, 6], "weights": [[2.0], [0]]}]
    )
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert batch["weights"].shape == (2, 2, 1)
    assert collated([([1, 2], 0), ([3, 4], 1)])[0].tolist() == [[1, 2], [3, 4]]


def test_nested_dicts_tuples_arrays_numbers_and_texts_stay_what_they_are() -> None:
    item = {"x": {"image": np.ones((2, 2)), "scale": 3}, "pair": (torch.ones(1), 2.0), "text": "a"}
    batch = collated([item, item])
    assert batch["x"]["image"].shape == (2, 2, 2)
    assert batch["x"]["scale"].tolist() == [3, 3]
    assert batch["pair"][1].tolist() == [2.0, 2.0]
    assert batch["text"] == ["a", "a"]


class Sample(NamedTuple):
    x: torch.Tensor
    y: int


def test_named_tuples_keep_their_names() -> None:
    assert collated([Sample(torch.ones(2), 1)] * 3).y.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("items", "words", "hint"),
    [
        ([{"x": [1, 2]}, {"x": [1, 2, 3]}], "x is a list of 2, a list of 3", "pad"),
        ([{"x": torch.ones(2), "y": 0}, {"x": torch.ones(3), "y": 0}], r"x is float32 \[2\], float32 \[3\]", "pad"),
        ([(torch.ones(2), 0), (torch.ones(2, 1), 0)], r"0 is float32 \[2\], float32 \[2, 1\]", "collate"),
        ([{"x": 1}, {"y": 1}], "x is int, missing", "alike"),
        ([{"x": {"a": torch.ones(1)}}, {"x": {"a": torch.ones(2)}}], r"x\.a is float32 \[1\], float32 \[2\]", "pad"),
        ([{"x": 1, "y": None}] * 2, "y is NoneType", "leave the entry out"),
        ([{"x": 1}, None], "a sample is missing, NoneType", "leave the entry out"),
    ],
)
def test_samples_that_cannot_form_a_batch_say_which_entry_differs(items: list[Any], words: str, hint: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        collated(items)
    assert hint in str(caught.value.hint)
    assert caught.value.details["field"] == "data.use"


def test_the_samples_that_differ_are_named_by_their_numbers_in_the_dataset() -> None:
    samples = [(torch.ones(2 if number != 70 else 3), 0) for number in range(100)]
    with pytest.raises(
        InputError, match=r"element 0 is float32 \[2\] in items 60, 61, 62, …, float32 \[3\] in item 70"
    ):
        Indexed(samples).fetch(np.arange(60, 80))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("dataset", "words", "hint"),
    [
        (Stream(), "Stream does not give a sample by its number", "collect them in a list"),
        ((n for n in range(3)), "generator does not give", "collect them in a list"),
        (DataLoader(TensorDataset(torch.ones(3))), "DataLoader does not give", "return the dataset itself"),
    ],
)
def test_data_that_can_only_be_iterated_over_is_refused_with_what_to_do(dataset: Any, words: str, hint: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        Indexed(dataset)
    assert hint in str(caught.value.hint)


@pytest.mark.parametrize("item", [torch.ones(3), 4, "text", np.ones(2)])
def test_an_item_that_is_neither_dict_nor_tuple_is_refused_with_both(item: Any) -> None:
    with pytest.raises(InputError, match=r"item 0 is \w+, allowed: a dict or a tuple") as caught:
        Indexed([item, item]).fetch(np.array([0, 1]))
    assert "(input, target)" in str(caught.value.hint)
