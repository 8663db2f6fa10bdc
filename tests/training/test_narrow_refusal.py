"""A run whose model does not take narrow weights, which no trace has shown, goes on without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import format_cases
import pytest
import torch

from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

CLUSTER = Cluster(name="test", cpu_cores=1, memory_gib=8.0)
BF16, FP32 = torch.bfloat16, torch.float32


def ran(
    folder: Path, name: str, *, narrow: bool = True, fixed: bool = False, **plan: Any
) -> tuple[LiveRun, list[float], list[str]]:
    """The run, its losses and what it warned of; `fixed`: the recipe says that weights are to be narrow."""
    directory = RunDirectory.create(folder, "narrow")
    plan = {"precision": "bf16", **plan, **({"narrow_weights": True} if fixed else {})}
    recipe = resolved(Recipe.from_document(format_cases.document(name, plan=plan, log_every=1)))
    chosen = default_plan(recipe, CLUSTER, 1).plan.model_copy(update={"narrow_weights": narrow})
    live = LiveRun.from_recipe(recipe, chosen, directory, 1, alone(torch.device("cpu")))
    try:
        train(live)
    finally:
        live.recorder.close(state="finished")
    warnings = [event["message"] for event in read_events(directory) if event["event"] == "warning"]
    return live, [row["loss"] for row in read_metrics(directory)], warnings


@pytest.mark.parametrize("name", ["WideHead", "WideGate", "Refusing", "Asserting", "Unseen"])
def test_the_run_goes_on_as_if_it_had_never_had_them(tmp_path: Path, name: str) -> None:
    live, losses, warnings = ran(tmp_path / "narrow", name)
    wide, expected, silence = ran(tmp_path / "wide", name, narrow=False)
    assert losses == expected
    assert len(losses) == 4
    assert live.model.formats == [BF16] + 4 * [FP32], "one call with narrow weights"
    assert not live.step.has_narrow_weights
    assert len(warnings) == len(silence) + 1
    assert any("does not take weights in 16 bits, and goes on without (plan.narrow_weights): " in w for w in warnings)
    found, wanted = live.model.state_dict(), wide.model.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), "buffers and random numbers, too"


def test_of_several_micro_batches_it_is_the_first_that_shows_it(tmp_path: Path) -> None:
    live, losses, _ = ran(tmp_path / "narrow", "Unseen", micro_batch=4, accumulate=2)
    _, expected, _ = ran(tmp_path / "wide", "Unseen", narrow=False, micro_batch=4, accumulate=2)
    assert losses == expected
    assert live.model.formats == [BF16] + 8 * [FP32]


def test_a_model_that_takes_them_keeps_them(tmp_path: Path) -> None:
    live, _, warnings = ran(tmp_path, "Plain")
    assert live.model.formats == 4 * [BF16]
    assert live.step.has_narrow_weights
    assert not any("16 bits" in warning for warning in warnings)


def test_a_recipe_that_asks_for_them_is_told_not_to(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        ran(tmp_path, "WideHead", fixed=True)
    assert caught.value.message.startswith(
        "plan.narrow_weights: found true, but with weights in 16 bits the model fails: RuntimeError: "
    )
    assert caught.value.hint == "use plan.narrow_weights=false"
    assert caught.value.details["field"] == "plan.narrow_weights"


@pytest.mark.parametrize("fixed", [True, False])
def test_what_fails_with_wide_weights_as_well_is_no_matter_of_them(tmp_path: Path, fixed: bool) -> None:
    with pytest.raises(InputError, match=r"the model failed in head \(Linear\)") as caught:
        ran(tmp_path, "Wrong", fixed=fixed)
    assert "16 bits" not in caught.value.message
    assert "float32 [1, 32]" in caught.value.message, "as it fails with the weights that it has"
