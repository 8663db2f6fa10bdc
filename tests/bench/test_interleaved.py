"""Variants are measured in turn, and the median and the spread are of the repeats."""

from __future__ import annotations

from gradus.bench.interleaved import Spread, interleaved


def test_variants_take_turns_and_every_second_round_goes_backwards():
    order: list[str] = []

    def variant(name: str):
        def measure() -> float:
            order.append(name)
            return float(len(order))

        return measure

    found = interleaved({name: variant(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"
    assert found["a"].values == (1.0, 6.0, 7.0)


def test_the_median_counts_and_one_measurement_has_no_spread():
    assert Spread((1.0, 10.0, 2.0)).median == 2.0
    assert Spread((1.0, 10.0, 2.0)).relative == 4.5
    assert Spread((3.0,)).relative is None
    assert Spread((3.0,)).text == "one measurement"
    assert Spread((99.0, 101.0)).text == "±1.0%"
