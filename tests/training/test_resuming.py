"""A run whose newest checkpoint is damaged goes on from the one before, and nothing of the damaged one stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import CLUSTER, MODELS, recipe_for

from gradus.checkpoint.manifest import verify_folder
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.resuming import step_back


@pytest.fixture(scope="module", autouse=True)
def _backend_switches() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


def built(run: RunDirectory, attempt: int) -> LiveRun:
    recipe = recipe_for(
        "gpt",
        steps=4,
        batch=4,
        optimizer={**MODELS["gpt"]["optimizer"], "warmup": 2},
        evaluate={"batches": 1},
        checkpoint={"every": 2, "background": False},
        hooks=[{"use": "ema", "decay": 0.5}],
        deterministic=True,
    )
    return LiveRun.from_recipe(recipe, default_plan(recipe, CLUSTER, 1).plan, run, attempt, alone(torch.device("cpu")))


def finish(live: LiveRun) -> None:
    live.recorder.close(state=train(live).state)


def losses(run: RunDirectory) -> list[tuple[Any, ...]]:
    return [
        (row["step"], row["loss"], row["validation_loss"] if row["step"] == 4 else None) for row in read_metrics(run)
    ]


@pytest.fixture
def finished(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path, "run")
    finish(built(run, 1))
    return run


def test_a_damaged_checkpoint_does_not_count_as_saved(finished: RunDirectory) -> None:
    """It is of the very step at which the run ends: the run must not end without a good one."""
    expected = losses(finished)
    newest = finished.checkpoints / "step-00000004"
    part = newest / "part-00000-of-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-100] ^= 1
    part.write_bytes(content)

    live = built(finished, 2)
    assert live.state.step == 2
    assert not live.saving.has(4)
    assert live.saving.has(2)
    finish(live)
    verify_folder(newest)
    assert losses(finished) == expected


def test_nothing_stays_of_a_checkpoint_that_only_another_rank_finds_damaged(finished: RunDirectory) -> None:
    live = built(finished, 2)
    assert live.state.step == 4
    hooks = live.hooks
    live.distrusted = {2, 4}
    step_back(live)
    assert live.checkpoint is None
    assert live.state.step == 0
    assert live.hooks is not hooks
    assert not live.saving.has(4)
    live.recorder.close(state="failed")
