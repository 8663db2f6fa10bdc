"""Models of Hugging Face train as they are, and their loss is the same on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import HERE, SMALL, gpt2
from pool import Pool
from training_cases import Trained, recipe_for, run_on

from gradus.planner.resolve import resolved
from gradus.schema.recipe import Recipe

TEXT = {"use": f"{HERE}:Sentences"}
CLASSES = {"use": f"{HERE}:Sentences", "labels": "classes"}
# transformers computes the loss of causal language models, and the norms of T5, in float32 whatever the model's numbers
# are: equality is that of float32 there.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "causal-gpt2": ({"use": f"{HERE}:gpt2"}, TEXT, 1e-5),
    "causal-llama": ({"use": f"{HERE}:llama"}, TEXT, 1e-5),
    "masked-bert": ({"use": f"{HERE}:bert"}, TEXT, 1e-9),
    "classifying-bert": ({"use": f"{HERE}:bert", "head": "BertForSequenceClassification"}, CLASSES, 1e-9),
    "seq2seq-t5": ({"use": f"{HERE}:t5"}, TEXT, 1e-5),
    "seq2seq-bart": ({"use": f"{HERE}:bart"}, TEXT, 1e-9),
    "vision-vit": ({"use": f"{HERE}:vit"}, {"use": f"{HERE}:Pictures"}, 1e-9),
}


def trained(pool: Pool, ranks: int, folder: Path, model: Any, data: Any, **changes: Any) -> Trained:
    document = {
        "batch": 12,
        "steps": 3,
        "optimizer": {"use": "adamw", "lr": 1e-3},
        "plan": {"precision": "fp64"},
        **changes,
    }
    return run_on(pool, ranks, folder, recipe_for("gpt", model=model, data=data, **document))


def assert_same_rows(found: Trained, expected: Trained, tolerance: float) -> None:
    for row, other in zip(found.rows, expected.rows, strict=True):
        for key in ("loss", "grad_norm", "validation_loss", "validation_accuracy"):
            if key in other:
                assert row[key] == pytest.approx(other[key], rel=tolerance), (row["step"], key)


@pytest.mark.parametrize("case", CASES)
def test_the_loss_is_over_valid_labels_wherever_they_are(pool: Pool, tmp_path: Path, case: str) -> None:
    """Texts of unequal length: a mean of the ranks' own means would differ in the second digit."""
    model, data, tolerance = CASES[case]
    alone = trained(pool, 1, tmp_path, model, data)
    assert_same_rows(trained(pool, 2, tmp_path, model, data), alone, tolerance)


def test_the_loss_is_over_valid_labels_with_accumulation_and_without_any_label(pool: Pool, tmp_path: Path) -> None:
    """Half of the micro-batches of one sample have no label: the mean that the model gives for them is no number."""
    model, data = {"use": f"{HERE}:bert"}, {"use": f"{HERE}:Sentences", "empty": True}
    alone = trained(pool, 1, tmp_path, model, data)
    plan = {"precision": "fp64", "micro_batch": 1, "accumulate": 4}
    assert_same_rows(trained(pool, 3, tmp_path, model, data, plan=plan), alone, 1e-9)


def test_parts_of_a_pretrained_model_that_are_not_used_stay_as_they_are(pool: Pool, tmp_path: Path) -> None:
    model = {"use": f"{HERE}:MeanOfBert"}
    run = trained(pool, 2, tmp_path, model, CLASSES, loss="cross-entropy", metrics=["accuracy"])
    start = trained(pool, 1, tmp_path, model, CLASSES, loss="cross-entropy", steps=1)
    pooler = "encoder.pooler.dense.weight"
    assert torch.equal(run.weights[pooler], start.weights[pooler])
    assert not torch.equal(run.weights["head.weight"], start.weights["head.weight"])
    assert "validation_accuracy" in run.rows[-1]


def test_dropout_and_a_tokenizers_lists_are_no_obstacle(pool: Pool, tmp_path: Path) -> None:
    model = {"use": f"{HERE}:gpt2", "dropout": 0.1}
    data = {"use": f"{HERE}:Encodings"}
    run = trained(pool, 2, tmp_path, model, data, steps=20, optimizer={"use": "adamw", "lr": 1e-2}, plan={})
    assert run.rows[-1]["loss"] < run.rows[0]["loss"]


BUILT_IN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "causal-lm": ({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}, {"use": "stdlib-text"}),
    "masked-lm": (
        {"model_type": "bert", **SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        {"use": "stdlib-text"},
    ),
    "image-classification": (
        {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
        | {"hidden_dropout_prob": 0.0, "image_size": 8, "num_labels": 10},
        {"use": "synthetic-images", "samples": 100},
    ),
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize("task", BUILT_IN)
def test_by_name_they_train_on_built_in_data_with_exact_sums(pool: Pool, tmp_path: Path, task: str) -> None:
    config, data = BUILT_IN[task]
    model: dict[str, Any] = {"use": "huggingface", "task": task, "config": dict(config)}
    if task != "image-classification":
        data = {**data, "max_bytes": 20_000}
        model |= {"vocabulary": 256, "context": 16}
        model["config"] |= NO_DROPOUT if task == "causal-lm" else {}
    alone = trained(pool, 1, tmp_path, model, data)
    assert "validation_accuracy" in alone.rows[-1]
    assert_same_rows(trained(pool, 2, tmp_path, model, data), alone, 1e-9)


def test_a_checkpoint_has_the_names_that_from_pretrained_reads(pool: Pool, tmp_path: Path) -> None:
    """From a folder, trained, and the weights put back into a folder: transformers reads what was trained."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    gpt2().save_pretrained(tmp_path / "start")
    model = {"use": "huggingface", "path": str(tmp_path / "start")}
    data = {"use": "synthetic-tokens", "samples": 100, "context": 16}
    run = trained(pool, 2, tmp_path, model, data, plan={"precision": "fp32"})
    assert json.loads((tmp_path / "start" / "config.json").read_text())["vocab_size"] == data_vocabulary(run)

    end = tmp_path / "end"
    end.mkdir()
    (end / "config.json").write_text((tmp_path / "start" / "config.json").read_text())
    weights = {name: tensor.contiguous() for name, tensor in run.weights.items() if name != "lm_head.weight"}
    save_file(weights, end / "model.safetensors", {"format": "pt"})
    read, report = AutoModelForCausalLM.from_pretrained(end, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor, run.weights[name]), name
    started = AutoModelForCausalLM.from_pretrained(tmp_path / "start").state_dict()
    assert not torch.equal(started["transformer.wte.weight"], run.weights["transformer.wte.weight"])


def data_vocabulary(run: Trained) -> int:
    return int(run.weights["transformer.wte.weight"].shape[0])


@pytest.mark.parametrize("example", ["huggingface", "huggingface_own"])
def test_the_examples_train(pool: Pool, tmp_path: Path, example: str) -> None:
    file = Path(__file__).parents[2] / "examples" / f"{example}.yaml"
    recipe = resolved(Recipe.load(file, ["steps=6", "evaluate.batches=2", "optimizer.warmup=0"]))
    run = run_on(pool, 2, tmp_path, recipe)
    assert [row["step"] for row in run.rows] == list(range(1, 7))
    assert 0 <= run.rows[-1]["validation_accuracy"] <= 1
