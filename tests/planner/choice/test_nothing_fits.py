"""When nothing fits: which memory binds, how much, of how much, and changes that are predicted to fit."""

from __future__ import annotations

from typing import Any

import pytest
from planner_cases import GIB, Formula, recipe, site, space

from gradus.planner.choice.candidates import Space, waits_on_host
from gradus.planner.choice.nothing_fits import _larger_numbers, nothing_fits
from gradus.planner.choice.search import Foresight, search
from gradus.schema.errors import EXIT_NO_PLAN, NoPlanFits
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import MemoryPrediction, Verdict
from gradus.schema.recipe import Recipe


def refusal(state: float, sample: float = 1.0, ranks: int = 8, tokens: int = 64, **fixed: Any) -> NoPlanFits:
    """A refusal by a formula in which a sample of half the tokens has half the activations."""
    formula = Formula(state, sample)
    where = space(recipe(model={"context": tokens}, **fixed), ranks)

    def ask(changed: Recipe, ranks: int) -> tuple[Space, Foresight]:
        share = changed.data.options["context"] / tokens
        return space(changed, ranks, site(nodes=max(1, ranks // 8))), Formula(state, sample * share)

    found = search(where, formula)
    assert not found.ranked
    return nothing_fits(where, found, formula, ask)


def test_it_names_the_term_that_binds_and_the_numbers() -> None:
    error = refusal(700, offload="none", activation_offload=False)
    assert error.exit_code == EXIT_NO_PLAN
    assert (error.details["binds"], error.details["limit_bytes"]) == ("optimizer", 80 * GIB)
    assert error.details["memory"]["optimizer"] == pytest.approx(700 / 8 * GIB, rel=0.001)
    assert "of 8 GPUs with 80.0 GiB a rank needs at least 87.5 GiB" in error.message
    assert "optimizer binds with 87.5 GiB" in error.message


def test_each_change_fits_and_is_small() -> None:
    error = refusal(700, offload="none", activation_offload=False)
    changes = error.details["changes"]
    assert {"plan.offload": "cpu"} in [change["set"] for change in changes]
    assert [change["gpus"] for change in changes if "gpus" in change] == [16], "the next that fits, and no more"
    assert all(0 < change["peak_bytes"] <= 80 * GIB for change in changes)
    assert error.hint
    assert "--gpus 16" in error.hint


def test_what_the_recipe_fixes_is_the_first_thing_to_change() -> None:
    error = refusal(10, sample=30, mesh=Mesh(replicate=8), micro_batch=8, recompute="none", activation_offload=False)
    assert error.details["binds"] == "activations"
    keys = [change["set"] for change in error.details["changes"]]
    assert keys[0] == {"plan.micro_batch": 2}
    assert {"plan.recompute": "full"} in keys
    assert not any("gpus" in change for change in error.details["changes"]), "the mesh is fixed"


def test_fewer_blocks_than_would_fit_is_the_next() -> None:
    class Sparing(Formula):
        """Blocks that are not recomputed are all but none of them."""

        def memory(self, plan: Plan) -> MemoryPrediction:
            spares = plan.recompute_blocks is not None
            return super().memory(plan.model_copy(update={"recompute": "none"}) if spares else plan)

    fixed = {"mesh": Mesh(replicate=8), "micro_batch": 8, "recompute": "full", "recompute_blocks": 1}
    where, formula = space(recipe(**fixed)), Sparing(10, sample=30)
    error = nothing_fits(
        where, search(where, formula), formula, lambda changed, ranks: (space(changed, ranks), formula)
    )
    assert {"plan.recompute_blocks": None} in [change["set"] for change in error.details["changes"]]
    assert "--set plan.recompute_blocks=null" in str(error.hint)


def test_a_shorter_context_is_told_where_activations_bind() -> None:
    fixed = {"recompute": "none", "activation_offload": False, "micro_batch": 1, "mesh": Mesh(replicate=8)}
    keys = [change["set"] for change in refusal(10, sample=200, tokens=2048, **fixed).details["changes"]]
    assert {"data.context": 512} in keys, "half of 200 GiB does not fit, a quarter does"
    keys = [change["set"] for change in refusal(10, sample=200, tokens=256, **fixed).details["changes"]]
    assert not any("data.context" in key for key in keys), "nobody trains on 64 tokens"


def test_host_memory_that_is_too_small_is_named() -> None:
    """Everything fits on the GPU if the rest waits on the host, but a node has no room for it."""

    class Cramped(Formula):
        def host_bytes(self, plan: Plan) -> tuple[int, int]:
            return 900 * GIB, 512 * GIB

        def verdict(self, plan: Plan) -> Verdict:
            return "no" if waits_on_host(plan) else super().verdict(plan)

    where, formula = space(recipe()), Cramped(700)
    error = nothing_fits(
        where, search(where, formula), formula, lambda changed, ranks: (space(changed, ranks), formula)
    )
    assert error.message.endswith("what could wait in host memory needs 900.0 GiB there, and a node has 512.0 GiB")
    assert "needs at least 87.5 GiB" in error.message


def test_with_nothing_to_change_a_larger_gpu_is_what_is_left() -> None:
    fixed = {"recompute": "none", "activation_offload": False, "micro_batch": 8, "mesh": Mesh(replicate=8)}
    error = refusal(999, offload="none", zero=0, precision="bf16", **fixed)
    assert error.details["changes"] == []
    assert error.hint == "use GPUs with at least 1,007 GiB, or a smaller model"
    error = refusal(999_999, offload="none", activation_offload=False, zero=0)
    assert error.hint == (
        "none of 19 numbers of GPUs of this kind from 16 to 8,192 would do: "
        "use GPUs with more memory, or a smaller model"
    )


def test_numbers_that_divide_the_batch_are_tried_where_doublings_do_not() -> None:
    """Of 1,536 samples, 1,024 ranks cannot have the same share; 24 × 8 of 1,000 cannot either, 25 × 8 can."""
    numbers = _larger_numbers(space(recipe(1536), 2, site(nodes=2, gpus=1)))
    assert {512, 768, 1536} <= set(numbers)
    assert {40, 200, 1000} <= set(_larger_numbers(space(recipe(1000), 8)))
    state = {"offload": "none", "activation_offload": False, "recompute": "none"}
    [more] = [change for change in refusal(5_000, sample=0.1, **state).details["changes"] if "gpus" in change]
    assert more["gpus"] == 64, "5,000 GiB over 64 ranks are 78 of 80 GiB"


def test_what_fits_only_with_help_of_the_host_is_told_after_all_else() -> None:
    """Activations of a sample alone are too many for a GPU, on any number of them."""
    fixed = {"recompute": "none", "micro_batch": 1}

    class Host(Formula):
        """Waits on the host only where there are at least four nodes of memory."""

        def verdict(self, plan: Plan) -> Verdict:
            enough = plan.mesh.world_size >= 32
            return super().verdict(plan) if enough or not waits_on_host(plan) else "no"

    where, formula = space(recipe(**fixed), 8), Host(10, 900)
    error = nothing_fits(
        where, search(where, formula), formula, lambda r, n: (space(r, n, site(nodes=max(1, n // 8))), Host(10, 900))
    )
    [more] = [change for change in error.details["changes"] if "gpus" in change]
    assert more["gpus"] == 32
    assert "activation offload" in more["plan"]
