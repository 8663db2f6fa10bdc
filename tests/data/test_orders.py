"""A `data:` block says in which order samples come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradus.data.block_shuffle import BlockShuffled
from gradus.data.grouping import Grouped
from gradus.data.loader import Indexed
from gradus.data.mixing import Mixed
from gradus.data.order import AsLaid, Order, Shuffled
from gradus.data.orders import note_of, order_for
from gradus.data.source import open_source
from gradus.schema.errors import InputError
from gradus.schema.recipe import DataBlock, Recipe

DOCUMENT = {"name": "x", "batch": 4, "steps": 1}
SOURCES = {
    "a": {"use": "synthetic-tokens", "samples": 30, "weight": 1, "validation": 0},
    "b": {"use": "synthetic-tokens", "samples": 50, "weight": 3, "validation": 0},
}


def block(**keys: Any) -> DataBlock:
    return Recipe.from_document({**DOCUMENT, "data": {"use": "x.py:f", **keys}}).data


class Sized(list[Any]):
    lengths = tuple(range(50))


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, Shuffled(7, 50)),
        ({"shuffle": "full"}, Shuffled(7, 50)),
        ({"shuffle": "none"}, AsLaid(50)),
        ({"shuffle": {"blocks": 8, "window": 3}}, BlockShuffled(7, 50, 8, 3)),
    ],
)
def test_the_key_shuffle_names_the_order(keys: dict[str, Any], expected: Order) -> None:
    data = Indexed(Sized([(0, 0)] * 50))
    assert order_for(data, block(**keys), 7, 4) == expected
    grouped = order_for(data, block(group_by_length=6, **keys), 7, 4)
    assert isinstance(grouped, Grouped)
    assert (grouped.order, grouped.batch, grouped.window, grouped.seed) == (expected, 4, 6, 7)


@pytest.mark.parametrize(
    "shuffle", ["some", True, {"blocks": 4}, {"blocks": 0, "window": 2}, {"block": 4, "window": 2}]
)
def test_another_value_of_shuffle_is_refused(shuffle: Any) -> None:
    with pytest.raises(InputError, match=r"data\.shuffle"):
        block(shuffle=shuffle)


def test_the_keys_of_the_order_are_not_given_to_a_users_callable() -> None:
    assert block(shuffle="none", group_by_length=3, mine=1).options == {"mine": 1}


def test_the_sources_of_a_mixture_are_shuffled_as_the_recipe_says() -> None:
    source = Indexed(open_source("mixture", {"sources": SOURCES, "context": 4}, "train", 1))
    order = order_for(source, block(shuffle="none"), 1, 4)
    assert isinstance(order, Mixed)
    assert order.orders == (AsLaid(30), AsLaid(50))
    assert order.at(np.arange(8)).tolist() == [30, 31, 0, 32, 33, 34, 1, 35]
    seeds = {inner.seed for inner in order_for(source, block(), 1, 4).orders}  # type: ignore[attr-defined]
    assert len(seeds) == 2, "sources of one length do not go through it in step"


def test_what_there_is_to_say_is_told_once() -> None:
    data = Indexed(Sized([(0, 0)] * 50))
    assert note_of(order_for(data, block(), 7, 4), 100) is None
    told = note_of(order_for(data, block(group_by_length=6), 7, 4), 100)
    assert str(told).startswith("grouped by length: padding is ")
