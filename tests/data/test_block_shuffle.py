"""A block-wise shuffle visits every sample once per epoch, and reads few blocks at a time."""

from __future__ import annotations

import pickle
from itertools import pairwise

import numpy as np
from counted_work import work_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.data.block_shuffle import BlockShuffled

orders = st.builds(
    BlockShuffled,
    seed=st.integers(0, 2**63),
    length=st.integers(1, 300),
    block=st.integers(1, 50),
    window=st.integers(1, 7),
)


@given(order=orders)
@settings(max_examples=40)
def test_every_epoch_has_every_sample_once(order: BlockShuffled) -> None:
    for epoch in order.at(np.arange(3 * order.length)).reshape(3, -1):
        assert sorted(epoch) == list(range(order.length))


@given(order=orders, data=st.data())
@settings(max_examples=40)
def test_a_sample_does_not_depend_on_how_it_is_asked_for(order: BlockShuffled, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, 10**12), max_size=20))
    together = order.at(np.array(positions, np.int64))
    assert together.tolist() == [int(order.at(np.array([position]))[0]) for position in positions]


@given(order=orders)
@settings(max_examples=40)
def test_blocks_are_finished_before_the_next_ones_are_begun(order: BlockShuffled) -> None:
    """An epoch is a row of windows, each of which touches only its own blocks, and no window is left over."""
    blocks = order.at(np.arange(order.length)) // order.block
    first_seen, last_seen = {}, {}
    for place, block in enumerate(blocks.tolist()):
        first_seen.setdefault(block, place)
        last_seen[block] = place
    begun = sorted(first_seen, key=lambda block: first_seen[block])
    windows = [begun[start : start + order.window] for start in range(0, len(begun), order.window)]
    for before, after in pairwise(windows):
        assert max(last_seen[block] for block in before) < min(first_seen[block] for block in after)


def test_samples_of_a_window_are_mixed_and_windows_have_other_blocks_each_epoch() -> None:
    order = BlockShuffled(3, 10_000, 100, 8)
    one, two = order.at(np.arange(20_000)).reshape(2, -1)
    assert abs(np.corrcoef(np.arange(800), one[:800])[0, 1]) < 0.5
    assert np.mean(np.diff(one) == 1) < 0.02, "neighbours in a block do not stay neighbours"
    assert set(one[:800] // 100) != set(two[:800] // 100)
    assert set(one[:800] // 100) != set(BlockShuffled(4, 10_000, 100, 8).at(np.arange(800)) // 100)


def test_the_short_block_comes_anywhere_in_an_epoch() -> None:
    order = BlockShuffled(1, 95, 10, 1)
    places = [int(np.flatnonzero(epoch // 10 == 9)[0]) // 10 for epoch in order.at(np.arange(9500)).reshape(100, -1)]
    assert set(places) == set(range(10))


def test_the_length_costs_nothing() -> None:
    found = BlockShuffled(1, 2**60 + 7, 1000, 16).at(np.arange(5 * 2**60, 5 * 2**60 + 1000))
    assert len(set(found)) == 1000
    assert len(set(found // 1000)) <= 32
    small, large = (
        work_of(lambda n=n: BlockShuffled(1, n, 1000, 16).at(np.arange(5 * n, 5 * n + 1000)))
        for n in (2**17 + 7, 2**60 + 7)
    )
    assert large.lines <= 2 * small.lines, "as many operations, but for cycles that are walked"
    assert large.peak_bytes < 2 * small.peak_bytes, "on arrays as short"


def test_it_travels_to_a_worker() -> None:
    order = BlockShuffled(1, 95, 10, 2)
    assert pickle.loads(pickle.dumps(order)) == order


def test_the_order_is_the_one_of_all_versions() -> None:
    """Frozen: a run that resumes under a newer version must see the samples that are left, and no other."""
    assert BlockShuffled(1, 11, 3, 2).at(np.arange(22)).tolist() == [
        4,
        3,
        10,
        5,
        9,
        0,
        2,
        1,
        6,
        8,
        7,
        2,
        7,
        0,
        1,
        8,
        6,
        9,
        4,
        3,
        5,
        10,
    ]
