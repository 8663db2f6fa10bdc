"""Packed documents train alike however a model is split: `documents` reach every block, and the loss is over tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from training_cases import Trained, recipe_for, run_on

LEARNED = {"use": "gpt", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 64}
ROTARY = {**LEARNED, "positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}
ENCODER = {"use": "bert", "layers": 2, "width": 32, "heads": 4, "context": 64, "vocabulary": 300}
MASKED = {"objective": "masked", "mask_token": 1}
TENSOR = {"mesh": {"tensor": 2}}
SPLITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "replicate 2": (LEARNED, {"mesh": {"replicate": 2}}),
    "shard 2, recompute": (ROTARY, {"mesh": {"shard": 2}, "zero": 3, "recompute": "selective"}),
    "tensor 2, learned positions": (LEARNED, TENSOR),
    "tensor 2, rotary, whole sequences": (ROTARY, {**TENSOR, "sequence_parallel": False}),
    "tensor 2, bert": (ENCODER, TENSOR),
    "pipeline 2": (ROTARY, {"mesh": {"pipeline": 2}, "accumulate": 4, "recompute": "full"}),
}

SLOW = ("replicate 2", "tensor 2, rotary, whole sequences")


def trained_on(pool: Pool, ranks: int, folder: Path, model: dict[str, Any], plan: dict[str, Any]) -> Trained:
    file = folder / "texts.jsonl"
    if not file.exists():
        texts = [f"{n}: " + "so weiter " * (n * n % 7) for n in range(120)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = {"use": "text", "path": str(file), "cache": str(folder / "cache"), "packing": True}
    data |= MASKED if model["use"] == "bert" else {}
    plan = {"precision": "fp64", "workers": 0, **plan}
    recipe = recipe_for("gpt", model=model, data=data, batch=8, steps=3, plan=plan)
    return run_on(pool, ranks, folder / f"{ranks}-ranks", recipe)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in SPLITS]
)
def test_the_loss_and_the_weights_are_those_of_one_process(pool: Pool, tmp_path: Path, name: str) -> None:
    model, plan = SPLITS[name]
    one, two = trained_on(pool, 1, tmp_path, model, {}), trained_on(pool, 2, tmp_path, model, plan)
    losses = [[row["loss"] for row in run.rows if "loss" in row] for run in (one, two)]
    assert len(losses[0]) == 3
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    for weight, expected in ((two.weights[key], weight) for key, weight in one.weights.items()):
        assert (weight - expected).abs().max().item() < 1e-9
