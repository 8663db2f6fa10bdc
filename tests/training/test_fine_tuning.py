"""Fine-tuning, end to end through the public API: what was trained is taken up where it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from safetensors.torch import load_file
from training_cases import run_on, trained

import gradus
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.exporting import export, open_saved

# All samples are in every batch, so that losses of different runs are of the same data.
TINY: dict[str, Any] = {
    "name": "tiny",
    "model": {"use": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 16},
    "data": {"use": "stdlib-text", "max_bytes": 20_000, "limit": 8},
    "batch": 8,
    "steps": 10,
    "optimizer": {"use": "adamw", "lr": 1e-2},
    "evaluate": {"batches": 1},
    "plan": {"precision": "fp32"},
}
FROZEN = ["embedding.*", "blocks.0.*"]


def train(folder: Path, document: dict[str, Any], **options: Any) -> gradus.Result:
    recipe = gradus.Recipe.from_document(document)
    result = gradus.train(recipe, runs=folder, quiet=True, **options)
    assert result.state == "finished", result.error
    return result


def losses(result: gradus.Result) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in result.metrics if row.get("loss") is not None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pretrained(folder: Path) -> tuple[Path, float]:
    """An exported model, and its loss: the run goes on for a step, which measures it before it changes anything."""
    first = train(folder, TINY, nproc=1)
    export(open_saved(first.run.path), folder / "exported")
    one_more = train(folder, {**TINY, "steps": 11}, nproc=1, resume=str(first.run.path))
    found = losses(one_more)
    assert found[11] < 0.8 * found[1], "it has learned"
    return folder / "exported", found[11]


@pytest.mark.slow
def test_a_pretrained_model_goes_on_where_it_ended_with_half_of_it_frozen(
    folder: Path, pretrained: tuple[Path, float]
) -> None:
    weights, ended = pretrained
    model = {**TINY["model"], "weights": str(weights)}
    second = train(folder, {**TINY, "name": "tuned", "model": model, "freeze": FROZEN, "seed": 5}, nproc=2)
    found = losses(second)
    assert found[1] == pytest.approx(ended, rel=1e-5)
    assert found[10] < found[1]

    export(open_saved(second.run.path), folder / "tuned-weights")
    before, after = (load_file(path / "model.safetensors") for path in (weights, folder / "tuned-weights"))
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert kept == {name for name in before if name.startswith(("embedding.", "blocks.0."))}
    saved = open_saved(second.run.path).tensors
    assert not any(name.startswith(("optimizer.embedding.", "optimizer.blocks.0.")) for name in saved)
    assert any(name.startswith("optimizer.blocks.1.") for name in saved)


def test_adapters_start_where_it_ended_and_a_run_of_them_goes_on_bit_for_bit(
    folder: Path, pretrained: tuple[Path, float], pool: Pool, run: RunDirectory, tmp_path: Path
) -> None:
    weights, ended = pretrained
    model = {**TINY["model"], "weights": str(weights)}

    def recipe(steps: int, **lora: Any) -> Recipe:
        return resolved(Recipe.from_document({**TINY, "model": model, "lora": {"rank": 4, **lora}, "steps": steps}))

    whole = run_on(pool, 1, tmp_path / "whole", recipe(8))
    assert whole.rows[0]["loss"] == pytest.approx(ended, rel=1e-5)
    pool.run(1, trained, str(run.path), recipe(4), 1)
    pool.run(1, trained, str(run.path), recipe(8), 2)
    assert [row.get("loss") for row in read_metrics(run) if row["step"] > 4] == [
        row.get("loss") for row in whole.rows if row["step"] > 4
    ]
    names = open_saved(run.path).of_model
    assert names
    assert all(name.endswith(("lora_a", "lora_b")) for name in names)


def test_weights_that_do_not_fit_leave_no_run_behind(folder: Path, pretrained: tuple[Path, float]) -> None:
    nowhere = {**TINY, "name": "bad", "model": {**TINY["model"], "weights": str(folder / "nowhere")}}
    with pytest.raises(InputError, match="no such file or folder"):
        gradus.train(gradus.Recipe.from_document(nowhere), runs=folder, quiet=True)
    assert not (folder / "bad").exists()
    wider = {**nowhere, "model": {**TINY["model"], "width": 64, "weights": str(pretrained[0])}}
    result = gradus.train(gradus.Recipe.from_document(wider), nproc=1, runs=folder, quiet=True)
    assert (result.state, result.exit_code) == ("failed", 2)
    assert result.error is not None
    assert "is (256, 32) there and (256, 64) here" in result.error["message"]
