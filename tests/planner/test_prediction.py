"""A prediction puts memory, time and the whole run together, with the same names and sums everywhere."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from planner_cases import GIB, recipe, site

import gradus
from gradus.planner.prediction import Predictor, device_bytes, predicted
from gradus.planner.profile.request import ProfileRequest, profile_for, request_for
from gradus.planner.step_error import (
    ACROSS_NODES,
    CALIBRATED,
    MEASURED,
    MEASURED_COMPILED,
    OTHER_VENDOR,
    SAME_VENDOR,
)
from gradus.schema.calibration import Calibration
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import InputError, NoPlanFits
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import Prediction
from gradus.schema.recipe import CheckpointBlock, Recipe

PLAN = Plan(precision="bf16", micro_batch=64)


def foreseen(plan: Plan = PLAN, cluster: Cluster | None = None, **more: Any) -> Prediction:
    return gradus.predict(recipe(**more), cluster or site(), plan)


def test_the_kinds_add_up_and_the_rates_follow_from_the_step() -> None:
    found = foreseen()
    kinds = found.memory.model_dump()
    assert sum(kinds.values()) == found.memory.peak > 0
    assert found.limit_bytes == 80 * GIB
    assert found.verdict == "fits"
    assert found.step is not None
    assert found.samples_per_second == pytest.approx(64 / found.step.total)
    assert found.tokens_per_second == pytest.approx(64 * 64 / found.step.total)
    assert found.mfu == pytest.approx(found.model_flops / (found.step.total * found.peak_flops))
    assert found.budget is not None
    assert (found.budget.steps, found.budget.seconds) == (3, pytest.approx(3 * found.step.total))
    assert any("traced" in sentence for sentence in found.basis)


def test_json_has_the_sums_and_reads_back(tmp_path) -> None:
    found = foreseen()
    document = json.loads(found.to_json())
    assert document["memory"]["peak"] == found.memory.peak
    assert document["step"]["total"] == found.step.total
    (tmp_path / "prediction.json").write_text(found.to_json())
    assert Prediction.load(tmp_path / "prediction.json") == found


def test_sharding_divides_the_state_and_recomputing_the_activations() -> None:
    replicas = foreseen(Plan(precision="bf16", micro_batch=8, mesh=Mesh(replicate=8)))
    shards = foreseen(Plan(precision="bf16", micro_batch=8, mesh=Mesh(shard=8), zero=3))
    assert shards.memory.optimizer == pytest.approx(replicas.memory.optimizer / 8, rel=0.1)
    whole = foreseen()
    again = foreseen(PLAN.model_copy(update={"recompute": "full"}))
    assert again.memory.activations < whole.memory.activations
    assert again.hardware_flops > again.model_flops == whole.model_flops == whole.hardware_flops


def test_a_profile_that_is_there_gives_the_same() -> None:
    profile = profile_for(recipe(), ProfileRequest("bf16", capability=(9, 0)))
    assert predicted(profile, recipe(), site(), PLAN) == foreseen()


def test_a_plan_that_cannot_cut_the_batch_is_bad_input() -> None:
    with pytest.raises(InputError, match="cannot be split"):
        foreseen(Plan(micro_batch=7))


def test_a_smaller_gpu_is_tight_and_then_too_small() -> None:
    peak = foreseen().memory.peak / GIB
    assert [foreseen(cluster=site(memory_gib=peak * share)).verdict for share in (1.3, 1.0, 0.8)] == [
        "fits",
        "tight",
        "no",
    ]


def test_a_cap_on_torch_does_not_count_what_the_driver_takes() -> None:
    found = foreseen()
    cap = (found.memory.peak - found.memory.device_context) / GIB * (1 + found.memory_error) * 1.01
    capped = foreseen(PLAN.model_copy(update={"memory_limit_gib": cap}))
    assert capped.verdict == "fits"
    assert capped.memory == found.memory.model_copy(update={"device_context": 0})
    assert any("0.85 GiB that the driver takes besides are not counted" in sentence for sentence in capped.basis)
    assert foreseen(cluster=site(memory_gib=cap)).verdict != "fits"


@pytest.mark.parametrize(
    ("share", "said"), [(0.5, "no"), (0.97, "tight"), (1.0, "tight"), (1.03, "tight"), (1.5, "fits"), (40, "fits")]
)
def test_under_a_cap_peak_limit_and_verdict_are_of_the_same(share: float, said: str) -> None:
    """The peak had the driver's share, and the limit and the verdict did not: 0.68 of 0.50 GiB did fit."""
    whole = foreseen().memory
    cap = share * (whole.peak - whole.device_context) / GIB
    found = foreseen(PLAN.model_copy(update={"memory_limit_gib": cap}))
    assert found.verdict == said
    assert found.limit_bytes == round(cap * GIB)
    assert (found.memory.peak * (1 + found.memory_error) <= found.limit_bytes) == (said == "fits")
    assert (found.memory.peak * (1 - found.memory_error) > found.limit_bytes) == (said == "no")


