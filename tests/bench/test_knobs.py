"""Seven knobs, one change each; and benchmarks of precision and batch size on real trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gradus_command import Gradus
from typer.testing import CliRunner

from gradus.bench.knobs import BASELINE, KNOBS, trials_of
from gradus.bench.precision import precision
from gradus.bench.tried_recipe import given, plan_here, why_not
from gradus.cli.main import app
from gradus.schema.cluster import Cluster
from gradus.training.building import open_data

TINY = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=16"]
SETTINGS = [word for override in TINY for word in ("--set", override)]
HOST = Cluster(name="host", cpu_cores=4, memory_gib=8)
ONE_GPU = Cluster(name="one", gpus_per_node=1, gpu="H200", cpu_cores=16, memory_gib=128)


def changed(trials: dict[str, Any], name: str, off: str = BASELINE) -> set[str]:
    """What is other than without it: fields of the plan, and of the recipe."""
    on, base = trials[name], trials[off]
    fields = {field for field in type(base.plan).model_fields if getattr(on.plan, field) != getattr(base.plan, field)}
    whole = type(base.recipe).model_fields
    return fields | {f"recipe.{key}" for key in whole if getattr(on.recipe, key) != getattr(base.recipe, key)}


def test_each_row_changes_one_thing() -> None:
    trials = trials_of(given(None, "gpt", TINY), HOST, 1.0, 60.0)
    assert len(KNOBS) == 7
    assert changed(trials, "accumulation") == {"micro_batch", "accumulate"}
    assert changed(trials, "checkpointing") == {"recompute"}
    assert changed(trials, "mixed precision") == {"precision"}
    assert changed(trials, "batch × 2") == changed(trials, "batch ÷ 2") == {"micro_batch", "recipe.batch"}
    assert changed(trials, "sgd") == {"recipe.optimizer"}
    assert changed(trials, "workers", "no workers") == {"workers"}
    assert changed(trials, "zero", "replicas") == {"mesh", "zero"}
    for trial in trials.values():
        assert why_not(trial.recipe, HOST, trial.plan) is None


def test_on_one_gpu_both_ranks_of_zero_are_on_it() -> None:
    trials = trials_of(given(None, "gpt", TINY), ONE_GPU, 1.0, 60.0)
    assert {trials[name].plan.ranks_per_gpu for name in ("replicas", "zero")} == {2}
    assert trials[BASELINE].host_memory_bytes is None


def test_what_batch_norm_forbids_is_known_before_anything_starts() -> None:
    recipe = given(None, "resnet18", ["model.image=32", "model.small_input=true", "batch=8"])
    trials = trials_of(recipe, HOST, 1.0, 60.0)
    reason = why_not(recipe, HOST, trials["accumulation"].plan)
    assert reason is not None
    assert "batch normalisation" in reason


def test_images_of_a_model_are_in_memory_and_have_its_shape() -> None:
    recipe = given(None, "resnet18", ["model.image=64", "model.classes=7"])
    assert recipe.data.use == "gradus.bench.made_up:images"
    assert recipe.data.options == {"size": 64, "channels": 3, "classes": 7, "samples": 4096}


def test_images_of_a_model_are_augmented_if_the_benchmark_is_to() -> None:
    recipe = given(None, "simple-cnn", ["data.augment=standard", "data.samples=64"])
    assert recipe.data.use == "gradus.bench.made_up:images"
    data = open_data(recipe, "train")
    assert data is not None
    assert data.drawn(0, np.arange(3)) is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["knobs", "--model", "gpt", "--only", "optimiser"], "optimizer choice"),
        (["knobs", "--model", "gpt", "--batch-size", "6"], "multiple of 4"),
        (["knobs"], "neither a recipe nor --model"),
        (["precision", "recipe.yaml", "--model", "gpt"], "both a recipe and --model"),
        (["precision", "--model", "gpt", "--precision", "bf61"], "did you mean 'bf16'"),
        (["precision", "--model", "gtp"], "did you mean 'gpt'"),
        (["batch-size", "--batch", "8,x"], "whole numbers"),
        (["batch-size", "--batch", "512", "--samples", "600"], "fewer than two steps"),
    ],
)
def test_bad_input_is_told_with_what_is_allowed(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments, "--json"])
    assert done.exit_code == 2, done.output
    error = json.loads(done.stdout)["error"]
    assert words in f"{error['message']} {error.get('allowed')}"


def test_a_precision_that_the_device_lacks_is_told_once_below_the_table() -> None:
    said: list[str] = []
    recipe = given(None, "simple-cnn", [], batch=4)
    choice, _ = plan_here(recipe, 1)
    result = precision(recipe, choice.plan, HOST, ["tf32"], steps=4, repeats=1, say=said.append)
    assert said == []
    assert [note for note in result.notes if note.startswith("tf32: ")]


@pytest.mark.slow
@pytest.mark.long
def test_a_precision_that_the_device_lacks_is_a_row_with_its_reason(tmp_path: Path) -> None:
    arguments = ["--model", "gpt", *SETTINGS, "--steps", "4", "--repeats", "1", "--precision", "fp32,tf32,bf16"]
    done = Gradus(tmp_path)("bench", "precision", *arguments, "--html", "page.html", "--json", timeout=400)
    assert done.code == 0, done.err
    rows = {row["precision"]: row for row in done.json["rows"]}
    assert rows["tf32"]["state"] == "refused"
    assert "NVIDIA tensor cores" in rows["tf32"]["why"]
    assert rows["fp32"]["speed_up"] == 1
    assert abs(rows["bf16"]["loss_gap"]) < 0.01
    assert "Loss, same seed and samples" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@pytest.mark.long
def test_the_table_of_knobs_has_a_row_for_each(tmp_path: Path) -> None:
    arguments = ["--model", "gpt", *SETTINGS, "--repeats", "1", "--seconds", "0.2"]
    done = Gradus(tmp_path)("bench", "knobs", *arguments, timeout=600)
    assert done.code == 0, done.err
    for knob in KNOBS:
        (line,) = (line for line in done.out.splitlines() if line.startswith(f"{knob.name} "))
        assert "×" in line, line


@pytest.mark.slow
@pytest.mark.long
def test_accuracy_against_batch_is_measured_with_and_without_warm_up(tmp_path: Path) -> None:
    done = Gradus(tmp_path)("bench", "batch-size", "--batch", "32,256", "--samples", "1024", "--json", timeout=600)
    assert done.code == 0, done.err
    rows = done.json["rows"]
    assert [(row["batch"], row["warmup"]) for row in rows] == [(32, False), (32, True), (256, False), (256, True)]
    assert [row["lr"] for row in rows] == [0.001, 0.001, 0.008, 0.008]
    assert rows[0]["accuracy"] > 0.5
