"""Memory that runs out is explained wherever it happens: what is held, what binds, what would fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import CLUSTER, recipe_for

from gradus.parallel.world import alone
from gradus.planner.choice.fitting import GIB, Shortage, changes_that_fit
from gradus.planner.defaults import default_plan
from gradus.planner.memory.model_state import ModelSize, ModelState
from gradus.record.directory import RunDirectory
from gradus.record.status import read_status
from gradus.schema.errors import EXIT_DO_NOT_RESTART
from gradus.schema.plan import Plan
from gradus.schema.prediction import PREDICTION_FILE, MemoryPrediction, Prediction
from gradus.training import live_run
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.out_of_memory import OutOfMemory, asked_bytes, out_of_memory_explained, told

CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 31.74 GiB of which ..."
CPU = torch.device("cpu")


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError(CUDA_SAYS)


def in_forward(live: LiveRun) -> None:
    live.model.register_forward_pre_hook(full)


def in_backward(live: LiveRun) -> None:
    next(live.model.parameters()).register_hook(full)


def in_optimizer(live: LiveRun) -> None:
    live.optimizer.step = full  # type: ignore[method-assign]


def in_evaluation(live: LiveRun) -> None:
    live.model.register_forward_pre_hook(lambda model, _: None if model.training else full())


def failed(tmp_path: Path, spoil: Callable[[LiveRun], None], **plan: Any) -> OutOfMemory:
    recipe = recipe_for("gpt", steps=2, evaluate={"every": 1}, plan={"memory_limit_gib": 0.5, **plan})
    run = RunDirectory.create(tmp_path, "full")
    live = LiveRun.from_recipe(recipe, default_plan(recipe, CLUSTER, 1).plan, run, 1, alone(CPU))
    spoil(live)
    with pytest.raises(OutOfMemory) as caught, live.recorder.told_of_failure(), out_of_memory_explained(live):
        train(live)
    status = read_status(run)
    assert status is not None
    assert str(status.last_error).startswith("out of memory in ")
    return caught.value


@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (in_forward, "the forward pass"),
        (in_backward, "the backward pass"),
        (in_optimizer, "the optimizer step"),
        (in_evaluation, "an evaluation"),
    ],
)
def test_it_is_told_where_and_what_was_held(tmp_path: Path, spoil: Callable[[LiveRun], None], where: str) -> None:
    error = failed(tmp_path, spoil)
    assert error.exit_code == EXIT_DO_NOT_RESTART
    first, *rest = error.message.splitlines()
    assert first.startswith(f"out of memory in {where}: ")
    assert first.endswith("2 GiB were asked for, plan.memory_limit_gib is 0.5 GiB")
    assert [line.split("  ")[1] for line in rest[:3]] == ["parameters", "gradients", "optimizer state"]
    assert "Traceback" not in error.message + str(error.hint)
    assert "traceback" not in error.details
    held = error.details["memory"]
    parameters = held["parameters"]
    assert parameters > 0
    complete = {"the optimizer step": True, "the backward pass": False}
    assert (held["gradients"] == parameters) == complete.get(where, False)
    assert (held["gradients"] > 0) == (where in complete)
    assert (held["optimizer"] > 2 * parameters) == (where == "an evaluation"), "Adam's state comes with the first step"


def test_what_was_predicted_is_told_in_the_terms_of_the_plan(tmp_path: Path) -> None:
    foreseen = Prediction(
        memory=MemoryPrediction(parameters=GIB, optimizer=2 * GIB, activations=3 * GIB),
        peak_at="backward of block 3",
        limit_bytes=GIB,
        memory_error=0.05,
        step=None,
        model_flops=1.0,
        hardware_flops=1.0,
        verdict="no",
    )

    def spoil(live: LiveRun) -> None:
        folder = live.run.attempt_path(live.attempt)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PREDICTION_FILE).write_text(foreseen.to_json())
        in_backward(live)

    error = failed(tmp_path, spoil)
    line = "  predicted for backward of block 3: 6 GiB (activations 3 GiB, optimizer 2 GiB, parameters 1 GiB)"
    assert line in error.message.splitlines()
    assert error.details["memory"]["predicted"]["activations"] == 3 * GIB


def test_changes_reckon_with_the_activations_that_were_predicted() -> None:
    """Memory ran out before they were all there."""
    few = bert_shortage(limit_bytes=60 * GIB, used_bytes=38 * GIB, plan=Plan(precision="bf16", micro_batch=4))
    many = replace(few, predicted=MemoryPrediction(activations=40 * GIB), predicted_at="loss")
    assert [change.activation_bytes for change in changes_that_fit(few)[:1]] < [
        change.activation_bytes for change in changes_that_fit(many)[:1]
    ]


def test_a_model_that_is_too_large_to_build_is_counted_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_run, "described_model", full)
    recipe = recipe_for("gpt", plan={"memory_limit_gib": 0.0001})
    run = RunDirectory.create(tmp_path, "full")
    with pytest.raises(OutOfMemory) as caught:
        LiveRun.from_recipe(recipe, default_plan(recipe, CLUSTER, 1).plan, run, 1, alone(CPU))
    assert caught.value.details["binds"] == "optimizer state"


def test_other_errors_stay_as_they_are(tmp_path: Path) -> None:
    recipe = recipe_for("gpt", steps=2)
    run = RunDirectory.create(tmp_path, "other")
    live = LiveRun.from_recipe(recipe, default_plan(recipe, CLUSTER, 1).plan, run, 1, alone(CPU))
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError) as caught, out_of_memory_explained(live):
        raise error
    assert caught.value is error
    live.recorder.close(state="failed")


def bert_shortage(**changes: Any) -> Shortage:
    """Lab 2 on one rank with 32 GiB, at the first step of the optimizer."""
    size = ModelSize(2_472_627_289, 2_471_577_689, outside_blocks=54_266_969, largest_block=12_596_224)
    bytes_ = 4 * size.parameters
    values: dict[str, Any] = {
        "where": "the optimizer step",
        "plan": Plan(precision="bf16", micro_batch=4),
        "batch": 4,
        "held": ModelState(parameters=bytes_, gradients=bytes_, optimizer=bytes_),
        "used_bytes": 3 * bytes_ + GIB,
        "asked_bytes": 2 * GIB,
        "limit_bytes": 32 * GIB,
        "limit": "plan.memory_limit_gib is 32 GiB",
        "size": size,
    }
    return Shortage(**{**values, **changes})


def test_the_words_name_the_term_the_numbers_and_the_keys_to_set() -> None:
    error = told(bert_shortage())
    assert error.message.splitlines()[:9] == [
        "out of memory in the optimizer step: 28.6 GiB are in use, 2 GiB more were asked for, plan.memory_limit_gib is "
        "32 GiB",
        "  parameters                  9.21 GiB (2,472,627,289, 2,471,577,689 of them trained)",
        "  gradients                   9.21 GiB",
        "  optimizer state             9.21 GiB of 18.4 GiB that a step needs",
        "  activations and buffers        1 GiB",
        "what binds: the optimizer state (18.4 GiB): parameters, gradients and optimizer state need 36.8 GiB together, "
        "4.83 GiB more than there is, whatever the micro-batch",
        "what would fit, predicted for each rank:",
        "  --set plan.mesh.shard=2 --set plan.zero=1",
        "      23 GiB of model state + at least 0.5 GiB of activations: optimizer state is divided over 2 ranks",
    ]
    assert error.hint == "--set plan.mesh.shard=2 --set plan.zero=1 (optimizer state is divided over 2 ranks)"
    assert error.details["binds"] == "optimizer state"
    assert error.details["changes"][0]["set"] == {"plan.mesh.shard": 2, "plan.zero": 1}


def test_where_nothing_fits_it_says_so() -> None:
    error = told(bert_shortage(limit_bytes=GIB // 10, limit="a small GPU has 0.1 GiB"))
    assert "what would fit" not in error.message
    assert "smaller model" in str(error.hint)


def test_who_else_holds_the_gpu_is_told() -> None:
    assert "other processes hold 40 GiB of this GPU" in told(bert_shortage(others_bytes=40 * GIB)).message


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (CUDA_SAYS, 2 * GIB),
        ("Tried to allocate 512.00 MiB.", GIB // 2),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("CUDA error: out of memory", None),
    ],
)
def test_the_request_that_failed_is_read_from_what_torch_says(text: str, wanted: int | None) -> None:
    assert asked_bytes(text) == wanted
