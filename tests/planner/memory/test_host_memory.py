"""Host memory of a node, counted on paper."""

from __future__ import annotations

from gradus.planner.memory.host_memory import PREFETCHED, PROCESS_BYTES, HostFacts, host_memory
from gradus.planner.memory.model_state import ModelSize
from gradus.schema.plan import Mesh, Plan

SIZE = ModelSize(parameters=1000, trained=800, optimizer_tensors=2)


def test_nothing_waits_on_the_host_unless_the_plan_says_so() -> None:
    found = host_memory(SIZE, Plan(), HostFacts(), kept_bytes=0)
    assert found.offload == 0
    assert found.loading == PROCESS_BYTES


def test_offloaded_are_a_ranks_rows_their_gradients_and_the_optimizers_state() -> None:
    plan = Plan(mesh=Mesh(shard=4), zero=3, offload="cpu", precision="bf16")
    found = host_memory(SIZE, plan, HostFacts(ranks_per_node=2))
    assert found.offload == 2 * (4 * 1000 + 4 * 800 + 8 * 800) // 4


def test_each_loader_worker_is_a_process_with_batches_ready() -> None:
    found = host_memory(SIZE, Plan(workers=3, micro_batch=8), HostFacts(ranks_per_node=4), sample_bytes=100.0)
    assert found.loading == 4 * (PROCESS_BYTES + 3 * (PROCESS_BYTES + PREFETCHED * 8 * 100))


def test_each_rank_of_a_node_has_a_copy_of_what_it_saves() -> None:
    assert host_memory(SIZE, Plan(), HostFacts(ranks_per_node=4), saved_bytes=1000).saving == 4000
