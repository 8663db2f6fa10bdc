"""A recipe's own data is loaded by real workers, as far as more of them help."""

from __future__ import annotations

import os

import pytest
from typer.testing import CliRunner

from gradus.bench.loader import Row, _best, bench_loader
from gradus.cli.main import app
from gradus.schema.recipe import Recipe

OWN = """
import os
import time
import torch

Model = torch.nn.Identity

class Data:
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(self.seconds)
        with open(f"seen-{os.getpid()}", "a") as seen:
            seen.write("x")
        return torch.zeros(4), torch.zeros(1)
"""


def recipe(folder, seconds: float) -> Recipe:
    (folder / "own.py").write_text(OWN)
    document = {
        "name": "own",
        "model": {"use": "own.py:Model"},
        "data": {"use": "own.py:Data", "seconds": seconds},
        "batch": 4,
        "steps": 6,
        "optimizer": {"lr": 1e-3},
    }
    return Recipe.from_document(document, folder=folder)


def test_workers_are_real_processes_and_load_the_recipe_s_own_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench_loader(recipe(tmp_path, 0.001), (0, 2), (4,), seconds=0.05, rounds=1, helps=1e9)
    assert [row["workers"] for row in result.rows] == [0, 2]
    assert all(row["samples_per_second"] > 0 and row["first_batch_seconds"] > 0 for row in result.rows)
    assert result.summary["plan_workers_reason"]
    loaders = {int(path.name.removeprefix("seen-")) for path in tmp_path.glob("seen-*")}
    assert os.getpid() in loaders
    assert len(loaders) >= 3


def test_the_fewest_workers_that_are_nearly_as_fast_as_any_are_best():
    rows = [Row(8, workers, rate, None, 0.1, 1) for workers, rate in ((0, 50.0), (2, 97.0), (4, 100.0), (8, 60.0))]
    assert _best([*rows, Row(16, 0, 1000.0, None, 0.1, 1)], 8)["best_workers"] == 2


def test_after_two_numbers_that_bring_nothing_no_larger_one_is_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench_loader(recipe(tmp_path, 0.001), None, (4,), seconds=0.02, rounds=1, helps=1e9)
    assert [row["samples_per_second"] is not None for row in result.rows] == [True, True, True, False]
    assert [row["repeats"] for row in result.rows] == [1, 1, 1, 0]


def test_it_says_first_how_long_it_takes_at_most(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    bench_loader(recipe(tmp_path, 0.001), (0, 1), (2, 4), seconds=0.02, rounds=2, say=said.append)
    assert said[0].startswith("at most 8 × 0.02 s = 0:00")
    assert said[2].startswith("micro-batch 2, 1 worker: ")
    assert len(said) == 1 + 8


def test_numbers_that_were_asked_for_are_all_tried(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = bench_loader(recipe(tmp_path, 0.001), (0, 1, 2, 3), (4,), seconds=0.02, rounds=1, helps=1e9)
    assert [row["repeats"] for row in result.rows] == [1, 1, 1, 1]


def test_data_that_lives_on_the_device_needs_no_workers():
    document = {
        "name": "digits",
        "model": {"use": "simple-cnn", "channels": 1},
        "data": {"use": "digits", "size": 32},
        "batch": 8,
        "steps": 1,
        "optimizer": {"lr": 1e-3},
    }
    result = bench_loader(Recipe.from_document(document), (0,), (8,), seconds=0.02, rounds=2)
    assert result.summary["plan_workers"] == 0
    assert "lives on the device" in result.summary["plan_workers_reason"]
    assert result.rows[0]["repeats"] == 2


@pytest.mark.parametrize(
    ("arguments", "found"), [(["x.yaml", "--workers", "a"], "--workers"), (["missing.yaml"], "missing.yaml")]
)
def test_bad_input_is_refused(arguments, found):
    done = CliRunner().invoke(app, ["bench", "loader", *arguments])
    assert done.exit_code == 2, done.output
    assert found in done.output
