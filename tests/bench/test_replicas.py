"""Replicas: processes that share a device, measured at the same time, and MPS only where it works."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradus.bench.mps import CONTROL, mps
from gradus.bench.replicas import ON_CORES, RecipeSteps, bench_replicas
from gradus.bench.synthetic import Synthetic, Trained
from gradus.cli.main import app
from gradus.schema.recipe import Recipe

FAKE_CONTROL = """#!/bin/sh
if [ "$1" = "-d" ]; then
  echo "started" >> {notes}
  exit {code}
fi
read word
echo "$word $CUDA_MPS_PIPE_DIRECTORY" >> {notes}
"""


def fake_control(folder: Path, monkeypatch, code: int = 0) -> Path:
    """Stands in for NVIDIA's daemon, which needs a GPU: notes what it is told."""
    notes, program = folder / "notes", folder / CONTROL
    program.write_text(FAKE_CONTROL.format(notes=notes, code=code))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return notes


def test_mps_has_a_folder_of_its_own_and_is_told_to_quit(tmp_path, monkeypatch):
    notes = fake_control(tmp_path, monkeypatch)
    with mps() as variables:
        assert not isinstance(variables, str)
        pipe = variables["CUDA_MPS_PIPE_DIRECTORY"]
        assert Path(pipe).is_dir()
        assert notes.read_text() == "started\n"
    assert notes.read_text() == f"started\nquit {pipe}\n"
    assert not Path(pipe).exists()


def test_mps_that_does_not_start_or_is_not_there_is_a_reason_and_no_failure(tmp_path, monkeypatch):
    fake_control(tmp_path, monkeypatch, code=1)
    with mps() as reason:
        assert isinstance(reason, str)
        assert "does not start" in reason
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    with mps() as reason:
        assert reason == f"{CONTROL} is not there"


def test_together_they_are_as_fast_as_the_slowest_lets_them():
    place = {"device": "cpu", "ranks": 2, "unit": "img", "samples": 8}
    found = Trained(place, ((1.0, 2.0), (4.0, 1.0)), batches=5, memory_peak_bytes=None)
    assert found.totals == (40.0, 20.0)  # 80 samples in 2 and in 4 seconds
    assert found.lab.iterations == (40.0, 10.0)  # the lab counts what rank 0 did


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "RECIPE"),
        (["x.yaml", "--model", "simple-cnn"], "both"),
        (["x.yaml", "--averaged"], "--averaged"),
        (["--model", "simple-cnn", "--replicas", "0"], "--replicas"),
        (["--model", "simple-cnn", "--precision", "bf17"], "bf16"),
    ],
)
def test_bad_input_is_refused(arguments, found):
    done = CliRunner().invoke(app, ["bench", "replicas", *arguments])
    assert done.exit_code == 2, done.output
    assert found in done.output


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_that_average_gradients_are_compared_with_one():
    work = Synthetic("mnist-cnn", batch_size=2, warm_up_batches=1, batches=1, iterations=2)
    result = bench_replicas(work, (1, 2), 1, averaged=True)
    assert [(row["replicas"], row["how"]) for row in result.rows] == [(1, ON_CORES), (2, ON_CORES)]
    assert result.rows[0]["against_one"] == 1.0
    assert all(row["samples_per_second"] > 0 for row in result.rows)


@pytest.mark.slow
@pytest.mark.long
def test_two_processes_of_a_recipe_train_on_its_own_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    document = {
        "name": "small",
        "model": {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16},
        "data": {"use": "synthetic-tokens"},
        "batch": 4,
        "steps": 3,
        "optimizer": {"lr": 1e-3},
    }
    result = bench_replicas(RecipeSteps(Recipe.from_document(document), 1, 2, 2), (1, 2), 1)
    assert [row["replicas"] for row in result.rows] == [1, 2]
    assert result.settings["unit"] == "seq"
    assert list(tmp_path.iterdir()) == []
