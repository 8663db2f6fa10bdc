"""Host memory of a node: what waits there for its GPUs, what loads data, and what a checkpoint needs. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from gradus.planner.memory.model_state import ModelSize
from gradus.planner.zero import number_bytes
from gradus.schema.plan import Plan
from gradus.schema.prediction import HostMemoryPrediction

PREFETCHED = 4  # batches that each loader worker has ready (data/workers.py)
MOST_AUTO_WORKERS = 16  # what `workers: auto` comes to at most (data/worker_count.py)
# A process that has imported torch: 322,040 kB resident before it uses a GPU (pytorch/pytorch issue 113326). Workers
# are forked or spawned from a rank, and have as much of their own in the end.
PROCESS_BYTES = 322_040 * 1024


@dataclass(frozen=True)
class HostFacts:
    ranks_per_node: int = 1


def host_memory(
    size: ModelSize,
    plan: Plan,
    facts: HostFacts,
    *,
    kept_bytes: int = 0,
    sample_bytes: float = 0.0,
    saved_bytes: int = 0,
) -> HostMemoryPrediction:
    """Bytes on a node. `kept_bytes` is what a rank's activations take that wait for backward.

    `saved_bytes` is what a rank saves: the copy of it, from which it is written, stays for the next checkpoint.
    """
    _, wide = number_bytes(plan.precision)
    ranks = plan.mesh.shards if plan.sharded and plan.zero else 1
    rows = wide * size.parameters // ranks
    moments = round(size.optimizer_tensors * wide * size.trained) // ranks
    offloaded = kept_bytes if plan.activation_offload else 0
    if plan.offload == "cpu":
        offloaded += rows + moments + wide * size.trained // ranks
    workers = MOST_AUTO_WORKERS if plan.workers == "auto" else plan.workers
    loaded = PROCESS_BYTES + workers * (PROCESS_BYTES + round(PREFETCHED * plan.micro_batch * sample_bytes))
    ranks_here = facts.ranks_per_node
    return HostMemoryPrediction(
        offload=ranks_here * offloaded, loading=ranks_here * loaded, saving=ranks_here * saved_bytes
    )
