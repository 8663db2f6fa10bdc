"""A mixture's schedule is within one sample of the exact proportion on any prefix, and known at any position."""

from __future__ import annotations

import pickle
import random
from collections.abc import Sequence
from fractions import Fraction
from unittest import mock

import numpy as np
import pytest
from counted_work import work_of
from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.data import mixing
from gradus.data.mixing import Mixed, Phase, given_before, schedule_of, sources_at, whole_weights
from gradus.data.order import AsLaid, Shuffled

Changes = Sequence[tuple[int, Sequence[Fraction]]]

# Sevenths and elevenths, thousandths, and such with a period that nobody lives to see.
weights = st.one_of(
    st.integers(1, 40).map(Fraction),
    st.decimals("0.01", "9.99", places=2).map(Fraction),
    st.integers(10**8, 10**10).map(Fraction),
)
mixtures = st.lists(weights, min_size=1, max_size=7).filter(lambda found: sum(found) < 1000 * min(found))


def phase_of(shares: Sequence[Fraction]) -> tuple[Phase, ...]:
    return schedule_of([(0, shares)])


def assert_within_one(counts: np.ndarray, first: int, shares: Sequence[Fraction]) -> None:
    """Row i: how many samples each source gave in the first `first` + i positions."""
    whole = whole_weights(shares)
    period, places = sum(whole), first + np.arange(len(counts))
    for source, weight in enumerate(whole):
        exact, given = places.astype(object) * weight, counts[:, source].astype(object) * period
        assert max(abs(given - exact)) < period, f"source {source} of {whole}"


def counted(schedule: tuple[Phase, ...], first: int, count: int) -> np.ndarray:
    """How many samples each source gave before each of these positions."""
    sources, numbers = sources_at(schedule, np.arange(first, first + count))
    ones = sources[:, None] == np.arange(len(schedule[0].weights))
    before = np.array(given_before(schedule, first)) + np.concatenate([np.zeros_like(ones[:1]), ones.cumsum(axis=0)])
    assert np.array_equal(numbers, before[np.arange(count), sources]), "samples of a source are numbered in their order"
    return np.asarray(before)


@given(shares=mixtures, first=st.sampled_from([0, 4000, 10**6 + 3, 10**15]))
@settings(max_examples=15)
def test_every_prefix_has_every_source_within_one_sample_of_its_share(shares: list[Fraction], first: int) -> None:
    assert_within_one(counted(phase_of(shares), first, 9000), first, shares)


def test_many_sources_of_all_sizes_stay_within_one_sample_across_many_borders_of_blocks() -> None:
    """Short blocks: the states at their borders are what could go wrong."""
    draw = random.Random(1)
    with mock.patch.multiple(mixing, LEAST_BLOCK=4, LONGEST_PERIOD=1):
        for _ in range(60):
            shares = [Fraction(draw.randint(1, draw.choice([3, 50, 10**9]))) for _ in range(draw.randint(2, 12))]
            shares = [max(share, sum(shares) / 60) for share in shares]
            first = draw.choice([0, 10**12])
            assert_within_one(counted(phase_of(shares), first, 600), first, shares)


@given(shares=mixtures, seed=st.integers(0, 10**6))
@settings(max_examples=12)
def test_a_position_does_not_depend_on_how_it_is_asked_for(shares: list[Fraction], seed: int) -> None:
    schedule = phase_of(shares)
    positions = np.random.default_rng(seed).integers(0, 20_000, 30)
    sources, numbers = sources_at(schedule, np.arange(20_000))
    mixing._layout.cache_clear()
    together = sources_at(schedule, positions)
    assert np.array_equal(together, (sources[positions], numbers[positions]))
    alone = [sources_at(schedule, np.array([position])) for position in positions.tolist()]
    assert [int(source[0]) for source, _ in alone] == sources[positions].tolist()


@st.composite
def curricula(draw: st.DrawFn) -> Changes:
    count = draw(st.integers(1, 5))
    starts = sorted(draw(st.sets(st.integers(1, 9000), max_size=4)))
    shares = st.lists(st.one_of(st.just(Fraction(0)), weights), min_size=count, max_size=count)
    allowed = shares.filter(lambda found: 0 < sum(found) < 1000 * min((share for share in found if share), default=0))
    return [(start, draw(allowed)) for start in [0, *starts]]


