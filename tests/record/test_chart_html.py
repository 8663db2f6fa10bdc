"""Charts: everything that was measured can be read from them, and nothing else."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from gradus.record.chart import Bars, Chart, Heat, Mark, Series
from gradus.record.chart_frame import HIGH, WIDE
from gradus.record.chart_html import page, render_chart

STEPS = list(range(1, 101))
LOSS = Chart(
    "Loss",
    "step",
    "nats",
    (
        Series("training", STEPS, [5 - step / 50 for step in STEPS]),
        Series("validation", [50, 100], [4.2, 3.2], dashed=True),
    ),
    marks=(Mark(40, "checkpoint at step 40", "checkpoint"),),
)
BARS = Bars(
    "Time", "s", (("all", (("data", 0.01), ("forward", 0.03))), ("rank 1", (("data", 0.02), ("forward", 0.04))))
)
HEAT = Heat("Own time", "step", "s", [0, 10, 20], (("rank 0", (0.1, 0.1, None)), ("rank 1", (0.1, 0.2, 0.3))))


def svg(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(re.search(r"<svg.*?</svg>", html, re.S)[0])


def paths(html: str, kind: str) -> list[list[tuple[int, int]]]:
    """The points of each path of a class, as the page's script reads them."""
    found = []
    for path in svg(html).iter("path"):
        if kind in path.get("class", "").split():
            points = []
            for piece in path.get("d").split("M")[1:]:
                x, y, *moves = map(int, re.findall(r"-?\d+", piece))
                points.append((x, y))
                if not piece.count("l"):
                    continue  # a dot, or a mark from top to bottom
                for right, down in zip(moves[::2], moves[1::2], strict=True):
                    x, y = x + right, y + down
                    points.append((x, y))
            found.append(points)
    return found


def test_a_line_goes_through_its_points():
    [training, validation] = paths(render_chart(LOSS), "line")
    assert len(training) == 100
    assert training[0][0] == 0
    assert training[-1][0] == WIDE
    heights = [y for _, y in training]
    assert heights == sorted(heights)  # the loss falls, and y grows downwards
    assert all(0 <= y <= HIGH for y in heights)
    assert len(validation) == 2


@pytest.mark.parametrize("picture", [LOSS, BARS, HEAT])
def test_each_drawing_says_what_it_is_to_who_cannot_see_it(picture):
    for drawing in re.findall(r"<svg.*?</svg>", render_chart(picture), re.S):
        root = ElementTree.fromstring(drawing)
        title, description = root.find("title"), root.find("desc")
        assert root.get("role") == "img"
        assert root.get("aria-labelledby") == f"{title.get('id')} {description.get('id')}"
        assert title.text
        assert description.text
    assert "training: from 4.98 to 3, lowest 3, highest 4.98." in svg(render_chart(LOSS)).find("desc").text


def test_labels_are_text_and_no_markup():
    hostile = '<img src=x onerror="alert(1)">'
    html = render_chart(Chart(hostile, hostile, hostile, (Series(hostile, [1, 2], [1, 2]),), marks=(Mark(1, hostile),)))
    html += render_chart(Bars(hostile, hostile, ((hostile, ((hostile, 1.0),)),)))
    html += render_chart(Heat(hostile, hostile, hostile, [1], ((hostile, (1.0,)),)))
    assert "<img" not in html
    assert 'onerror="' not in html


def test_what_was_not_measured_is_a_gap():
    values = [None if 40 < step < 50 else float(step) for step in STEPS]
    html = render_chart(Chart("a", "step", "", (Series("b", STEPS, values),)))
    [path] = [path for path in svg(html).iter("path") if "line" in path.get("class")]
    assert path.get("d").count("M") == 2
    assert len(paths(html, "line")[0]) == 91


def test_what_is_not_finite_is_told_and_not_drawn():
    html = render_chart(Chart("a", "step", "", (Series("loss", [1, 2, 3], [1.0, math.nan, math.inf]),)))
    assert "loss: 2 values are not finite, the first at step 2; not drawn." in html
    assert "nan" not in html.lower().replace("finite", "")
    alone = render_chart(Chart("Loss", "step", "", (Series("loss", [1], [math.nan]),)))
    assert "<svg" not in alone
    assert "loss: 1 value is not finite" in alone


