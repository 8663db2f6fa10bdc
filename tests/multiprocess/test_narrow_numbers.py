"""Formats narrower than fp64 on divided models: they train, evaluate, save, and stay near the run of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configurations import document
from training_cases import trained

from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.recipe import Recipe

EVALUATING = {"steps": 2, "evaluate": {"every": 1, "batches": 1}}  # rounding has not been amplified yet
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16, zero 3, batch normalisation": ("resnet18", {"mesh": {"shard": 2}, "zero": 3}),
    "bf16, zero 1, accumulating": ("gpt", {"mesh": {"shard": 2}, "zero": 1, "accumulate": 2}),
    "bf16, zero 2, compressed": ("gpt", {"mesh": {"shard": 2}, "zero": 2, "compression": "bf16"}),
    "bf16, tensor": ("gpt llama", {"mesh": {"tensor": 2}}),
    "bf16, pipeline": ("gpt", {"mesh": {"pipeline": 2}, "accumulate": 2}),
    "fp16, zero 3, offloaded": ("gpt", {"mesh": {"shard": 2}, "zero": 3, "offload": "cpu", "precision": "fp16"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_divided_model_trains_and_evaluates_as_one_process_does(pool, name, tmp_path):
    model, plan = CASES[name]
    precision = plan.get("precision", "bf16")
    one = rows(pool, 1, tmp_path / "one", document(model, EVALUATING, {"precision": precision}))
    split = rows(pool, 2, tmp_path / "split", document(model, EVALUATING, {"precision": precision, **plan}))
    for key in ("loss", "validation_loss"):
        found, expected = ([row[key] for row in run if key in row] for run in (split, one))
        assert len(found) == len(expected) > 0
        assert found == pytest.approx(expected, rel=0.02), key


def rows(pool: Any, ranks: int, folder: Path, recipe: dict[str, Any]) -> list[dict[str, Any]]:
    checked = resolved(Recipe.from_document(recipe))
    run = RunDirectory.create(folder, checked.name)
    pool.run(ranks, trained, str(run.path), checked)
    return read_metrics(run)