@given(changes=curricula())
@settings(max_examples=12)
def test_every_phase_has_its_own_proportions_from_its_first_position_on(changes: Changes) -> None:
    total = 10_000
    counts = counted(schedule_of(changes), 0, total)
    for (start, shares), end in zip(changes, [start for start, _ in changes[1:]] + [total], strict=True):
        assert_within_one(counts[start : end + 1] - counts[start], 0, shares)
        for source, share in enumerate(shares):
            assert share > 0 or counts[start, source] == counts[end, source], "a weight of 0 is none"


def test_what_is_rounded_at_changes_does_not_add_up() -> None:
    """A hundred phases, some of one position: after all of them, nobody is two samples off."""
    draw = random.Random(3)
    for _ in range(20):
        count = draw.randint(2, 6)
        starts = [0, *sorted(draw.sample(range(1, 1000), 99))]
        changes = [(start, [Fraction(draw.randint(1, 9)) for _ in range(count)]) for start in starts]
        exact = [Fraction(0)] * count
        for (start, shares), end in zip(changes, [*starts[1:], 1100], strict=True):
            exact = [owed + (end - start) * share / sum(shares) for owed, share in zip(exact, shares, strict=True)]
        found = given_before(schedule_of(changes), 1100)
        assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) < 2


def test_weights_are_taken_as_they_are_written() -> None:
    assert whole_weights([Fraction(text) for text in ("0.1", "0.2", "0.7")]) == (1, 2, 7)
    assert whole_weights([Fraction(3), Fraction(0), Fraction("1.5")]) == (2, 0, 1)


def test_far_positions_cost_no_more_than_near_ones() -> None:
    schedule = phase_of([Fraction("3.14159265"), Fraction("2.71828182"), Fraction("0.01")])
    near, far = (work_of(lambda n=n: sources_at(schedule, np.arange(n, n + 10_000))) for n in (10**6, 10**17))
    assert far.lines < 2 * near.lines  # three blocks or four
    assert far.peak_bytes < 2 * near.peak_bytes


def test_weights_with_more_digits_than_an_integer_has_are_exact_too() -> None:
    shares = [Fraction("0.30000000000000004"), Fraction("0.12345678901234567"), Fraction(1)]
    assert_within_one(counted(phase_of(shares), 10**12, 5000), 10**12, shares)


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 2**63), data=st.data())
@settings(max_examples=20)
def test_each_source_goes_through_its_own_epochs(lengths: list[int], seed: int, data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.integers(1, 9).map(Fraction), min_size=len(lengths), max_size=len(lengths)))
    orders = tuple(Shuffled(seed + number, length) for number, length in enumerate(lengths))
    mixed = Mixed(phase_of(shares), orders, tuple("abcd"[: len(lengths)]))
    assert mixed.length == sum(lengths)
    stream = mixed.at(np.arange(500))
    starts = np.cumsum([0, *lengths])
    for source, order in enumerate(orders):
        own = stream[(stream >= starts[source]) & (stream < starts[source + 1])] - starts[source]
        assert np.array_equal(own, order.at(np.arange(len(own))))
        seen = np.bincount(own, minlength=order.length)
        assert seen.max() - seen.min() <= 1, "no sample comes again before all others came"


def test_how_often_a_source_is_repeated_is_told() -> None:
    mixed = Mixed(phase_of([Fraction(1), Fraction(3)]), (AsLaid(10), AsLaid(200)), ("code", "web"))
    assert mixed.note(400) == "a mixture: of 400 samples, 100 of code (10.0 epochs), 300 of web (1.5 epochs)"


def test_a_mixture_travels_to_a_worker() -> None:
    mixed = Mixed(phase_of([Fraction(1), Fraction(3)]), (Shuffled(1, 10), Shuffled(2, 20)), ("a", "b"))
    assert pickle.loads(pickle.dumps(mixed)) == mixed


@pytest.mark.parametrize(
    ("shares", "first", "expected"),
    [
        ("3 7", 0, "1101101101" * 2),
        ("1 1 2", 10**9, "2012" * 5),
        ("314159265 271828182 100000001", 10**9, "01201010120010102101"),
    ],
)
def test_the_schedule_is_the_one_of_all_versions(shares: str, first: int, expected: str) -> None:
    """Frozen: a run that resumes under a newer version must see the samples that are left, and no other."""
    sources, _ = sources_at(phase_of([Fraction(share) for share in shares.split()]), np.arange(first, first + 20))
    assert "".join(map(str, sources)) == expected