def test_what_does_not_fit_under_a_cap_is_refused_and_reasons_are_of_what_it_limits() -> None:
    whole = foreseen(Plan(precision="bf16", micro_batch=1, accumulate=64)).memory
    least, context = (whole.peak - whole.device_context) / GIB, whole.device_context / GIB
    with pytest.raises(NoPlanFits) as caught:
        gradus.plan(recipe(memory_limit_gib=least / 10), site(), 1)
    assert caught.value.details["limit_bytes"] == round(least / 10 * GIB)
    assert caught.value.details["memory"]["device_context"] == 0
    best = gradus.plan(recipe(memory_limit_gib=4 * least), site(), 1)[0]
    assert best.prediction.verdict == "fits"
    needs, has = (float(word) for word in re.findall(r"[0-9.]+", best.reasons["recompute"]))
    assert needs <= has == pytest.approx(4 * least, abs=0.005)
    assert needs < context


def test_what_waits_on_the_host_must_have_room_there() -> None:
    plan = Plan(precision="bf16", micro_batch=8, mesh=Mesh(shard=8), zero=3, offload="cpu")
    small = site().model_copy(update={"memory_gib": 0.01})
    assert foreseen(plan).verdict == "fits"
    assert foreseen(plan, small).verdict == "no"


def test_without_host_memory_for_copies_training_waits_for_the_writing() -> None:
    plenty, small = foreseen(), foreseen(PLAN, site().model_copy(update={"memory_gib": 0.01}))
    assert plenty.budget is not None
    assert small.budget is not None
    parameters = profile_for(recipe(), ProfileRequest("bf16", capability=(9, 0))).parameters
    assert plenty.host_memory.saving == 3 * 4 * parameters, "with Adam's two moments, in 32 bits"
    assert plenty.budget.checkpoint_stall_seconds < plenty.budget.checkpoint_seconds
    assert small.budget.checkpoint_stall_seconds == small.budget.checkpoint_seconds
    assert any("training waits until a checkpoint is written" in said for said in small.basis)
    assert small.verdict == plenty.verdict, "it can run all the same"


def test_without_a_writer_in_the_background_nothing_is_copied_and_training_waits() -> None:
    waiting = recipe().model_copy(update={"checkpoint": CheckpointBlock(background=False)})
    found = gradus.predict(waiting, site(), PLAN)
    assert found.budget is not None
    assert found.host_memory.saving == 0
    assert found.budget.checkpoint_stall_seconds == found.budget.checkpoint_seconds
    assert any("checkpoint.background: false" in said for said in found.basis)


def test_calibration_is_used_and_said() -> None:
    plain, factor = foreseen(), {"compute": 2.0, "activations": 1.5}
    known = Calibration(device="H100", software="torch", date="2026-11-15", factors=factor)
    found = foreseen(cluster=site(calibration=known))
    assert found.step.compute == pytest.approx(2 * plain.step.compute)
    assert found.memory.activations == pytest.approx(1.5 * plain.memory.activations, rel=1e-6)
    assert any("Calibrated on H100" in sentence for sentence in found.basis)


def test_a_gpu_of_unknown_speed_has_memory_and_no_time() -> None:
    own = site().model_copy(update={"gpu": GpuNumbers(name="Own GPU 9", memory_gib=24)})
    found = foreseen(cluster=own)
    assert (found.step, found.mfu, found.budget) == (None, None, None)
    assert found.limit_bytes == 24 * GIB
    assert any("no time is predicted" in sentence for sentence in found.basis)


def test_links_that_are_assumed_are_named_where_they_are_used() -> None:
    assert not any("links." in sentence for sentence in foreseen().basis)
    inside = foreseen(Plan(precision="bf16", micro_batch=8, mesh=Mesh(replicate=8)))
    assert [sentence.split()[0] for sentence in inside.basis if "links." in sentence] == ["links.intra"]
    across = foreseen(Plan(precision="bf16", micro_batch=4, mesh=Mesh(replicate=16)), site(nodes=2))
    assert len([sentence for sentence in across.basis if "links." in sentence]) == 2


