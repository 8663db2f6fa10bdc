"""The same loss on any mesh: each configuration against one process, 10 steps in float64."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import CONFIGURATIONS, STEPS, Configuration
from training_cases import Trained, trained

from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.recipe import Recipe

RELATIVE = 1e-9


def run(pool: Any, ranks: int, folder: Path, document: dict[str, Any]) -> Trained:
    recipe = resolved(Recipe.from_document(document))
    directory = RunDirectory.create(folder, recipe.name)
    results = pool.run(ranks, trained, str(directory.path), recipe)
    return Trained(read_metrics(directory), results[0]["weights"], directory)


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    """Runs of one process, each done once."""
    done: dict[str, Trained] = {}

    def of(configuration: Configuration) -> Trained:
        document = configuration.reference()
        key = json.dumps(document, sort_keys=True)
        if key not in done:
            done[key] = run(pool, 1, tmp_path_factory.mktemp("alone"), document)
        return done[key]

    return of


@pytest.fixture(scope="module")
def measured():
    """What was found, for the table of docs/parallelism.md (see benchmarks/parallelism_table.py)."""
    rows: list[dict[str, Any]] = []
    yield rows
    if path := os.environ.get("GRADUS_CONFIGURATIONS"):
        Path(path).write_text(json.dumps(rows))


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in CONFIGURATIONS],
)
def test_loss_gradient_norm_and_weights_are_those_of_one_process(configuration, pool, alone, measured, tmp_path):
    one = alone(configuration)
    split = run(pool, configuration.ranks, tmp_path, configuration.recipe())
    assert one.rows[-1]["loss"] != pytest.approx(one.rows[0]["loss"], rel=1e-3), "nothing was learnt"
    deviations = {name: largest_deviation(curve(split, name), curve(one, name)) for name in ("loss", "grad_norm")}
    assert split.weights.keys() == one.weights.keys()
    weights = {name: of_weights(split.weights[name], weight) for name, weight in one.weights.items()}
    deviations["weights"] = max(weights.values())
    assert all(deviation < RELATIVE for deviation in deviations.values()), (deviations, weights)
    measured.append(
        {"name": configuration.name, "model": configuration.model, "ranks": configuration.ranks, **deviations}
    )


def curve(trained: Trained, name: str) -> list[float]:
    values = [row[name] for row in trained.rows if name in row]
    assert len(values) == STEPS
    return values


def largest_deviation(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def of_weights(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the largest weight of the tensor: a single one may be next to zero."""
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
