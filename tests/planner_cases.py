"""A planner's world made by hand: a recipe, a site, and a foresight that is a formula instead of a trace."""

from __future__ import annotations

from typing import Any

from gradus.planner.choice.candidates import Space, space_of
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.plan import Plan
from gradus.schema.prediction import MemoryPrediction, Verdict
from gradus.schema.recipe import Recipe

GIB = 2**30


def site(nodes: int = 1, gpus: int = 8, memory_gib: float = 80, **more: Any) -> Cluster:
    gpu = GpuNumbers(name="NVIDIA H100 80GB HBM3", memory_gib=memory_gib, compute_capability=[9, 0])
    return Cluster(name="site", nodes=nodes, gpus_per_node=gpus, gpu=gpu, cpu_cores=64, memory_gib=512, **more)


def recipe(batch: int = 64, *, model: dict[str, Any] | None = None, **plan: Any) -> Recipe:
    return resolved(
        Recipe.from_document(
            {
                "name": "tiny",
                "model": {"use": "gpt", "layers": 8, "heads": 8, "width": 64, "context": 64, **(model or {})},
                "data": {"use": "synthetic-tokens"},
                "batch": batch,
                "steps": 3,
                "optimizer": {"lr": 0.1},
                "plan": plan,
            }
        )
    )


def space(of: Recipe | None = None, ranks: int = 8, on: Cluster | None = None) -> Space:
    on = on or site(nodes=max(1, ranks // 8))
    return space_of(of or recipe(), on, ranks, None)


class Formula:
    """A model of so many GiB of state, and of activations for each sample, on GPUs of 80 GiB.

    Work is shared evenly. Each layer that tensor divides, each stage that is sent to and each gathering takes time.
    """

    def __init__(self, state: float, sample: float = 1.0, limit: float = 80, costs: dict[str, float] | None = None):
        self.state, self.sample, self.limit_bytes = state, sample, round(limit * GIB)
        self.costs = {"shard": 0.05, "tensor": 0.2, "pipeline": 0.3, "recompute": 0.3, "offload": 5.0} | (costs or {})
        self.asked = 0

    def memory(self, plan: Plan) -> MemoryPrediction:
        self.asked += 1
        mesh = plan.mesh
        optimizer = self.state / (mesh.tensor * mesh.pipeline * (mesh.shards if plan.zero else 1))
        kept = {"none": 1.0, "selective": 0.5, "full": 0.1}[plan.recompute]
        activations = self.sample * plan.micro_batch * kept / mesh.tensor
        return MemoryPrediction(
            optimizer=round((0 if plan.offload == "cpu" else optimizer) * GIB),
            activations=round((0 if plan.activation_offload else activations) * GIB),
        )

    def verdict(self, plan: Plan) -> Verdict:
        return "fits" if self.memory(plan).peak <= self.limit_bytes else "no"

    def host_bytes(self, plan: Plan) -> tuple[int, int]:
        return 0, 512 * GIB

    def least_bytes(self, plan: Plan) -> float:
        return float(self.memory(plan).optimizer)

    def seconds(self, plan: Plan) -> float | None:
        mesh, costs = plan.mesh, self.costs
        used = {
            "shard": mesh.shard > 1,
            "tensor": mesh.tensor > 1,
            "pipeline": mesh.pipeline > 1,
            "recompute": plan.recompute != "none",
            "offload": plan.offload != "none" or plan.activation_offload,
        }
        factor = 1.0 + sum(cost for name, cost in costs.items() if used.get(name))
        factor += costs.get(f"zero {plan.zero}", 0.0) + costs.get(f"{plan.recompute} recompute", 0.0)
        return factor * (1 + 0.01 * plan.accumulate) * 64 / mesh.world_size


class Unhurried(Formula):
    """The same where the speed of the device is not known."""

    def seconds(self, plan: Plan) -> float | None:
        return None
