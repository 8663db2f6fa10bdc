"""The time of a step by kind: what adds up, what hides behind what, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradus.parallel.stages import bubble
from gradus.planner.profile.program import Amount, ModelProfile, Operator, Part, Storage, Weights
from gradus.planner.speed.compute import Setting
from gradus.planner.speed.device import device_of
from gradus.planner.speed.network import Group, all_reduce, fabric_of
from gradus.planner.speed.part_time import part_time
from gradus.planner.speed.step_time import GRAPHS_SECONDS, StepFacts, launching_seconds, predicted_step
from gradus.planner.speed.throughput import hardware_flops, model_flops, throughput
from gradus.schema.calibration import Calibration
from gradus.schema.cluster import Cluster, Links
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import StepPrediction

TOKENS, WIDTH = 2048, 4096


def cluster(**changes: object) -> Cluster:
    facts = {
        "name": "c",
        "nodes": 16,
        "gpus_per_node": 8,
        "gpu": "H100-SXM",
        "cpu_cores": 8,
        "memory_gib": 64.0,
        "links": Links(intra="NVLink 4", inter="InfiniBand NDR", nics_per_node=8),
    }
    return Cluster(**{**facts, **changes})  # type: ignore[arg-type]


CLUSTER = cluster()
DEVICE = device_of(CLUSTER)
assert DEVICE is not None


def layer(m: float, n: int, k: int) -> Operator:
    """m tokens for each sample, and weights of n × k."""
    return Operator(
        "mm",
        "matmul",
        Amount(0, 2.0 * m * n * k),
        Amount(2.0 * n * k, 2.0 * m * k),
        Amount(0, 2.0 * m * n),
        "bfloat16",
        (Amount(1), Amount(0, m), Amount(n), Amount(k)),
        divides="tensor",
        reads=(0,),
        writes=(1,),
    )


FLOW = Amount(0, 2.0 * TOKENS * WIDTH)


def block(times: int = 1, name: str = "block") -> Part:
    """A layer that widens and one that narrows, with twice the work in backward."""
    up, down = layer(TOKENS, 4 * WIDTH, WIDTH), layer(TOKENS, WIDTH, 4 * WIDTH)
    wide = FLOW.times(4)
    forward = (replace(up, writes=(1,)), replace(down, reads=(1,), writes=(2,))) * times
    return Part(
        name,
        True,
        forward,
        tuple(replace(op, reads=(1, 2), writes=(3,)) for op in forward for _ in range(2)),
        storages=(Storage(FLOW, -1, 2), Storage(wide, 0, 3), Storage(FLOW, 1, 2), Storage(wide, 2, 4)),
        weights=(Weights(8 * WIDTH * WIDTH * times, divides="tensor", tensors=2 * times),),
        output=FLOW,
        gathered=(FLOW,),
        scattered=(FLOW,),
    )


PROFILE = ModelProfile("m", (block(),), (0,) * 16, "bf16", True, (1, 2), tokens_per_sample=TOKENS)


def step(
    plan: Plan, profile: ModelProfile = PROFILE, site: Cluster = CLUSTER, facts: StepFacts | None = None
) -> StepPrediction:
    return predicted_step(profile, plan, site, DEVICE, facts or StepFacts())


def plan(**changes: object) -> Plan:
    return Plan(**{"micro_batch": 4, "precision": "bf16", **changes})  # type: ignore[arg-type]


def test_kinds_add_up_to_the_total():
    found = step(plan(mesh=Mesh(replicate=2, pipeline=2, tensor=2), accumulate=4, recompute="full"))
    kinds = (found.compute, found.recompute, found.exposed_communication, found.bubble, found.optimizer, found.data)
    assert found.total == pytest.approx(sum(kinds))
    assert all(kind > 0 for kind in kinds[:5])


def test_compute_is_the_model_s_operations_at_the_rate_of_its_products():
    found = step(plan())
    ideal = PROFILE.flops(4) / (DEVICE.peak["bf16"] * DEVICE.speeds.matmul["bf16"])
    assert ideal < found.compute < 1.25 * ideal


def test_micro_batches_come_one_after_the_other():
    assert step(plan(accumulate=4)).compute == pytest.approx(4 * step(plan()).compute, rel=0.05)


def test_what_is_recomputed_is_counted_apart():
    none, full = step(plan()), step(plan(recompute="full"))
    assert none.recompute == 0.0
    assert full.compute == pytest.approx(none.compute)
    # Forward is a third of all, and what its last layer gave is not needed again.
    assert 0.1 * none.compute < full.recompute < 0.36 * none.compute


def test_blocks_that_are_spared_are_not_computed_twice():
    """Four of 16: a fourth of the time, and of the operations that are counted twice."""
    full, some = plan(recompute="full"), plan(recompute="full", recompute_blocks=4)
    none, all_of_them, four = step(plan()), step(full), step(some)
    assert four.recompute == pytest.approx(all_of_them.recompute / 4)
    assert four.compute == pytest.approx(none.compute)
    twice = hardware_flops(PROFILE, full) - model_flops(PROFILE, full)
    assert hardware_flops(PROFILE, some) - model_flops(PROFILE, some) == pytest.approx(twice / 4)
    assert step(plan(recompute="full", recompute_blocks=99)) == all_of_them


def test_a_tensor_group_computes_less_and_waits_for_what_it_sends():
    alone, divided = step(plan()), step(plan(mesh=Mesh(tensor=8)))
    assert divided.compute == pytest.approx(alone.compute / 8, rel=0.25)
    assert alone.exposed_communication == 0.0
    # A gather and a scatter each way, of 67 MB over NVLink, in each of 16 blocks.
    assert 16 * 4 * FLOW.at(4) / 450e9 * 7 / 8 < divided.exposed_communication < 16 * 8 * FLOW.at(4) / 450e9


def test_replicas_hide_their_gradients_behind_backward_as_far_as_it_goes():
    fast = step(plan(mesh=Mesh(replicate=16)))
    assert fast.overlapped_communication > fast.exposed_communication > 0
    slow = step(plan(mesh=Mesh(replicate=16)), site=cluster(links=Links(intra="NVLink 4", inter="Ethernet 10")))
    gradients = 4.0 * PROFILE.trained
    whole = all_reduce(gradients, Group(16, 2), fabric_of(cluster(links=Links(intra="NVLink 4", inter="Ethernet 10"))))
    assert slow.exposed_communication + slow.overlapped_communication >= 0.95 * whole
    assert slow.overlapped_communication < slow.compute


def test_software_of_2021_hides_nothing():
    old = device_of(CLUSTER, "2021")
    assert old is not None
    found = predicted_step(PROFILE, plan(mesh=Mesh(replicate=16)), CLUSTER, old, StepFacts())
    assert found.overlapped_communication == 0.0
    assert found.exposed_communication > 0


def test_zero_3_gathers_twice_what_zero_2_gathers_once():
    def sent(zero: int, accumulate: int) -> float:
        found = step(plan(mesh=Mesh(shard=8), zero=zero, accumulate=accumulate))
        return found.exposed_communication + found.overlapped_communication

    assert sent(3, 1) > 1.2 * sent(2, 1)
    # Zero 3 gathers for each micro-batch; zero 2 only scatters for each; zero 1 does both once in a step.
    assert sent(3, 8) == pytest.approx(8 * sent(3, 1), rel=0.01)
    assert sent(1, 8) == pytest.approx(sent(1, 1), rel=0.01)
    assert sent(1, 8) < sent(2, 8) < sent(3, 8)


def test_a_block_hides_the_gathering_of_the_next():
    found = step(plan(mesh=Mesh(shard=8), zero=3))
    assert found.overlapped_communication > 3 * found.exposed_communication


def test_the_bubble_of_a_balanced_pipeline_is_the_published_one():
    found = step(plan(mesh=Mesh(pipeline=4), accumulate=8))
    working = found.compute + found.recompute + found.exposed_communication
    assert found.bubble == pytest.approx(working * bubble("1f1b", 4, 8), rel=0.03)
    interleaved = step(plan(mesh=Mesh(pipeline=4), accumulate=8, pipeline_schedule="interleaved", stages_per_rank=2))
    assert interleaved.bubble == pytest.approx(found.bubble / 2, rel=0.1)


def test_the_slowest_stage_sets_the_pace():
    even, uneven = plan(mesh=Mesh(pipeline=2), accumulate=16), plan(mesh=Mesh(pipeline=2), accumulate=16)
    uneven = uneven.model_copy(update={"stage_blocks": [12, 4]})
    assert step(uneven).compute == pytest.approx(step(even).compute, rel=0.01)
    assert step(uneven).total == pytest.approx(1.5 * step(even).total, rel=0.08)


def test_an_optimizer_takes_the_bytes_of_its_state_over_the_bandwidth():
    rate = DEVICE.bytes_per_second * DEVICE.speeds.bandwidth["optimizer"]
    adamw = step(plan(), facts=StepFacts("adamw"))
    assert adamw.optimizer == pytest.approx(28.0 * PROFILE.trained / rate, rel=0.01)
    assert step(plan(), facts=StepFacts("sgd")).optimizer < adamw.optimizer
    assert step(plan(), facts=StepFacts("adamw", clip=True)).optimizer > adamw.optimizer
    sharded = step(plan(mesh=Mesh(shard=8), zero=1), facts=StepFacts("adamw"))
    assert sharded.optimizer == pytest.approx(adamw.optimizer / 8, rel=0.01)


def test_narrow_weights_are_updated_in_one_pass_where_the_optimizer_can():
    rate = DEVICE.bytes_per_second * DEVICE.speeds.bandwidth["optimizer"]

    def moved(facts: StepFacts, **changes: object) -> float:
        """Bytes for each parameter."""
        return step(plan(narrow_weights=True, **changes), facts=facts).optimizer * rate / PROFILE.trained

    one_pass = StepFacts("adamw", updates_in_one_pass=True)
    clipped = replace(one_pass, clip=True)
    assert moved(one_pass) == pytest.approx(28, rel=0.001)
    assert moved(replace(one_pass, narrow_moments=True)) == pytest.approx(20, rel=0.001)
    assert moved(replace(one_pass, narrow_moments=True), accumulate=2) > 490  # by one operator after another
    assert moved(clipped) == pytest.approx(28 + 2, rel=0.001), "the norm reads 16 bits, and scaling costs nothing"
    assert moved(replace(clipped, hooks=True)) == pytest.approx(28 + 2 + 6, rel=0.001), "hooks may have written weights"
    passes = 6 + 4 + 8 + 28 + 6
    assert moved(StepFacts("adamw", clip=True)) == pytest.approx(passes, rel=0.001), "as on a CPU"
    assert moved(clipped, accumulate=2, micro_batch=2) == pytest.approx(passes + 6 + 8, rel=0.001), "sums are wide"
    assert moved(clipped, precision="fp16") == pytest.approx(passes + 8, rel=0.001), "a step may be left out"
    wide = step(plan(), facts=clipped).optimizer * rate / PROFILE.trained
    assert wide == pytest.approx(28 + 4 + 8, rel=0.001), "without copies there is nothing to do at once"


def test_a_recorded_step_waits_for_three_launches_and_knows_the_norm_of_its_gradients():
    tiny = layer(8, 64, 64)
    small = Part("block", True, (tiny,) * 10, (tiny,) * 20, weights=(Weights(64 * 64 * 10, tensors=10),))
    profile = ModelProfile("m", (small,), (0,) * 10, "bf16", False, (1, 2))
    launched, graphed = plan(micro_batch=1), plan(micro_batch=1, cuda_graph=True)
    waiting = launching_seconds(profile, launched, CLUSTER, DEVICE, StepFacts())
    busy = step(launched, profile).total - waiting
    assert busy > GRAPHS_SECONDS
    assert step(graphed, profile).total == pytest.approx(busy, rel=0.001)
    assert launching_seconds(profile, graphed, CLUSTER, DEVICE, StepFacts()) == 0
    single = replace(profile, calls=(0,), parts=(replace(small, forward=(tiny,), backward=(tiny,)),))
    assert step(graphed, single).total == pytest.approx(GRAPHS_SECONDS)
    rate = DEVICE.bytes_per_second * DEVICE.speeds.bandwidth["optimizer"]
    assert step(plan(cuda_graph=True)).optimizer * rate / PROFILE.trained == pytest.approx(28 + 4, rel=0.001)


def test_offload_is_slow():
    on_device, on_host = (plan(mesh=Mesh(shard=8), zero=3, offload=where) for where in ("none", "cpu"))
    assert step(on_host).optimizer > 5 * step(on_device).optimizer


def test_what_is_too_small_for_the_device_takes_as_long_as_launching_it():
    tiny = layer(8, 64, 64)
    small = Part("block", True, (tiny,) * 10, (tiny,) * 20, weights=(Weights(64 * 64 * 10, tensors=10),))
    profile = ModelProfile("m", (small,), (0,) * 10, "bf16", False, (1, 2))
    found = step(plan(micro_batch=1), profile)
    assert found.total >= 300 * DEVICE.speeds.host_layer_seconds
    assert step(plan(micro_batch=16), profile).total == pytest.approx(found.total, rel=0.02)
    assert launching_seconds(profile, plan(micro_batch=1), CLUSTER, DEVICE, StepFacts()) > 0.5 * found.total
    assert launching_seconds(PROFILE, plan(), CLUSTER, DEVICE, StepFacts()) == 0


def test_a_calibrated_cluster_corrects_each_kind():
    factors = Calibration(
        device="H100", software="torch", date="2026-11-15", factors={"compute": 1.5, "optimizer": 0.5}
    )
    plain, corrected = step(plan()), step(plan(), site=cluster(calibration=factors))
    assert corrected.compute == pytest.approx(1.5 * plain.compute)
    assert corrected.optimizer == pytest.approx(0.5 * plain.optimizer)


def test_mfu_is_the_model_s_operations_over_time_devices_and_peak():
    chosen = plan(mesh=Mesh(replicate=4), accumulate=2, recompute="full")
    found = throughput(PROFILE, chosen, 2.0, DEVICE)
    samples = 4 * 2 * 4
    assert found.samples_per_second == samples / 2.0
    assert found.tokens_per_second == samples * TOKENS / 2.0
    flops = PROFILE.flops(1) * samples
    assert model_flops(PROFILE, chosen) == pytest.approx(flops)
    assert found.mfu == pytest.approx(flops / (2.0 * 4 * 989e12))
    assert hardware_flops(PROFILE, chosen) > model_flops(PROFILE, chosen)
    assert found.hfu is not None
    assert found.hfu > found.mfu


def test_without_a_peak_there_is_no_mfu():
    assert throughput(PROFILE, plan(), 1.0, None).mfu is None
    assert throughput(PROFILE, plan(precision="fp64"), 1.0, replace(DEVICE, peak={"bf16": 1e15})).mfu is None


def test_selective_recompute_costs_the_host_of_eager_software_time_for_every_operator():
    cheap = Operator("gelu", "pointwise", Amount(), Amount(0, 8.0), Amount(0, 8.0), "bfloat16", reads=(0,), writes=(1,))
    small = Part(
        "block", True, (cheap,), (replace(cheap, reads=(1,), writes=(2,)),),
        storages=(Storage(Amount(0, 8.0), -1, 1), Storage(Amount(0, 8.0), 0, 1), Storage(Amount(0, 8.0), 1, 2)),
    )  # fmt: skip
    profile = ModelProfile("m", (small,), (0,) * 100, "bf16", False, (1, 2))
    watched, not_watched = step(plan(recompute="selective"), profile), step(plan(recompute="full"), profile)
    assert watched.total - not_watched.total == pytest.approx(2 * 100 * DEVICE.speeds.host_selective_seconds, rel=0.01)


def test_ranks_that_share_a_gpu_take_turns():
    alone, sharing = (plan(mesh=Mesh(replicate=2), ranks_per_gpu=ranks) for ranks in (1, 2))
    assert step(sharing).compute == pytest.approx(2 * step(alone).compute, rel=0.05)
    assert step(sharing).exposed_communication > step(alone).exposed_communication


def test_where_the_host_reads_a_value_it_loses_its_lead():
    """A small part, large ones, small ones: with a lead, the host launches the last while the device computes."""
    large, tiny = layer(8192, 8192, 8192), layer(8, 64, 64)
    first, middle, last = (
        Part(name, True, operators, (), weights=(Weights(64),))
        for name, operators in (("first", (tiny,)), ("middle", (large,) * 4), ("last", (tiny,) * 40))
    )

    def total(*waits: int) -> float:
        parts = tuple(replace(part, waits=times) for part, times in zip((first, middle, last), waits, strict=True))
        calls = (0, *[1] * 10, *[2] * 10)
        return step(plan(micro_batch=1), ModelProfile("m", parts, calls, "bf16", False, (1, 2))).total

    computing = 10 * part_time(middle, Setting(DEVICE, 1.0)).forward
    launching = 400 * DEVICE.speeds.host_layer_seconds
    assert total(1, 0, 0) < 1.2 * max(computing, launching)
    for waits in ((0, 0, 1), (1, 0, 1)):
        assert total(*waits) > computing + launching


def test_a_compiled_part_costs_the_host_a_call_however_small_it_is():
    tiny = replace(layer(8, 64, 64), reads=(0,), writes=(1,))
    sizes = Storage(Amount(0, 8.0), -1, 1), Storage(Amount(0, 8.0), 0, 1), Storage(Amount(0, 8.0), 1, 2)
    small = Part("block", True, (tiny,), (replace(tiny, reads=(1,), writes=(2,)),), storages=sizes)
    speeds = DEVICE.speeds
    found = step(plan(compile=True), ModelProfile("m", (small,), (0,) * 50, "bf16", False, (1, 2)))
    assert found.total == pytest.approx(
        speeds.host_step_seconds + 100 * (speeds.host_graph_seconds + speeds.host_compiled_seconds), rel=0.01
    )
