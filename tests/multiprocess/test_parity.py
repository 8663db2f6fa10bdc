"""The loss does not care how many ranks there are: curves and weights agree with those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import user_code
from huggingface_cases import HERE
from pool import Pool
from training_cases import MODELS, STEPS, Trained, recipe_for, run_on

Alone = Callable[..., Trained]
CLASSIFIER, LABELLED = ({"use": f"{user_code.__file__}:{name}"} for name in ("PlainClassifier", "Labelled"))


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """A model's run on one rank, computed once for each recipe."""
    known: dict[str, Trained] = {}

    def of(case: str, /, **changes: Any) -> Trained:
        recipe = recipe_for(case, **changes)
        key = recipe.to_yaml()
        if key not in known:
            known[key] = run_on(pool, 1, tmp_path_factory.mktemp("alone"), recipe)
        return known[key]

    return of


def assert_same(found: Trained, expected: Trained) -> None:
    """Every row and every weight within 1e-9 relative."""
    assert [row["step"] for row in found.rows] == [row["step"] for row in expected.rows]
    for row, other in zip(found.rows, expected.rows, strict=True):
        for key in ("loss", "grad_norm", "validation_loss", "validation_accuracy"):
            if key in other:
                assert row[key] == pytest.approx(other[key], rel=1e-9), (row["step"], key)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in found.weights.items():
        scale = expected.weights[name].abs().max().clamp(min=1e-30)
        assert ((weight - expected.weights[name]).abs().max() / scale).item() < 1e-9, name


# Three ranks are the hardest: nothing divides evenly. Pictures take long, and on other numbers they are no other case.
CASES = [
    *(("gpt", ranks, 1) for ranks in (2, 3, 4)),
    *(("gpt", ranks, 2) for ranks in (1, 3)),
    ("simple-cnn", 3, 1),
    pytest.param("resnet18", 3, 1, marks=pytest.mark.slow),  # most of a minute
]


@pytest.mark.parametrize(("model", "ranks", "accumulate"), CASES)
def test_float64_curve_is_the_same_on_any_number_of_ranks(
    pool: Pool, alone: Alone, tmp_path: Path, model: str, ranks: int, accumulate: int
) -> None:
    recipe = recipe_for(model, plan={"precision": "fp64", "accumulate": accumulate})
    found = run_on(pool, ranks, tmp_path, recipe)
    assert len(found.rows) == STEPS
    assert_same(found, alone(model, plan={"precision": "fp64"}))


CHUNKED: dict[str, tuple[int, dict[str, Any]]] = {
    "replicate, accumulate": (2, {"accumulate": 2}),
    "zero 3": (2, {"mesh": {"shard": 2}, "zero": 3}),
    "pipeline": (2, {"mesh": {"pipeline": 2}, "accumulate": 3}),
    "context": (2, {"mesh": {"context": 2}}),
}


@pytest.mark.parametrize("case", CHUNKED)
def test_a_loss_in_chunks_is_the_same_loss(pool: Pool, alone: Alone, tmp_path: Path, case: str) -> None:
    ranks, plan = CHUNKED[case]
    found = run_on(pool, ranks, tmp_path, recipe_for("gpt", plan={"precision": "fp64", "loss_chunks": 5, **plan}))
    assert_same(found, alone("gpt", plan={"precision": "fp64"}))


OF_USERS: dict[str, tuple[dict[str, Any], float]] = {  # and how near the losses are: transformers' is in fp32
    "a classifier": ({"model": CLASSIFIER, "data": LABELLED, "loss": "cross-entropy"}, 1e-9),
    "a Llama": ({"model": {"use": f"{HERE}:llama"}, "data": {"use": f"{HERE}:Sentences"}}, 1e-5),
    # DDP then looks for the parameters that its forward used, and the loss is after it.
    "a head on a BERT": (
        {
            "model": {"use": f"{HERE}:MeanOfBert"},
            "data": {"use": f"{HERE}:Sentences", "labels": "classes"},
            "loss": "cross-entropy",
        },
        1e-6,
    ),
}


