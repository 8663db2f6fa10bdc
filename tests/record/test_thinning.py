"""Thinning: few points, and every extreme among them."""

from __future__ import annotations

import math
import random

import pytest

from gradus.record.thinning import MeanWindows, ThinnedSeries, evenly, thinned


@pytest.mark.parametrize("count", [10, 1500, 3001, 40_000])
def test_extremes_and_ends_survive_and_the_number_stays_bounded(count):
    series = ThinnedSeries(200)
    values = [random.Random(7 + at).random() for at in range(count)]
    values[count // 3], values[count // 2] = 50.0, -50.0
    for at, value in enumerate(values):
        series.add(at, value)
    shown = series.shown()
    assert len(shown) <= 200 or count <= 200
    assert len(series) <= 404
    assert {(count // 3, 50.0), (count // 2, -50.0)} <= set(shown)
    assert shown[0] == (0, values[0])
    assert shown[-1] == (count - 1, values[-1])
    assert [x for x, _ in shown] == sorted(x for x, _ in shown)


def test_short_series_are_left_as_they_are():
    points = [(float(x), x * 0.5) for x in range(100)]
    assert thinned(points, 100) == points


def test_what_a_run_took_back_is_forgotten():
    series = ThinnedSeries(50)
    for step in range(1000):
        series.add(step, step)
    series.cut(400)
    assert max(x for x, _ in series.points) < 400
    series.add(400, -1.0)
    assert series.last == (400, -1.0)
    assert series.points[-1] == (400, -1.0)


def test_what_is_not_finite_is_counted_and_not_kept():
    series = ThinnedSeries()
    for step, value in enumerate([1.0, math.nan, 2.0, math.inf]):
        series.add(step, value)
    assert [y for _, y in series.points] == [1.0, 2.0]
    assert (series.not_finite, series.first_not_finite) == (2, 1)
    series.cut(1)
    assert series.not_finite == 0


def test_means_over_windows_are_the_means_of_what_is_in_them():
    windows = MeanWindows(8)
    for step in range(100):
        windows.add(step, {"a": step, "b": 1.0 if step < 50 else 3.0}, weight=2)
    assert windows.width == 16
    assert windows.starts == [0, 16, 32, 48, 64, 80, 96]
    assert windows.means("a")[0] == pytest.approx(7.5)
    assert windows.mean("a") == pytest.approx(49.5)
    assert windows.mean("b") == pytest.approx(2.0)
    windows.cut(48)
    assert windows.starts == [0, 16, 32]


def test_a_window_without_a_name_has_none_for_it():
    windows = MeanWindows()
    windows.add(1, {"a": 1.0})
    windows.add(2, {"b": 2.0})
    assert windows.means("a") == [1.0, None]
    assert windows.mean("c") is None


def test_evenly_keeps_both_ends():
    assert evenly(range(1000), 5)[0] == 0
    assert evenly(range(1000), 5)[-1] == 999
    assert len(evenly(range(1000), 5)) == 5
    assert evenly([1, 2], 5) == [1, 2]
