"""A benchmark's result survives its file, and becomes a page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from gradus.bench.page import bench_page
from gradus.bench.result import BenchResult, bench_environment, is_bench_result
from gradus.record.chart import Bars, Chart, Heat, Mark, Series
from gradus.schema.errors import InputError


def result() -> BenchResult:
    return BenchResult(
        "scaling",
        "Scaling of <a model>",
        {"model": "resnet50", "compile": False},
        [{"ranks": 1, "rate": 336.0}, {"ranks": 2, "rate": math.nan}, {"ranks": 4, "rate": None}],
        {"speed_up": 1.94, "ways": ["a", "b"]},
        (
            Chart("Speed-up", "GPUs", "times", (Series("measured", [1.0, 2.0], [1.0, None]),), marks=(Mark(1.0, "x"),)),
            Bars("Rates", "GB/s", (("copy", (("measured", 2.0), ("rest", 1.0))),)),
            Heat("Ranks", "step", "s", [0.0, 1.0], (("rank 0", (1.0, None)),)),
        ),
        {"packages": {"torch": "2.13.0"}, "gpus": []},
        time=1_800_000_000.0,
        notes=("nothing was <lost>",),
    )


def test_a_saved_result_is_read_back_as_it_was(tmp_path):
    path = result().save(tmp_path / "new" / "result.json")
    read = BenchResult.load(path)
    assert json.dumps(read.document()) == json.dumps(result().document())  # NaN is not equal to itself
    assert [type(chart) for chart in read.charts] == [Chart, Bars, Heat]
    assert is_bench_result(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "gradus-bench-1"}', '{"format": "other"}'])
def test_a_file_that_is_no_result_is_bad_input(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"result\.json"):
        BenchResult.load(path)
    assert is_bench_result(path) == (text == '{"format": "gradus-bench-1"}')


def test_a_file_that_is_not_there_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        BenchResult.load(tmp_path / "result.json")
    assert not is_bench_result(tmp_path / "result.json")


def test_the_page_shows_everything_and_takes_nothing_for_html():
    page = bench_page(result())
    assert "Scaling of &lt;a model&gt;" in page
    assert "nothing was &lt;lost&gt;" in page
    for text in ("speed up", "1.94", "336", "not measured", "Speed-up", "Rates", "torch", "2.13.0"):
        assert text in page, text


def test_the_environment_names_the_machine_but_not_the_changes_to_its_source():
    found = bench_environment()
    assert found["packages"]["torch"]
    assert found["cpu_cores"] >= 1
    assert "diff" not in found.get("git", {})
    assert str(Path.home()) not in json.dumps(found["gpus"])
