"""Scaling: speed-up, efficiency and Amdahl's fraction, from the lab's logs and from real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradus.bench.lab_lines import LabResult
from gradus.bench.scaling import (
    DATA_PARALLEL,
    PROCESSES,
    Point,
    fitted,
    recipe_rate,
    rows_of,
    scaling_of_logs,
    scaling_of_model,
)
from gradus.bench.synthetic import Synthetic
from gradus.cli.main import app
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

LOGS = Path(__file__).parent / "logs"


def point(ranks: int, rate: float, how: str = PROCESSES) -> Point:
    return Point(ranks, how, rate, None, 1)


@pytest.mark.parametrize(
    ("one", "two", "shown"),
    [
        ("pytorch-1.txt", "pytorch-2.txt", ["1.94×", "96.8%"]),
        ("tensorflow-1.txt", "tensorflow-2.txt", ["1.83×", "91.7%"]),
    ],
)
def test_the_labs_logs_give_the_labs_speed_ups(one, two, shown):
    done = CliRunner().invoke(app, ["bench", "scaling", "--log", str(LOGS / two), "--log", str(LOGS / one)])
    assert done.exit_code == 0, done.output
    assert all(text in done.output for text in shown), done.output


def test_six_and_a_half_times_on_eight_is_a_fraction_of_0_967():
    one, eight = rows_of([point(1, 1000.0), point(8, 6500.0)])
    assert one.amdahl_fraction is None
    assert (eight.speed_up, eight.efficiency) == (6.5, pytest.approx(0.8125))
    assert round(eight.amdahl_fraction, 3) == 0.967
    assert round(fitted([point(1, 1000.0), point(8, 6500.0)]).fraction, 3) == 0.967


def test_without_a_rank_by_itself_there_is_no_fraction_of_a_single_speed_up():
    _, four = rows_of([point(2, 100.0), point(4, 180.0)])
    assert (four.speed_up, four.efficiency, four.amdahl_fraction) == (1.8, 0.9, None)


def test_faster_than_ideal_is_told_in_place_of_a_fraction(tmp_path):
    for ranks, rate in ((1, 10.0), (2, 36.1)):
        (tmp_path / str(ranks)).write_text("\n".join(LabResult.of_iterations([rate], ranks, "CPU", "img").lines))
    result = scaling_of_logs([str(tmp_path / "1"), str(tmp_path / "2")])
    assert result.summary["speed_up"] == pytest.approx(7.22)
    assert result.summary["amdahl_fraction"] is None
    assert result.rows[1]["amdahl_fraction"] is None
    assert any("faster than ideal" in note and "disturbed" in note for note in result.notes)


def test_data_parallel_is_compared_with_one_process_but_is_no_part_of_the_law():
    rows = rows_of([point(2, 120.0, DATA_PARALLEL), point(1, 100.0), point(2, 190.0)])
    assert [(row.how, row.ranks) for row in rows] == [(PROCESSES, 1), (PROCESSES, 2), (DATA_PARALLEL, 2)]
    assert rows[2].speed_up == 1.2
    assert round(fitted([point(1, 100.0), point(2, 190.0), point(2, 120.0, DATA_PARALLEL)]).fraction, 4) == 0.9474


def test_the_document_has_rows_law_and_pictures(tmp_path):
    html = tmp_path / "page.html"
    logs = ["--log", str(LOGS / "pytorch-1.txt"), "--log", str(LOGS / "pytorch-2.txt")]
    done = CliRunner().invoke(app, ["bench", "scaling", *logs, "--json", "--html", str(html)])
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert [row["ranks"] for row in document["rows"]] == [1, 2]
    assert round(document["summary"]["speed_up"], 2) == 1.94
    assert document["provenance"] == "quoted"
    assert {chart["title"] for chart in document["charts"]} == {"Speed-up", "Efficiency"}
    assert "Speed-up" in html.read_text()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "nothing to measure"),
        (["--model", "resnet18", "--log", "x"], "--model and --log"),
        (["--model", "resnet18", "--ranks", "1,x"], "1,x"),
        (["--model", "resnet19"], "resnet18"),
        (["--model", "resnet18", "--mode", "week"], "weak"),
        (["--model", "resnet18", "--set", "batch=2"], "model.KEY=VALUE"),
        (["--log", str(LOGS / "pytorch-1.txt")], "several numbers"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(arguments, found):
    done = CliRunner().invoke(app, ["bench", "scaling", *arguments])
    assert done.exit_code == 2, done.output
    assert found in done.output


def test_logs_that_count_different_things_are_not_compared(tmp_path):
    for number, unit in ((1, "img"), (2, "seq")):
        (tmp_path / unit).write_text("\n".join(LabResult.of_iterations([1.0], number, "GPU", unit).lines))
    with pytest.raises(InputError, match="cannot be compared"):
        scaling_of_logs([str(tmp_path / "img"), str(tmp_path / "seq")])


def test_a_batch_that_ranks_cannot_divide_is_refused():
    work = Synthetic("simple-cnn", batch_size=3, warm_up_batches=0, batches=1, iterations=1)
    with pytest.raises(InputError, match="3, which 2 ranks"):
        scaling_of_model(work, [2], "strong", 1)


def test_one_of_several_processes_is_sent_to_logs(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    done = CliRunner().invoke(app, ["bench", "scaling", "--model", "simple-cnn", "--ranks", "1,2"])
    assert done.exit_code == 2, done.output
    assert "--log 1.txt --log 2.txt" in done.output


@pytest.mark.slow
@pytest.mark.long
def test_a_model_on_one_and_two_ranks_is_measured_with_the_same_work_for_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    work = Synthetic("simple-cnn", batch_size=2, warm_up_batches=1, batches=1, iterations=2)
    result = scaling_of_model(work, [1, 2], "weak", 1)
    assert [row["ranks"] for row in result.rows] == [1, 2]
    assert all(row["samples_per_second"] > 0 for row in result.rows)
    assert any("nn.DataParallel was not measured" in note for note in result.notes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.long
def test_a_recipe_s_own_run_is_timed_and_nothing_of_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = {
        "name": "small",
        "model": {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
        "data": {"use": "synthetic-tokens"},
        "batch": 4,
        "steps": 1000,
        "optimizer": {"lr": 1e-3},
    }
    assert recipe_rate(Recipe.from_document(document), 2, 8, 4) > 0
    assert list(tmp_path.iterdir()) == []
