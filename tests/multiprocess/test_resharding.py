"""A run that was saved on one mesh goes on on any other: its last checkpoint is that of a run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import document
from pool import Pool
from training_cases import trained

from gradus.checkpoint.store import CheckpointStore
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.plan import Mesh
from gradus.schema.recipe import Recipe

FIRST, STEPS = 6, 10
OPTIMIZER = {"use": "adamw", "lr": 3e-3, "warmup": 3, "weight_decay": 0.1, "clip": 1.0}  # whatever the budget is
RELATIVE = 1e-9
MESHES: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "replicate 2": {"mesh": {"replicate": 2}},
    "shard 2, zero 3": {"mesh": {"shard": 2}, "zero": 3},
    "shard 4, zero 1": {"mesh": {"shard": 4}, "zero": 1},
    "replicate 2 × shard 2": {"mesh": {"replicate": 2, "shard": 2}, "zero": 2},
    "tensor 2": {"mesh": {"tensor": 2}},
    "tensor 2 × shard 2": {"mesh": {"tensor": 2, "shard": 2}, "zero": 3},
    "pipeline 2": {"mesh": {"pipeline": 2}, "accumulate": 2},
    "pipeline 2 × shard 2": {"mesh": {"pipeline": 2, "shard": 2}, "zero": 3, "accumulate": 2},
}


def recipe_on(mesh: str, steps: int, changes: dict[str, Any]) -> Recipe:
    given = {"steps": steps, "evaluate": {"batches": 1}, "optimizer": OPTIMIZER, **changes}
    return resolved(Recipe.from_document(document("gpt", given, {"precision": "fp64", **MESHES[mesh]})))


def attempt(pool: Pool, run: RunDirectory, number: int, mesh: str, steps: int, changes: dict[str, Any]) -> None:
    ranks = Mesh(**MESHES[mesh].get("mesh", {})).world_size
    results = pool.run(ranks, trained, str(run.path), recipe_on(mesh, steps, changes), number)
    assert [result["step"] for result in results] == [steps] * ranks


def saved(run: RunDirectory, step: int = STEPS) -> dict[str, torch.Tensor]:
    return CheckpointStore(run.checkpoints).open(step).tensors()


@pytest.fixture(scope="module")
def unbroken(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The last checkpoint of a run on one rank that never stopped."""
    done: dict[str, dict[str, torch.Tensor]] = {}

    def of(changes: dict[str, Any]) -> dict[str, torch.Tensor]:
        if str(changes) not in done:
            run = RunDirectory.create(tmp_path_factory.mktemp("unbroken"), "run")
            attempt(pool, run, 1, "1 rank", STEPS, changes)
            done[str(changes)] = saved(run)
        return done[str(changes)]

    return of


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        scale = tensor.double().abs().max().clamp(min=1e-30)
        assert (found[name].double() - tensor.double()).abs().max() / scale < RELATIVE, name


AVERAGED = {"hooks": ["ema"]}
ADAPTERS = {"lora": {"rank": 2, "targets": ["*.attention.*"]}}
FROZEN = {"freeze": ["embedding.*", "blocks.0.*"]}


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ("1 rank", "shard 2, zero 3", AVERAGED),
        ("shard 2, zero 3", "1 rank", AVERAGED),
        ("replicate 2", "shard 4, zero 1", AVERAGED),
        ("shard 4, zero 1", "pipeline 2", AVERAGED),
        ("pipeline 2", "tensor 2", AVERAGED),
        ("tensor 2", "replicate 2", AVERAGED),
        pytest.param("tensor 2 × shard 2", "pipeline 2 × shard 2", AVERAGED, marks=pytest.mark.slow),
        pytest.param("pipeline 2 × shard 2", "replicate 2 × shard 2", AVERAGED, marks=pytest.mark.slow),
        pytest.param("replicate 2 × shard 2", "tensor 2 × shard 2", AVERAGED, marks=pytest.mark.slow),
        ("shard 2, zero 3", "shard 4, zero 1", ADAPTERS),
        pytest.param("1 rank", "pipeline 2", ADAPTERS, marks=pytest.mark.slow),
        pytest.param("shard 4, zero 1", "shard 2, zero 3", FROZEN, marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_on_another_mesh_as_if_it_had_never_stopped(
    pool: Pool, tmp_path: Path, unbroken: Any, before: str, after: str, changes: dict[str, Any]
) -> None:
    run = RunDirectory.create(tmp_path, "run")
    attempt(pool, run, 1, before, FIRST, changes)
    attempt(pool, run, 2, after, STEPS, changes)
    assert {row["attempt"] for row in read_metrics(run) if row["step"] > FIRST} == {2}, "it went on, and did not begin"
    assert min(row["step"] for row in read_metrics(run) if row["attempt"] == 2) == FIRST + 1
    assert_same(saved(run), unbroken(changes))
