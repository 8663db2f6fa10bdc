"""A prediction puts memory, time and the whole run together, with the same names and sums everywhere."""

from __future__ import annotations

import json
from typing import Any

import pytest
from planner_cases import GIB, recipe, site

import gradus
from gradus.planner.prediction import Predictor, device_bytes, predicted
from gradus.planner.profile.request import ProfileRequest, profile_for
from gradus.schema.calibration import Calibration
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import Prediction

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
    cap = (found.memory.peak - found.memory.device_context) / GIB * (1 + found.memory_error) * 1.001
    assert foreseen(PLAN.model_copy(update={"memory_limit_gib": cap})).verdict == "fits"
    assert foreseen(cluster=site(memory_gib=cap)).verdict != "fits"


def test_what_waits_on_the_host_must_have_room_there() -> None:
    plan = Plan(precision="bf16", micro_batch=8, mesh=Mesh(shard=8), zero=3, offload="cpu")
    small = site().model_copy(update={"memory_gib": 0.01})
    assert foreseen(plan).verdict == "fits"
    assert foreseen(plan, small).verdict == "no"


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