@pytest.mark.parametrize("plan", [{"accumulate": 2}, {"mesh": {"shard": 2}, "zero": 3}], ids=["replicate", "zero 3"])
@pytest.mark.parametrize("case", OF_USERS)
def test_a_loss_in_chunks_of_a_model_of_the_users(
    pool: Pool, alone: Alone, tmp_path: Path, case: str, plan: dict[str, Any]
) -> None:
    changes, near = OF_USERS[case]
    chunked = recipe_for("gpt", **changes, plan={"precision": "fp64", "loss_chunks": 3, **plan})
    found, whole = run_on(pool, 2, tmp_path, chunked), alone("gpt", **changes, plan={"precision": "fp64"})
    losses = [[row["loss"] for row in run.rows if "loss" in row] for run in (found, whole)]
    assert len(losses[0]) == STEPS
    assert losses[0] == pytest.approx(losses[1], rel=near)


@pytest.mark.parametrize(
    ("model", "ranks"), [*(("gpt", ranks) for ranks in (2, 3, 4)), ("simple-cnn", 3), ("resnet18", 4)]
)
def test_fp32_first_step_is_the_same_on_any_number_of_ranks(
    pool: Pool, alone: Alone, tmp_path: Path, model: str, ranks: int
) -> None:
    found = run_on(pool, ranks, tmp_path, recipe_for(model, steps=1)).rows[0]
    expected = alone(model, steps=1).rows[0]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("plan", [{"mesh": {"shard": 2}, "zero": 3}, {"mesh": {"tensor": 2}}], ids=str)
def test_moments_in_bf16_are_rounded_alike_however_they_are_divided(
    pool: Pool, alone: Alone, tmp_path: Path, plan: dict[str, Any]
) -> None:
    optimizer = {**MODELS["gpt"]["optimizer"], "moments": "bf16"}
    found = run_on(pool, 2, tmp_path, recipe_for("gpt", optimizer=optimizer, plan={"precision": "fp32", **plan}))
    expected = alone("gpt", optimizer=optimizer, plan={"precision": "fp32"})
    losses = [[row["loss"] for row in run.rows if "loss" in row] for run in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=5e-6)  # by another chance, it is 5e-5


@pytest.mark.parametrize(("model", "ranks"), [("gpt", 2), ("gpt", 3), ("gpt", 4), ("simple-cnn", 3)])
def test_a_short_last_batch_weighs_what_it_holds(
    pool: Pool, alone: Alone, tmp_path: Path, model: str, ranks: int
) -> None:
    """25 samples in batches of 12 leave one for the third step: on all ranks but the first it is padding."""
    data = {**MODELS[model]["data"], "limit": 25}
    changes = {"batch": 12, "data": data, "epochs": 1, "steps": None, "plan": {"precision": "fp64"}}
    found = run_on(pool, ranks, tmp_path, recipe_for(model, **changes))
    assert [row["samples"] for row in found.rows] == [12, 24, 25]
    assert_same(found, alone(model, **changes))


@pytest.mark.parametrize(("ranks", "accumulate"), [(1, 3), (2, 1), (2, 3), (3, 2), (4, 1)])
def test_a_mean_is_over_valid_tokens_wherever_they_are(
    pool: Pool, alone: Alone, tmp_path: Path, ranks: int, accumulate: int
) -> None:
    """Texts of unequal length, so that micro-batches and ranks hold unequal numbers: no mean of means gives this."""
    changes = {
        "model": {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16, "vocabulary": 32},
        "data": {"use": f"{user_code.__file__}:RaggedText"},
        "batch": 12,
        "steps": 5,
    }
    expected = alone("gpt", **changes, plan={"precision": "fp64"})
    plan = {"precision": "fp64", "accumulate": accumulate}
    assert_same(run_on(pool, ranks, tmp_path, recipe_for("gpt", **changes, plan=plan)), expected)
