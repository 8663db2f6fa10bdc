"""The global order is a keyed permutation per epoch, random enough, and frozen."""

from __future__ import annotations

from math import factorial

import numpy as np
import pytest
from counted_work import work_of
from hypothesis import given
from hypothesis import strategies as st

from gradus.data.order import noise, permuted, sample_indices

lengths = st.integers(1, 3000)
seeds = st.integers(0, 2**63)


def chi_square_excess(counts: np.ndarray) -> float:
    """How far the counts are from uniform, in standard deviations of the chi-square statistic."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@given(length=lengths, key=st.integers(0, 2**64 - 1))
def test_every_key_permutes_every_length(length: int, key: int) -> None:
    assert sorted(permuted(key, length, np.arange(length))) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 1023, 1024, 1025, 4097])
def test_lengths_around_powers_of_two_are_permuted(length: int) -> None:
    for epoch in range(5):
        assert sorted(sample_indices(1, length, epoch * length, length)) == list(range(length))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [1, 7, 100, 101])
def test_an_epoch_visits_every_sample_once_across_all_ranks(world: int, length: int) -> None:
    batch, epochs = 12, 3
    stream = np.full(epochs * length + batch, -1)
    for step in range(epochs * length // batch + 1):
        for rank in range(world):
            share = batch // world
            start = step * batch + rank * share
            stream[start : start + share] = sample_indices(5, length, start, share)
    for epoch in range(epochs):
        assert sorted(stream[epoch * length : (epoch + 1) * length]) == list(range(length))


@given(seed=seeds, length=lengths, start=st.integers(0, 10**12), count=st.integers(0, 40))
def test_an_index_does_not_depend_on_how_it_is_asked_for(seed: int, length: int, start: int, count: int) -> None:
    together = sample_indices(seed, length, start, count)
    alone = [int(sample_indices(seed, length, position, 1)[0]) for position in range(start, start + count)]
    assert together.dtype == np.int64
    assert together.tolist() == alone


@pytest.mark.parametrize("length", [2**60, 2**62 - 1, 2**62])
def test_the_length_costs_nothing(length: int) -> None:
    indices = sample_indices(1, length, 3 * length - 500, 1000)
    assert indices.min() >= 0
    assert indices.max() < length
    assert indices.max() > length // 2
    assert len(set(indices[:500])) == len(set(indices[500:])) == 500
    small, large = (work_of(lambda n=n: sample_indices(1, n, 3 * n - 500, 1000)) for n in (1000, length))
    assert large.lines <= small.lines, "as few operations"
    assert large.peak_bytes < small.peak_bytes + 10_000, "on arrays as short"


def test_the_first_sample_is_uniform_over_seeds() -> None:
    firsts = [int(sample_indices(seed, 50, 0, 1)[0]) for seed in range(10_000)]
    assert abs(chi_square_excess(np.bincount(firsts, minlength=50))) < 5


@pytest.mark.parametrize("length", [2, 3, 4])
def test_all_orders_of_a_few_samples_are_equally_likely(length: int) -> None:
    orders = sample_indices(7, length, 0, 20_000 * length).reshape(-1, length)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == factorial(length)
    assert abs(chi_square_excess(counts)) < 5


@pytest.mark.parametrize("length", [10, 23])
def test_every_offset_reaches_every_index_equally_often(length: int) -> None:
    orders = sample_indices(3, length, 0, 10_000 * length).reshape(-1, length)
    table = np.array([np.bincount(orders[:, offset], minlength=length) for offset in range(length)])
    assert abs(chi_square_excess(table)) < 5


@pytest.mark.parametrize("length", [1000, 65_537])
def test_consecutive_epochs_have_nothing_in_common(length: int) -> None:
    one, two = sample_indices(1, length, 0, 2 * length).reshape(2, length)
    assert abs(np.corrcoef(one, two)[0, 1]) < 5 / np.sqrt(length)
    assert (one == two).sum() < 10  # one is expected
    _, shifts = np.unique((two - one) % length, return_counts=True)
    assert shifts.max() < 12  # a rotated copy would have one shift only


@pytest.mark.parametrize("length", [1000, 65_537, 2**40])
def test_adjacent_offsets_are_uncorrelated(length: int) -> None:
    order = sample_indices(2, length, 0, min(length, 50_000)).astype(np.float64)
    for distance in (1, 2, 4, 16, 256):
        assert abs(np.corrcoef(order[:-distance], order[distance:])[0, 1]) < 5 / np.sqrt(len(order) - distance)


@pytest.mark.parametrize("length", [1000, 65_537])
def test_neighbouring_seeds_give_unrelated_orders(length: int) -> None:
    orders = [sample_indices(seed, length, 0, length) for seed in (0, 1, 2)]
    for other in orders[1:]:
        assert abs(np.corrcoef(orders[0], other)[0, 1]) < 5 / np.sqrt(length)


def test_the_order_is_the_one_of_all_versions() -> None:
    """Frozen: a run that resumes under a newer version must see the samples that are left, and no other."""
    assert sample_indices(1, 10, 0, 20).tolist() == [2, 5, 9, 3, 0, 8, 7, 6, 1, 4, 6, 9, 0, 2, 3, 5, 4, 7, 1, 8]
    assert sample_indices(42, 1_000_003, 10**9, 4).tolist() == [562778, 916634, 413174, 628896]
    assert sample_indices(0, 2**60, 0, 3).tolist() == [498522779284269519, 252799308176090566, 899567730878629264]
    assert noise(7, np.arange(3)).tolist() == [1346066267577507604, 7191089600892374487, 309689372594955804]
