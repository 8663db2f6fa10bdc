"""What the fullest rank holds, counted on paper for parts made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from counted_work import work_of
from part_cases import KIB, part, profile, storage

from gradus.planner.memory.device_memory import NO_GPU, device_memory
from gradus.planner.memory.framework import MEGATRON
from gradus.planner.memory.rank_memory import (
    COMPILED_ERROR,
    EAGER_ERROR,
    FALLBACK_ERROR,
    MemoryFacts,
    RankMemory,
    least_bytes,
    limit_bytes,
    memory_facts,
    optimizer_tensors,
    predicted_memory,
    under_a_cap,
    verdict,
)
from gradus.planner.profile.program import Amount, ModelProfile, Storage, Weights
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import MemoryPrediction
from gradus.schema.recipe import OptimizerBlock, Recipe

FACTS = MemoryFacts(device=NO_GPU)
GRADIENT = storage(4, 2, 4, "gradient", fixed=True)  # of 1024 numbers in fp32
KEPT = storage(100, 0, 2)
BLOCK = part("blocks.0", KEPT, storage(50, 1, 1), GRADIENT, elements=1024)
EMBEDDING = part("embedding", storage(10, 0, 2), storage(8, 2, 4, "gradient", fixed=True), block=False, elements=2048)
HEAD = part("head", storage(300, 0, 2, "logits"), storage(300, 2, 3, "logits"), GRADIENT, block=False, elements=1024)
MODEL = profile((EMBEDDING, 1), (BLOCK, 4), (HEAD, 1))
P = 2048 + 4 * 1024 + 1024


def rank(model: ModelProfile = MODEL, facts: MemoryFacts = FACTS, **plan: Any) -> RankMemory:
    return predicted_memory(model, Plan(**plan), facts)


def memory(model: ModelProfile = MODEL, facts: MemoryFacts = FACTS, **plan: Any) -> MemoryPrediction:
    return rank(model, facts, **plan).memory


# --- one rank


def test_at_the_loss_all_that_blocks_keep_is_there_beside_logits_and_their_gradient() -> None:
    found = rank(micro_batch=2)
    assert found.peak_at == "loss"
    assert found.memory.logits == 2 * 600 * KIB
    assert found.memory.activations == 2 * (10 + 4 * 100) * KIB
    assert found.memory.parameters == 4 * P
    assert found.memory.optimizer == 8 * P
    assert found.memory.gradients == 4 * KIB, "of the head alone: other parts have not come to theirs"


def test_kinds_add_up_to_the_peak() -> None:
    found = memory(facts=MemoryFacts(device=device_memory((9, 0))), micro_batch=2)
    assert found.peak == sum(found.model_dump().values())
    assert found.device_context > 0
    assert found.fragmentation > 0
    assert found.tensors == found.peak - found.device_context - found.fragmentation


def test_where_logits_are_small_the_peak_is_in_the_last_block() -> None:
    small = replace(HEAD, storages=(GRADIENT,))
    found = rank(profile((EMBEDDING, 1), (BLOCK, 4), (small, 1)))
    assert found.peak_at == "forward of block 3"
    assert found.memory.activations == (10 + 4 * 100 + 50) * KIB


def test_without_activations_the_peak_is_the_optimizer_step() -> None:
    bare = part("blocks.0", GRADIENT, elements=1024)
    facts = replace(FACTS, optimizer_temporaries=2)
    found = rank(profile((bare, 4)), facts)
    assert found.peak_at == "optimizer step"
    assert found.memory.gradients == 4 * 4 * 1024
    assert found.memory.communication == 2 * 4 * 4 * 1024, "what an unfused optimizer makes for a moment"


def test_gradients_pile_up_while_activations_go() -> None:
    """A block whose gradient is larger than what it keeps: the first block is the worst."""
    heavy = part("blocks.0", storage(1, 0, 2), storage(4, 2, 4, "gradient", fixed=True), elements=1024)
    found = rank(profile((heavy, 4)))
    assert found.peak_at in ("backward of block 0", "optimizer step")
    assert found.memory.gradients == 4 * 4 * KIB


def test_later_micro_batches_find_gradients_of_earlier_ones() -> None:
    assert memory(micro_batch=2, accumulate=2).gradients == 4 * P + 4 * KIB


def test_replicas_have_the_memory_of_gradients_from_the_start() -> None:
    assert memory(micro_batch=2, mesh=Mesh(replicate=2)).gradients == 4 * P + 4 * KIB
    alone = memory(micro_batch=2, mesh=Mesh(replicate=2), synchronise_every=4)
    assert alone.gradients == 4 * KIB, "of local SGD, which has no buckets"


def test_what_is_frozen_has_neither_gradients_nor_optimizer_state() -> None:
    frozen = replace(BLOCK, weights=(Weights(1024, trained=False),), storages=(KEPT,))
    found = memory(profile((EMBEDDING, 1), (frozen, 4), (HEAD, 1)), micro_batch=2, accumulate=2)
    assert found.parameters == 4 * P
    assert found.optimizer == 8 * (2048 + 1024)
    assert found.gradients == 4 * (2048 + 1024) + 4 * KIB


def test_the_gradient_of_a_tied_embedding_waits_for_the_first_part() -> None:
    heavy = replace(BLOCK, storages=(KEPT, storage(2000, 2, 2), GRADIENT))
    found = [memory(profile((EMBEDDING, 1), (heavy, 4), (HEAD, 1), tied=tied)).gradients for tied in (0, 1000)]
    assert found[1] - found[0] == 4 * 1000


def test_copies_of_autocast_count_as_parameters() -> None:
    copied = replace(BLOCK, storages=(*BLOCK.storages, storage(2, 0, 3, "copy", fixed=True)))
    model = profile((EMBEDDING, 1), (copied, 4), (HEAD, 1), precision="bf16")
    found = memory(model, precision="bf16", micro_batch=2)
    assert found.parameters == 4 * P + 4 * 2 * KIB


def test_in_one_pass_gradients_stay_as_narrow_as_backward_made_them() -> None:
    """At the end of a step without activations: 2 bytes of a parameter, where others have 4 and 2 beside them."""
    parts = [
        (_narrow(part(name, elements=1024, block=name != "head")), times) for name, times in (("b", 4), ("head", 1))
    ]
    narrow = replace(profile(*parts, narrow=True), precision="bf16")
    plan = {"precision": "bf16", "narrow_weights": True}
    one_pass = replace(FACTS, updates_in_one_pass=True)
    assert memory(narrow, one_pass, **plan).gradients == 2 * narrow.trained
    assert rank(narrow, one_pass, **plan).peak_at == "optimizer step"
    assert memory(narrow, FACTS, **plan).gradients == (4 + 2) * narrow.trained
    assert rank(narrow, FACTS, **plan).peak_at == "widening gradients"
    for other in ({"accumulate": 2}, {"precision": "fp16"}):
        assert memory(narrow, one_pass, **plan | other).gradients == (4 + 2) * narrow.trained
    assert memory(narrow, one_pass, precision="bf16").gradients == 4 * narrow.trained


def test_what_may_leave_a_step_out_updates_in_several_passes() -> None:
    def offered(**changes: Any) -> bool:
        document = {"name": "r", "batch": 1, "steps": 1, "optimizer": {"use": "adamw", "lr": 0.1}, **changes}
        return memory_facts(Recipe.from_document(document)).updates_in_one_pass

    assert offered()
    assert offered(optimizer={"use": "adamw", "lr": 0.1, "betas": [0.9, 0.95]}, on_nan="rollback")
    assert not offered(on_nan="skip")
    assert not offered(optimizer={"use": "lamb", "lr": 0.1})


def test_an_average_of_the_weights_is_one_more_copy() -> None:
    with_it = memory(facts=replace(FACTS, ema=True)).optimizer
    assert with_it - memory().optimizer == 4 * P


def test_inputs_are_there_twice_because_the_next_batch_is_copied_meanwhile() -> None:
    with_inputs = replace(MODEL, sample_bytes=1000.0)
    assert memory(with_inputs, micro_batch=4).activations - memory(micro_batch=4).activations == 2 * 4 * 1000


def test_what_is_made_of_a_batch_for_the_model_is_there_once() -> None:
    images = replace(MODEL, sample_bytes=1000.0, input_bytes=4000.0)  # bytes, and numbers
    more = memory(images, micro_batch=4).activations - memory(micro_batch=4).activations
    assert more == 4 * (2 * 1000 + 4000)
    staged = {"mesh": Mesh(pipeline=2), "accumulate": 8, "micro_batch": 4}
    assert memory(images, **staged).activations - memory(**staged).activations == 4 * (2 * 1000 + 8 * 4000)


def test_workspace_is_there_only_for_micro_batches_that_need_it() -> None:
    workspace = Storage(Amount(7168.0), 2, 2, "workspace", "whole", from_samples=3.0)
    model = replace(MODEL, parts=tuple(replace(p, storages=(*p.storages, workspace)) for p in MODEL.parts))
    assert [memory(model, micro_batch=n).activations - memory(micro_batch=n).activations for n in (2, 3)] == [0, 7168]
    # What is an estimate makes the whole less certain.
    assert rank(model, micro_batch=3).error > rank(model, micro_batch=2).error == EAGER_ERROR


# --- ranks that share a model


def sharded(zero: int, **plan: Any) -> MemoryPrediction:
    narrow = replace(
        profile((_narrow(EMBEDDING), 1), (_narrow(BLOCK), 4), (_narrow(HEAD), 1), narrow=True), precision="bf16"
    )
    return memory(narrow, mesh=Mesh(shard=4), zero=zero, precision="bf16", **plan)


def _narrow(one: Any) -> Any:
    """With gradients in 16 bit, as those of gathered parameters are."""
    storages = tuple(replace(s, bytes=s.bytes.times(0.5)) if s.role == "gradient" else s for s in one.storages)
    return replace(one, storages=storages)


def test_zero_3_gathers_what_is_outside_the_blocks_and_a_block_at_a_time() -> None:
    found = sharded(3, micro_batch=2)
    assert found.master == 4 * P // 4
    assert found.optimizer == 8 * P // 4
    assert found.parameters == 2 * (2048 + 1024), "at the loss no block is gathered any more"


def test_zero_1_and_2_have_gathered_everything_by_the_loss() -> None:
    assert sharded(1, micro_batch=2).parameters == sharded(2, micro_batch=2).parameters == 2 * P


def test_zero_1_adds_whole_gradients_up_and_zero_2_rows() -> None:
    ahead = 2 * KIB  # of the head, just computed
    assert sharded(1, micro_batch=2, accumulate=2).gradients == 4 * P + ahead
    assert sharded(2, micro_batch=2, accumulate=2).gradients == P + ahead


def test_a_block_in_backward_has_the_next_one_arriving_and_the_last_ones_gradients_leaving() -> None:
    """Activations that make block 2 or 3 the worst place, where all of it is on its way."""
    heavy = replace(BLOCK, storages=(storage(2, 0, 2), storage(900, 3, 3), storage(2, 3, 4, "gradient", fixed=True)))
    model = profile((heavy, 4), narrow=True)
    plan: dict[str, Any] = {"mesh": Mesh(shard=4), "zero": 3, "precision": "bf16"}
    found = rank(model, **plan)
    assert found.peak_at == "backward of block 2", "block 3 has nothing leaving"
    communication = found.memory.communication
    assert communication == 2 * 1024 + 4 * 1024, "parameters in 16 bit, gradients in 32"
    assert found.memory.gradients == 2 * KIB + 4 * 1024 // 4, "its own, and a quarter of those of block 3"


def test_what_is_offloaded_is_on_the_host() -> None:
    narrow = profile((_narrow(BLOCK), 4), narrow=True)
    plan: dict[str, Any] = {"mesh": Mesh(shard=4), "zero": 3, "precision": "bf16", "offload": "cpu"}
    found = rank(narrow, **plan)
    assert (found.memory.master, found.memory.optimizer) == (0, 0)
    assert found.host.offload == (4 + 4 + 8) * 4 * 1024 // 4


def test_activations_that_wait_on_the_host_are_there_once_for_each_block() -> None:
    found = rank(activation_offload=True, micro_batch=2)
    assert found.host.offload == 4 * 2 * 100 * KIB
    assert found.memory.activations == 2 * 10 * KIB, "of the embedding, which is no block"


def test_a_tensor_group_divides_its_layers_and_gathers_the_sequence_between_them() -> None:
    divided = replace(
        BLOCK,
        storages=(storage(64, 0, 2, divides="tensor"), storage(64, 0, 2), GRADIENT),
        weights=(Weights(1024, divides="tensor"),),
        gathered=(Amount(0, 16 * KIB),),
    )
    model = profile((divided, 4))
    kept = {
        "plain": memory(model).activations,
        "whole sequence": memory(model, mesh=Mesh(tensor=4), sequence_parallel=False).activations,
        "slices": memory(model, mesh=Mesh(tensor=4)).activations,
        "gathered again": memory(model, replace(FACTS, framework=MEGATRON), mesh=Mesh(tensor=4)).activations,
    }
    assert {name: size / KIB for name, size in kept.items()} == {
        "plain": 4 * 128,
        "whole sequence": 4 * (16 + 64),
        "slices": 4 * (16 + 16 + 12),
        "gathered again": 4 * (16 + 16) + 12,
    }
    assert memory(model, mesh=Mesh(tensor=4)).parameters == 4 * 4 * 1024 // 4


def test_a_context_group_divides_samples_and_nothing_else() -> None:
    found = memory(micro_batch=2, mesh=Mesh(context=2))
    assert found.activations == (10 + 4 * 100) * KIB
    assert found.parameters == 4 * P


# --- pipelines

PIPELINE: dict[str, Any] = {"mesh": Mesh(pipeline=4), "accumulate": 8, "stage_blocks": [1, 1, 1, 1]}


def test_the_first_stage_of_1f1b_holds_as_many_micro_batches_as_there_are_stages() -> None:
    small = replace(HEAD, storages=(GRADIENT,))
    model = profile((EMBEDDING, 1), (BLOCK, 4), (small, 1))
    found = rank(model, **PIPELINE)
    assert found.stage == 0
    assert found.memory.activations == (4 * (10 + 100) + 50) * KIB
    assert found.memory.parameters == 4 * (2048 + 1024)


def test_with_large_logits_the_last_stage_is_the_fullest() -> None:
    large = replace(HEAD, storages=(storage(3000, 0, 2, "logits"), GRADIENT))
    found = rank(profile((EMBEDDING, 1), (BLOCK, 4), (large, 1)), **PIPELINE)
    assert (found.stage, found.peak_at) == (3, "loss")
    assert found.memory.activations == 100 * KIB, "one micro-batch in flight"


def test_gpipe_holds_all_micro_batches() -> None:
    small = replace(HEAD, storages=(GRADIENT,))
    model = profile((EMBEDDING, 1), (BLOCK, 4), (small, 1))
    found = memory(model, **PIPELINE, pipeline_schedule="gpipe")
    assert found.activations == (8 * (10 + 100) + 50) * KIB


def test_both_ends_of_a_pipeline_have_a_tied_embedding() -> None:
    large = replace(HEAD, storages=(storage(3000, 0, 2, "logits"), GRADIENT))
    untied, tied = (profile((EMBEDDING, 1), (BLOCK, 4), (large, 1), tied=tied) for tied in (0, 2048))
    assert memory(tied, **PIPELINE).parameters - memory(untied, **PIPELINE).parameters == 4 * 2048


def test_a_stage_has_a_buffer_for_what_each_micro_batch_brings() -> None:
    small = replace(HEAD, storages=(GRADIENT,))
    found = memory(profile((EMBEDDING, 1), (BLOCK, 4), (small, 1)), **PIPELINE)
    assert found.communication == 8 * KIB, "of gradients: the first stage receives nothing else"


# --- what is said about it


@pytest.mark.parametrize(
    ("limit", "said"), [(1051, "fits"), (1050, "fits"), (1049, "tight"), (950, "tight"), (949, "no")]
)
def test_only_what_the_error_leaves_no_doubt_about_is_certain(limit: int, said: str) -> None:
    assert verdict(MemoryPrediction(activations=1000), limit, 0.05) == said


def test_without_a_limit_everything_fits() -> None:
    assert verdict(MemoryPrediction(activations=1000), None, 0.05) == "fits"


def test_ranks_that_share_a_device_share_its_memory() -> None:
    assert limit_bytes(Plan(ranks_per_gpu=2), 1000, 100) == 500
    assert limit_bytes(Plan(), None, 100) is None


GIB = 2**30


@pytest.mark.parametrize(
    ("device", "limit", "binds"), [(None, 2, True), (4 * GIB, 2, True), (3 * GIB, 2, True), (2.5 * GIB, 2.5, False)]
)
def test_a_cap_on_the_allocator_binds_where_the_device_has_room_for_the_driver_beside_it(device, limit, binds) -> None:
    capped = Plan(memory_limit_gib=2.0)
    assert limit_bytes(capped, device, GIB) == limit * GIB
    assert under_a_cap(capped, device, GIB) == binds
    assert not under_a_cap(Plan(), device, GIB)


def test_the_stated_error_is_that_of_what_the_prediction_rests_on() -> None:
    assert rank().error == EAGER_ERROR
    assert rank(compile=True).error == COMPILED_ERROR
    assert rank(replace(MODEL, traced=False)).error == FALLBACK_ERROR


@pytest.mark.parametrize(
    ("use", "options", "kept"),
    [
        ("adamw", {}, 2),
        ("adamw", {"amsgrad": True}, 3),
        ("adamw", {"moments": "bf16"}, 1),  # two of half the size
        ("sgd", {}, 0),
        ("sgd", {"momentum": 0.9}, 1),
        ("adadelta", {}, 2),
        ("lamb", {}, 2),
        ("lars", {}, 1),
        ("mine.py:Own", {}, 2),
    ],
)
def test_each_optimizer_keeps_so_many_numbers_for_each_parameter(use: str, options: dict[str, Any], kept: int) -> None:
    assert optimizer_tensors(OptimizerBlock(use=use, lr=1.0, **options))[0] == kept


def test_what_is_certainly_needed_is_never_more_than_what_is_predicted() -> None:
    for plan in (Plan(), Plan(mesh=Mesh(shard=4), zero=3), Plan(mesh=Mesh(pipeline=4), accumulate=8)):
        assert 0 < least_bytes(MODEL, plan, FACTS) <= predicted_memory(MODEL, plan, FACTS).memory.peak


def test_a_plan_is_little_work_however_many_layers_and_micro_batches_it_has() -> None:
    """A search looks at thousands. Layers that are alike are counted once, and micro-batches are not played through."""

    def lines(blocks: int, accumulate: int) -> int:
        model = profile((EMBEDDING, 1), (BLOCK, blocks), (HEAD, 1))
        plan = {"mesh": Mesh(pipeline=8, tensor=2), "accumulate": accumulate, "micro_batch": 1}
        rank(model, **plan)  # what is kept from one plan to the next is kept
        return work_of(lambda: rank(model, **plan)).lines

    assert lines(96, 8) < 3 * lines(16, 8)
    assert lines(96, 128) < 1.5 * lines(96, 8)
    assert lines(96, 128) < 30_000  # 16,126 in November 2026; a plan of 96 layers then took 10 ms


def test_a_tied_embedding_that_is_frozen_has_no_state_on_the_last_stage() -> None:
    tied = profile((EMBEDDING, 1), (BLOCK, 4), (HEAD, 1), tied=10**6)
    found = [memory(replace(tied, tied_trained=trained), mesh=Mesh(pipeline=2), accumulate=2) for trained in (10**6, 0)]
    assert found[0].optimizer - found[1].optimizer == 8 * 10**6
