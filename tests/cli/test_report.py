"""`gradus report`: a page that is there afterwards, or an error that says what to type."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from report_runs import made_up_run
from typer.testing import CliRunner, Result

from gradus.bench.result import BenchResult
from gradus.cli.main import app
from gradus.record.chart import Chart, Series


def report(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, words)])


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for number in (1, 2, 4):
        made_up_run(root, f"on-{number}", ranks=number, gpus=number, rate=80.0 * number**0.9)
    return root


def test_the_report_is_written_into_the_run_for_its_owner(runs):
    done = report("made-up/on-2", "--runs", runs)
    path = runs / "made-up" / "on-2" / "report.html"
    assert (done.exit_code, done.stdout.strip()) == (0, str(path))
    assert path.read_text().startswith("<!DOCTYPE html>")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir() if "report" in one.name] == ["report.html"]


def test_it_goes_where_it_is_told(runs, tmp_path):
    for out, written in ((tmp_path / "a.html", tmp_path / "a.html"), (tmp_path, tmp_path / "report.html")):
        assert report("on-1", "--runs", runs, "--out", out).exit_code == 0
        assert written.stat().st_size > 10_000


def test_as_json_it_says_what_it_found(runs, tmp_path):
    done = report(runs / "made-up" / "on-1", "--json", "--out", tmp_path / "a.html")
    document = json.loads(done.stdout)
    assert document["report"] == str(tmp_path / "a.html")
    assert document["state"] == "finished"
    assert document["facts"]["steps"] == "60 of 60"
    assert isinstance(document["findings"], list)


@pytest.mark.parametrize("form", [["--compare", "on-2", "on-4"], ["--compare", "on-2", "--compare", "on-4"]])
def test_runs_are_compared_with_the_first_as_the_baseline(runs, tmp_path, form):
    done = report("on-1", *form, "--runs", runs, "--out", tmp_path / "c.html", "--json")
    document = json.loads(done.stdout)
    assert [one["label"] for one in document["runs"]] == ["on-1", "on-2", "on-4"]
    assert document["runs"][1]["speed_up"] == pytest.approx(2**0.9)
    assert "on-1 against on-2, on-4" in (tmp_path / "c.html").read_text()


def test_a_comparison_is_written_into_its_baseline(runs):
    assert report("on-1", "--compare", "on-2", "--runs", runs).exit_code == 0
    assert (runs / "made-up" / "on-1" / "comparison.html").exists()


def test_the_result_of_a_benchmark_is_a_page_too(tmp_path):
    chart = Chart("Rate", "GPUs", "img/s", (Series("resnet50", [1, 2], [100.0, 190.0]),))
    result = BenchResult("scaling", "Scaling of resnet50", {"batch": 64}, [{"gpus": 1, "rate": 100.0}], charts=(chart,))
    path = result.save(tmp_path / "scaling.json")
    assert report(path).exit_code == 0
    page = (tmp_path / "scaling.html").read_text()
    assert "Scaling of resnet50" in page
    assert "<svg" in page


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nobody"], "'nobody' is not a run"),
        (["on-1", "on-2"], "hint: gradus report on-1 --compare on-2"),
        (["on-1", "--compare", "on-1"], "a run is named twice"),
        (["on-1", "--compare", "on-3"], "did you mean"),
        (["on-1", "--out", "/proc/nobody/report.html"], "name a file that can be written"),
        ([__file__], "no JSON document"),
        ([__file__, "--compare", "on-1"], "compares runs, and this is a file"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(runs, words, said):
    done = report(*words, "--runs", runs)
    assert done.exit_code == 2
    assert said in done.stderr


def test_a_directory_that_is_no_run_is_left_as_it_is(tmp_path):
    done = report(tmp_path, "--json")
    assert json.loads(done.stdout)["error"]["kind"] == "bad-input"
    assert list(tmp_path.iterdir()) == []
