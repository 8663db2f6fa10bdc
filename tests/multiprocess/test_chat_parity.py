"""Answers of unequal length weigh the same on one rank and on two: the loss is over the global number of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from training_cases import recipe_for, run_on


def chat_recipe(folder: Path, **changes: Any) -> Any:
    file = folder / "chat.jsonl"
    if not file.exists():
        records = [{"prompt": f"Count to {n}", "answer": "1 " * (1 + n * n % 17)} for n in range(48)]
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"use": "chat", "path": str(file), "cache": str(folder / "cache"), **changes}
    model = {"use": "gpt", "layers": 2, "width": 32, "heads": 4, "context": 80}
    return recipe_for("gpt", model=model, data=data, batch=8, steps=4, plan={"precision": "fp64", "workers": 0})


@pytest.mark.parametrize("packing", [False, True])
def test_the_loss_is_the_same_on_one_and_two_ranks(pool: Pool, tmp_path: Path, packing: bool) -> None:
    recipe = chat_recipe(tmp_path, packing=packing)
    one, two = (run_on(pool, ranks, tmp_path / str(ranks), recipe) for ranks in (1, 2))
    losses = [[row["loss"] for row in run.rows if "loss" in row] for run in (one, two)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for name, weight in one.weights.items():
        assert (weight - two.weights[name]).abs().max().item() < 1e-9, name