def test_it_is_said_what_a_step_waits_for_on_the_host() -> None:
    def said(found: Prediction) -> tuple[int, int]:
        return tuple(sum(words in line for line in found.basis) for words in ("for data", "host holds up"))  # type: ignore[return-value]

    assert said(foreseen()) == (1, 1)
    wide = {"use": "gpt", "layers": 2, "width": 8192, "heads": 64, "context": 2048, "vocabulary": 512}
    assert said(foreseen(Plan(precision="bf16", micro_batch=8), model=wide, batch=8)) == (1, 0)


def test_on_a_cpu_ranks_share_the_memory_of_the_node_and_no_driver_takes_any() -> None:
    laptop = Cluster(name="laptop", cpu_cores=8, memory_gib=16)
    found = foreseen(Plan(micro_batch=16, mesh=Mesh(replicate=4)), laptop)
    assert found.limit_bytes == 4 * GIB
    assert found.memory.device_context == 0
    assert found.step is None


@pytest.mark.parametrize(("gpu", "gib"), [("A100-SXM4-80GB", 78.4), ("H200-SXM", 138.18), ("V100-SXM2-32GB", 31.36)])
def test_a_gpu_of_the_catalogue_has_nearly_as_many_gib_as_its_vendor_says_gb(gpu: str, gib: float) -> None:
    cluster = Cluster(name="c", gpus_per_node=1, gpu=gpu, cpu_cores=8, memory_gib=64)
    assert device_bytes(cluster) == pytest.approx(gib * GIB, rel=1e-3)
    assert device_bytes(cluster.model_copy(update={"gpu": "nothing of the kind"})) is None


def test_what_is_certain_is_below_what_is_predicted() -> None:
    """Else the search would drop plans that fit."""
    predictor = Predictor(recipe(), site(nodes=2))
    for mesh, zero in (
        (Mesh(replicate=16), 0),
        (Mesh(shard=16), 3),
        (Mesh(shard=4, tensor=4), 1),
        (Mesh(pipeline=4, shard=4), 1),
    ):
        for recompute in ("none", "full"):
            share = 64 // mesh.data_ranks
            plan = Plan(mesh=mesh, zero=zero, precision="bf16", accumulate=share, recompute=recompute)
            assert 0 < predictor.least_bytes(plan) <= predictor.memory(plan).peak


def test_a_card_whose_error_correction_takes_memory_has_less():
    site = Cluster(name="cards", gpus_per_node=1, gpu="L40S", cpu_cores=8, memory_gib=64)
    assert device_bytes(site) == round(44.42 * 2**30)


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (Plan(precision="bf16", micro_batch=1, mesh=Mesh(replicate=64)), "64 ranks need a GPU each, but site has 8"),
        (Plan(precision="bf16", micro_batch=64, mesh=Mesh(tensor=7)), "7"),
        (Plan(precision="bf16", micro_batch=64, mesh=Mesh(context=3)), "3"),
        (Plan(precision="bf16", micro_batch=8, mesh=Mesh(shard=8, expert=8), zero=1), "expert"),
    ],
    ids=["more ranks than GPUs", "heads that do not divide", "tokens that do not divide", "no experts"],
)
def test_what_a_run_would_refuse_has_no_prediction_either(plan: Plan, field: str) -> None:
    with pytest.raises(InputError, match=field):
        foreseen(plan)


def test_ranks_that_share_a_gpu_by_their_plan_have_a_prediction() -> None:
    shared = Plan(precision="bf16", micro_batch=4, mesh=Mesh(replicate=16), ranks_per_gpu=2)
    assert foreseen(shared).limit_bytes == 40 * GIB


def test_how_the_float8_weights_are_scaled_is_part_of_what_is_traced(monkeypatch) -> None:
    asked = []

    def traced(recipe: Any, requests: Any) -> Any:
        asked.extend(requests)
        return list(requests)

    monkeypatch.setattr("gradus.planner.prediction.profiles_for", traced)
    predictor = Predictor(recipe(), site())
    for scaling in ("tensor", "row", "tensor"):
        plan = Plan(precision="fp8", fp8_scaling=scaling)
        assert predictor.profile(plan) == request_for(plan, site())
    assert len(asked) == 2


def test_a_run_without_end_is_null_in_json_and_reads_back(tmp_path) -> None:
    """Nodes that fail every second, and checkpoints that take longer."""
    where = site(failures_per_node_day=1e9, price_per_gpu_hour=2.0)
    found = foreseen(cluster=where)
    assert found.budget is not None
    assert (found.budget.goodput, found.budget.seconds_with_failures) == (0.0, math.inf)
    document = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert document["budget"]["seconds_with_failures"] is document["budget"]["gpu_hours"] is None
    (tmp_path / "prediction.json").write_text(found.to_json())
    assert Prediction.load(tmp_path / "prediction.json") == found


