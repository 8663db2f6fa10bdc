"""Every combination that cannot be is refused in one line with the reason, before any process starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from refusal_cases import recipe
from refused_combinations import CPU, REFUSED_COMBINATIONS
from refused_splits import REFUSED_SPLITS

from gradus.parallel.case import Case
from gradus.parallel.support import RULES, check_supported
from gradus.planner.defaults import default_plan
from gradus.planner.model_facts import facts_of
from gradus.schema.cluster import GpuNumbers
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan

TRACED = "weights in 16 bits"  # the rule that looks at what a trace has shown
REFUSED = [*REFUSED_SPLITS, *REFUSED_COMBINATIONS]


@pytest.mark.parametrize(
    ("rule", "plan", "more", "cluster", "message"),
    [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in REFUSED],
)
def test_it_is_refused_in_one_line_with_the_reason_and_what_to_do(rule, plan, more, cluster, message):
    given = recipe(plan, **more)
    with pytest.raises(InputError) as caught:
        default_plan(given, cluster, own_loop=rule.startswith("own loop"))
    error = caught.value
    assert error.message.removeprefix("recipe: ") == message
    assert "\n" not in error.message
    assert error.hint or error.details.get("nearest")
    assert {"field", "found", "allowed"} <= error.details.keys()


@pytest.mark.parametrize(
    ("rule", "plan", "more", "cluster", "message"),
    [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in REFUSED],
)
def test_it_is_that_very_rule_that_refuses(rule, plan, more, cluster, message):
    given = recipe(plan, **more)
    capability = tuple(cluster.gpu.compute_capability) if isinstance(cluster.gpu, GpuNumbers) else None
    share = given.batch // given.plan.mesh.data_ranks
    whole = given.plan.model_copy(update={"micro_batch": max(1, share // given.plan.accumulate)})
    own_loop = rule.startswith("own loop")
    case = Case(given, whole, facts_of(given), cluster.gpus_per_node > 0, cluster.gpu_name, capability, own_loop)
    refusal = RULES[rule](case)
    assert refusal is not None
    assert refusal.message == message


def test_every_rule_of_the_table_has_a_case():
    assert {case[0] for case in REFUSED} | {TRACED} == set(RULES)


@pytest.mark.parametrize(
    ("plan", "message", "hint"),
    [
        (
            {"precision": "bf16", "narrow_weights": True},
            "plan.narrow_weights: found true, but with weights in 16 bits the model failed: why",
            "use plan.narrow_weights=false",
        ),
        (
            {"precision": "fp16", "mesh": Mesh(shard=2), "zero": 2},
            "plan.mesh: found {shard: 2}, but sharded parameters are gathered in 16 bits, and with such "
            "the model failed: why",
            "use replicas, or plan.precision=fp32; or let the model compute in the format of its weights",
        ),
        ({"precision": "bf16", "mesh": Mesh(replicate=2)}, None, None),
        ({"precision": "fp32", "mesh": Mesh(shard=2), "zero": 3}, None, None),
        ({"precision": "bf16"}, None, None),
    ],
)
def test_a_model_that_failed_with_weights_in_16_bits_gets_none(plan, message, hint):
    given = recipe({})
    case = Case(given, Plan(**plan), replace(facts_of(given), narrow_failure="the model failed: why"))
    refusal = RULES[TRACED](case)
    assert (refusal.message, refusal.hint) == (message, hint) if refusal is not None else message is None
    assert RULES[TRACED](replace(case, model=facts_of(given))) is None


def test_without_a_refusal_the_table_says_nothing():
    given = recipe({})
    check_supported(Case(given, Plan(micro_batch=16), facts_of(given)))


def test_where_the_precision_leaves_nothing_to_narrow_either_of_the_two_may_go():
    with pytest.raises(InputError) as caught:
        default_plan(recipe({"narrow_weights": True, "precision": "fp32"}), CPU)
    assert caught.value.hint == "use plan.precision=bf16, or plan.narrow_weights=false"