def test_an_empty_chart_is_a_sentence():
    for picture in (Chart("Power", "step", "W", ()), Bars("Power", "W", ()), Heat("Power", "step", "W", [], ())):
        html = render_chart(picture)
        assert "<svg" not in html
        assert "Power" in html
    gone = Chart("Power", "step", "W", (Series("a", [1], [None]),), note="There is no counter.")
    assert "There is no counter." in render_chart(gone)


def test_long_series_are_thinned_and_keep_their_extremes():
    values = [math.sin(at) for at in range(100_000)]
    values[12_345], values[67_890] = 9.0, -9.0
    html = render_chart(Chart("a", "step", "", (Series("b", range(100_000), values),)))
    [points] = paths(html, "line")
    assert len(points) <= 1500
    heights = [y for _, y in points]
    top, bottom = heights.index(min(heights)), heights.index(max(heights))
    assert points[top][0] == round(12_345 / 99_999 * WIDE)
    assert points[bottom][0] == round(67_890 / 99_999 * WIDE)
    assert len(html) < 20_000


def test_layers_stand_on_each_other():
    series = tuple(Series(name, [1, 2, 3], [1.0, 2.0, 1.0]) for name in "ab")
    [low, high] = paths(render_chart(Chart("a", "step", "", series, stacked=True)), "layer")
    assert low[3:] == [(WIDE, HIGH), (WIDE // 2, HIGH), (0, HIGH)]
    assert high[3:] == low[2::-1]
    assert HIGH - high[1][1] == pytest.approx(2 * (HIGH - low[1][1]), abs=1)


def test_one_point_alone_is_a_dot():
    html = render_chart(Chart("a", "step", "", (Series("b", [5], [1.0]),)))
    assert len(paths(html, "dots")) == 1


def test_gpus_are_on_a_logarithmic_axis_of_powers_of_two():
    html = render_chart(Chart("a", "GPUs", "", (Series("b", [1, 2, 4, 8], [1, 2, 4, 8]),), log_x=True, x_is_log_2=True))
    assert re.findall(r">(\d)</span>", html.partition("x-ticks")[2]) == ["1", "2", "4", "8"]


def test_marks_are_where_things_happened_and_not_too_many():
    html = render_chart(LOSS)
    [mark] = paths(html, "mark")
    assert mark[0][0] == round(39 / 99 * WIDE)
    assert "<title>checkpoint at step 40</title>" in html
    many = Chart("a", "step", "", LOSS.series, marks=tuple(Mark(at / 10, "c", "checkpoint") for at in range(10, 1000)))
    assert len(paths(render_chart(many), "mark")) == 150


def test_bars_have_the_length_and_the_words_of_their_values():
    html = render_chart(BARS)
    [first, second] = [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", html, re.S)]
    lengths = [[float(rect.get("width")) for rect in one.iter("rect")] for one in (first, second)]
    assert sum(lengths[1]) == WIDE
    assert sum(lengths[0]) == pytest.approx(WIDE * 4 / 6, abs=1)
    assert "forward: 30 ms (75.0%)" in html
    assert "<td>60 ms</td>" in html


def test_bars_that_are_called_as_what_they_show_need_no_legend():
    html = render_chart(Bars("Rate", "TFLOP/s", (("bf16", (("bf16", 709.0),)), ("fp8", (("fp8", 1112.0),)))))
    assert "legend" not in html
    assert set(re.findall(r'<rect class="(\w+)"', html)) == {"c0"}
    assert "1,112 TFLOP/s" in html


def test_cells_that_are_alike_are_one_piece_and_what_is_missing_is_none():
    html = render_chart(HEAT)
    found = {path.get("class"): path.get("d").count("M") for path in svg(html).iter("path")}
    assert found == {"h0": 2, "h4": 1, "h8": 1}
    assert 'data-cells="0 0 -|0 500 999"' in html


def test_a_page_has_its_sections_and_headings_in_order():
    html = page("Title", [("One", "<p>a</p>"), ("Two & three", "<p>b</p>")], "under it")
    assert re.findall(r"<h([123])", html) == ["1", "2", "2"]
    assert re.findall(r'<section id="([^"]*)"', html) == ["one", "two-three"]
    assert "<h2>Two &amp; three</h2>" in html
    assert html.startswith("<!DOCTYPE html>")
