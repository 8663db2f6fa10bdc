"""A checkpoint saved on any mesh goes on on any other: the loss continues as that of a run that never stopped."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import pytest
from configurations import document
from pool import Pool
from training_cases import trained

from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.plan import Mesh
from gradus.schema.recipe import Recipe

FIRST, STEPS = 4, 8
RELATIVE = 1e-9
OPTIMIZER = {"use": "adamw", "lr": 3e-3, "warmup": 3, "weight_decay": 0.1, "clip": 1.0}
MESHES: dict[str, dict[str, Any]] = {
    "1": {},
    "ddp 2": {"mesh": {"replicate": 2}},
    "zero3 2": {"mesh": {"shard": 2}, "zero": 3},
    "zero3 4": {"mesh": {"shard": 4}, "zero": 3},
    "tensor 2": {"mesh": {"tensor": 2}},
    "pipeline 2": {"mesh": {"pipeline": 2}, "accumulate": 2},
    "tensor 2 × shard 2": {"mesh": {"tensor": 2, "shard": 2}, "zero": 3},
    "expert 2": {"mesh": {"shard": 2, "expert": 2}, "zero": 3},
}
# Experts are a model of their own, which no tensor parallelism divides: refused, and so no pair with it.
WITH_EXPERTS = ("1", "ddp 2", "zero3 2", "zero3 4", "pipeline 2", "expert 2")


def recipe_on(model: str, mesh: str, steps: int) -> Recipe:
    given = {"steps": steps, "evaluate": {"batches": 1}, "optimizer": OPTIMIZER}
    return resolved(Recipe.from_document(document(model, given, {"precision": "fp64", **MESHES[mesh]})))


def train_on(pool: Pool, run: RunDirectory, number: int, model: str, mesh: str, steps: int) -> None:
    ranks = Mesh(**MESHES[mesh].get("mesh", {})).world_size
    results = pool.run(ranks, trained, str(run.path), recipe_on(model, mesh, steps), number)
    assert [result["step"] for result in results] == [steps] * ranks


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that stopped after its first steps on a mesh; made once for all that go on from it."""
    made: dict[tuple[str, str], RunDirectory] = {}

    def on(model: str, mesh: str) -> RunDirectory:
        if (model, mesh) not in made:
            run = RunDirectory.create(tmp_path_factory.mktemp("saved"), "run")
            train_on(pool, run, 1, model, mesh, FIRST)
            made[model, mesh] = run
        return made[model, mesh]

    return on


@pytest.fixture(scope="module")
def unbroken(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    losses: dict[str, list[float]] = {}

    def of(model: str) -> list[float]:
        if model not in losses:
            run = RunDirectory.create(tmp_path_factory.mktemp("unbroken"), "run")
            train_on(pool, run, 1, model, "1", STEPS)
            losses[model] = [row["loss"] for row in read_metrics(run)]
        return losses[model]

    return of


DENSE = [mesh for mesh in MESHES if mesh != "expert 2"]
PAIRS = [("gpt", *pair) for pair in itertools.permutations(DENSE, 2)]
# Stages balance their experts by a bias: a loss for it would be added in the model's forward, which they do not call.
PAIRS += [
    ("gpt latent" if "pipeline 2" in pair else "gpt experts", *pair)
    for pair in itertools.permutations(WITH_EXPERTS, 2)
    if "expert 2" in pair
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "before", "after"), PAIRS, ids=[f"{m}: {a} to {b}" for m, a, b in PAIRS])
def test_the_loss_goes_on_on_another_mesh(
    pool: Pool, tmp_path: Path, saved: Any, unbroken: Any, model: str, before: str, after: str
) -> None:
    run = RunDirectory(tmp_path / "run")
    shutil.copytree(saved(model, before).path, run.path)
    train_on(pool, run, 2, model, after, STEPS)
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert {row["attempt"] for row in rows if row["step"] > FIRST} == {2}, "it went on, and did not begin anew"
    assert [row["loss"] for row in rows] == pytest.approx(unbroken(model), rel=RELATIVE)