def test_a_gpu_of_unknown_memory_is_tight_and_it_is_said() -> None:
    mystery = site().model_copy(update={"gpu": "Mystery 9000"})
    found = foreseen(cluster=mystery)
    assert (found.limit_bytes, found.verdict) == (None, "tight")
    assert any("How much memory Mystery 9000 has is not known" in sentence for sentence in found.basis)


def test_a_limit_above_the_memory_of_the_device_is_that_of_the_device() -> None:
    found = foreseen(PLAN.model_copy(update={"memory_limit_gib": 500.0}))
    assert found.limit_bytes == 80 * GIB


def test_the_driver_has_its_share_of_the_device_under_a_limit_too() -> None:
    """Under the limit alone it would fit: the context is not under it."""
    exact = foreseen().memory.peak / GIB * 1.13
    under = PLAN.model_copy(update={"memory_limit_gib": exact})
    assert foreseen(under, site(memory_gib=exact)).verdict == foreseen(PLAN, site(memory_gib=exact)).verdict
    assert foreseen(under, site(memory_gib=foreseen().memory.peak / GIB * 0.5)).verdict == "no"


def test_the_stated_error_of_a_step_follows_what_it_rests_on() -> None:
    eager = PLAN.model_copy(update={"compile": False})

    def error(cluster: Cluster, plan: Plan = eager) -> float | None:
        return foreseen(plan, cluster).step_error

    measured = site().model_copy(update={"gpu": "H200"})
    assert error(measured) == MEASURED
    assert error(measured, PLAN.model_copy(update={"compile": True})) == MEASURED_COMPILED
    assert error(site().model_copy(update={"gpu": "A100-SXM4-80GB"})) == SAME_VENDOR
    assert error(site().model_copy(update={"gpu": "MI300X"})) == OTHER_VENDOR
    calibrated = measured.model_copy(update={"calibration": Calibration(factors={"compute": 1.1})})
    assert error(calibrated) == CALIBRATED
    two = measured.model_copy(update={"nodes": 2})
    assert error(two, eager.model_copy(update={"mesh": Mesh(replicate=16), "micro_batch": 4})) == pytest.approx(
        MEASURED + ACROSS_NODES
    )
    assert foreseen(cluster=site().model_copy(update={"gpu": "Mystery 9000"})).step_error is None


@pytest.mark.parametrize(("watts", "more"), [(700.0, 0.0), (1000.0, 0.0), (350.0, 0.5), (None, 0.0)])
def test_a_power_limit_below_what_the_gpu_is_rated_for_is_told_and_makes_the_time_less_sure(watts, more) -> None:
    gpu = GpuNumbers(name="H200", memory_gib=141, power_watts=watts)
    eager = PLAN.model_copy(update={"compile": False})
    found = foreseen(eager, site().model_copy(update={"gpu": gpu}))
    assert found.step_error == pytest.approx(MEASURED + more)
    said = [line for line in found.basis if "W that it is rated for" in line]
    assert [line.split(":")[0] for line in said] == (
        ["H200 may take 350 of the 700 W that it is rated for"] if more else []
    )


def test_ranks_on_a_cpu_share_its_rate_and_have_no_buffers_of_nccl() -> None:
    rate = Calibration(device="A CPU", software="torch", date="2026-11-15", flops_per_second=1e11)
    laptop = Cluster(name="laptop", cpu_cores=8, memory_gib=64, calibration=rate)
    alone = foreseen(Plan(micro_batch=64), laptop)
    both = foreseen(Plan(micro_batch=32, mesh=Mesh(replicate=2)), laptop)
    assert alone.step is not None
    assert both.step is not None
    assert both.step.total == pytest.approx(alone.step.total)
    assert both.memory.communication == alone.memory.communication == 0


def test_convolutions_are_predicted_from_the_second_step_on() -> None:
    images = Recipe.from_document(
        {
            "name": "images",
            "model": {"use": "simple-cnn"},
            "data": {"use": "synthetic-images", "size": 32, "classes": 10},
            "batch": 64,
            "steps": 3,
            "optimizer": {"lr": 0.1},
        }
    )
    found = (foreseen(), gradus.predict(images, site(), PLAN))
    assert [any("second step" in sentence for sentence in one.basis) for one in found] == [False, True]


def test_a_plan_may_be_given_in_parts() -> None:
    """As in a recipe; the rest is filled in."""
    whole = gradus.predict(recipe(), site(), {"mesh": {"shard": 8}, "zero": 3, "precision": "bf16"})
    assert whole.memory.master > 0
    with pytest.raises(InputError, match="sharding over more than one rank"):
        gradus.predict(recipe(), site(), {"mesh": {"shard": 8}, "zero": 0})
