"""A few real steps on the device at hand: timed by kind, and nothing is left of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe
from gradus.training import calibration
from gradus.training.calibration import measure, on_one_rank

LAPTOP = Cluster(name="laptop", cpu_cores=2, memory_gib=8)


def recipe(**changes: Any) -> Recipe:
    document = {
        "name": "tiny",
        "model": {"use": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 32},
        "data": {"use": "synthetic-tokens", "samples": 300},
        "batch": 64,
        "epochs": 3,
        "optimizer": {"lr": 0.01},
    }
    return resolved(Recipe.from_document({**document, **changes}))


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "MOST_STEPS", 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_one_rank_does_what_each_of_many_would():
    plan = Plan(mesh=Mesh(pipeline=2, shard=4, tensor=2), zero=1, micro_batch=4, accumulate=4, recompute="full")
    here, alone = on_one_rank(recipe(), plan)
    assert (alone.mesh, alone.zero, alone.micro_batch, alone.accumulate) == (Mesh(), 0, 4, 2)
    assert alone.recompute == "full"
    assert here.batch == 8
    alone.check(here.batch, 1)


def test_steps_are_timed_by_kind(few_steps):
    whole = recipe(plan={"micro_batch": 16})
    here, plan = on_one_rank(whole, default_plan(whole, LAPTOP, 1).plan)
    found = measure(here, plan)
    assert found.steps == 4
    assert found.seconds > found.compute_seconds > found.optimizer_seconds > 0
    assert found.data_seconds > 0
    assert found.software.startswith("torch 2.")
    assert found.device
    assert found.allocated_bytes is None, "a CPU does not tell"


def test_nothing_is_left_on_disk(few_steps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    measure(*on_one_rank(recipe(), default_plan(recipe(), LAPTOP, 1).plan))
    assert os.listdir(tmp_path) == []


def test_slower_work_is_measured_as_slower(few_steps):
    """More samples take longer: it is the step that is timed, not something around it."""

    def seconds(batch: int) -> float:
        changed = recipe(batch=batch, plan={"micro_batch": batch})
        return measure(*on_one_rank(changed, default_plan(changed, LAPTOP, 1).plan)).compute_seconds

    assert seconds(256) > 2 * seconds(16)
