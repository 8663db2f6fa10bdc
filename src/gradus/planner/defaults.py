"""Plain defaults: a plan from a recipe and a cluster, without a search. What the recipe fixes is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradus.hardware.catalogue import find_gpu
from gradus.parallel.mesh import check_supported
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

MOST_WORKERS = 4


@dataclass(frozen=True)
class Choice:
    """A plan and, for each of its fields, the reason."""

    plan: Plan
    reasons: dict[str, str]


def default_world_size(recipe: Recipe, cluster: Cluster) -> int:
    """How many ranks to start when nobody says: as many as the recipe's mesh needs, else the GPUs, else 1."""
    if "mesh" in recipe.plan.fixed:
        return recipe.plan.mesh.world_size
    return cluster.nodes * cluster.gpus_per_node or 1


def default_plan(recipe: Recipe, cluster: Cluster, world_size: int) -> Choice:
    """The plan for this many ranks; combinations that cannot be are refused with the numbers."""
    _check_ranks(cluster, world_size)
    with recipe.blamed():
        return _default_plan(recipe, cluster, world_size)


def _check_ranks(cluster: Cluster, world_size: int) -> None:
    gpus = cluster.nodes * cluster.gpus_per_node
    if gpus and world_size > gpus:
        raise InputError(
            f"--nproc: {world_size} ranks need a GPU each, but {cluster.name} has {gpus}",
            hint='to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""',
            field="--nproc",
            found=world_size,
            allowed=gpus,
        )


def _default_plan(recipe: Recipe, cluster: Cluster, world_size: int) -> Choice:
    fixed = {name: getattr(recipe.plan, name) for name in recipe.plan.fixed}
    gpus = cluster.gpus_per_node > 0
    chosen: dict[str, tuple[Any, str]] = {}

    mesh = fixed.get("mesh") or Mesh(replicate=world_size)
    mesh.check(world_size)
    chosen["mesh"] = (mesh, f"{world_size} ranks, each with the whole model" if world_size > 1 else "one rank")
    micro_batch, accumulate, why = _split_batch(recipe.batch, mesh.data_ranks, fixed)
    chosen["micro_batch"] = (micro_batch, why)
    chosen["accumulate"] = (accumulate, why)
    chosen["precision"] = _precision(cluster)
    precision = fixed.get("precision", chosen["precision"][0])
    chosen["compile"] = (gpus, "pays on a GPU" if gpus else "compiling for the CPU takes longer than it gains")
    layout = gpus and precision in ("bf16", "fp16", "tf32")
    chosen["channels_last"] = (layout, "the layout of tensor-core convolutions" if layout else "no tensor cores in use")
    cores = max(1, cluster.cpu_cores * cluster.nodes // world_size)
    workers = min(MOST_WORKERS, cores - 1)
    chosen["workers"] = (workers, f"{cores} cores for each rank, one of them for the rank itself")
    every = recipe.checkpoint.every
    chosen["checkpoint_every"] = (every, "from the recipe") if every not in (None, "auto") else ("10m", "default")

    values = {name: value for name, (value, _) in chosen.items()} | fixed
    if values["checkpoint_every"] == "auto":
        values["checkpoint_every"] = "10m"
    plan = Plan(**values)
    check_supported(plan)
    plan.check(recipe.batch, world_size)
    reasons = {name: why for name, (_, why) in chosen.items()} | dict.fromkeys(fixed, "fixed by the recipe")
    return Choice(plan, reasons)


def _split_batch(batch: int, data_ranks: int, fixed: dict[str, Any]) -> tuple[int, int, str]:
    """micro_batch and accumulate such that their product with the data ranks is the batch, if it can be."""
    micro_batch, accumulate = fixed.get("micro_batch"), fixed.get("accumulate")
    if batch % data_ranks:
        below, above = batch - batch % data_ranks, batch + data_ranks - batch % data_ranks
        raise InputError(
            f"batch: {batch} samples cannot be split evenly over {data_ranks} ranks",
            hint=f"use batch {below or above} or {above}, or a number of ranks that divides {batch}",
            field="batch",
            found=batch,
            allowed=f"a multiple of {data_ranks}",
        )
    share = batch // data_ranks
    if micro_batch is None:
        micro_batch = max(1, share // (accumulate or 1))
    if accumulate is None:
        accumulate = max(1, share // micro_batch)
    return micro_batch, accumulate, f"batch {batch} over {data_ranks} data rank{'s' if data_ranks > 1 else ''}"


def _precision(cluster: Cluster) -> tuple[str, str]:
    if cluster.gpus_per_node == 0:
        return "fp32", "the CPU"
    capability = cluster.gpu.compute_capability if isinstance(cluster.gpu, GpuNumbers) else None
    if capability is None:
        known = find_gpu(cluster.gpu_name) if cluster.gpu_name else None
        if known is None:
            return "bf16", f"assumed: the catalogue does not know {cluster.gpu_name or 'the GPU'}"
        capability = list(known.compute_capability) if known.compute_capability else None
    if capability is not None and capability < [8, 0]:
        return "fp16", f"{cluster.gpu_name} has no bf16"
    return "bf16", f"{cluster.gpu_name} has it, and it needs no loss scaling"
