"""Plain defaults: a plan from a recipe and a cluster, without a search. What the recipe fixes is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gradus.hardware.catalogue import find_gpu
from gradus.models import catalogue
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
    """How many ranks to start when nobody says: as the recipe's mesh needs, else the GPUs that can share the batch."""
    if "mesh" in recipe.plan.fixed:
        return recipe.plan.mesh.world_size
    shares = recipe.batch // math.prod(_fixed_split(recipe).values())
    return next((ranks for ranks in range(_all_gpus(cluster), 0, -1) if shares % ranks == 0), 1)


def default_plan(recipe: Recipe, cluster: Cluster, nproc: int | None = None) -> Choice:
    """The plan for this many ranks, or for as many as suit; what cannot be is refused with the numbers."""
    world_size = nproc or default_world_size(recipe, cluster)
    _check_ranks(cluster, world_size)
    with recipe.blamed():
        choice = _default_plan(recipe, cluster, world_size)
    if nproc is None and "mesh" not in recipe.plan.fixed and world_size < _all_gpus(cluster):
        return Choice(choice.plan, choice.reasons | {"mesh": _why_not_all_gpus(recipe, cluster, world_size)})
    return choice


def _all_gpus(cluster: Cluster) -> int:
    return cluster.nodes * cluster.gpus_per_node


def _fixed_split(recipe: Recipe) -> dict[str, int]:
    """What the recipe itself says about how a rank's share of the batch is cut up."""
    return {name: getattr(recipe.plan, name) for name in ("micro_batch", "accumulate") if name in recipe.plan.fixed}


def _why_not_all_gpus(recipe: Recipe, cluster: Cluster, ranks: int) -> str:
    gpus = _all_gpus(cluster)
    refused = {1: f"{gpus}", 2: f"{gpus - 1} or {gpus}"}.get(gpus - ranks, f"{ranks + 1} to {gpus}")
    fixed = "".join(f", {name} {value}" for name, value in _fixed_split(recipe).items())
    return f"{ranks} of {gpus} GPUs: batch {recipe.batch}{fixed} cannot be split evenly over {refused} ranks"


def _check_ranks(cluster: Cluster, world_size: int) -> None:
    gpus = _all_gpus(cluster)
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
    chosen["channels_last"] = _channels_last(recipe, gpus and precision in ("bf16", "fp16", "tf32"))
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


def _channels_last(recipe: Recipe, tensor_cores: bool) -> tuple[bool, str]:
    if not recipe.model.built_in:
        return False, "your own model may reshape what this layout makes non-contiguous; the recipe can say true"
    if catalogue.resolve(recipe.model.use, recipe.model.options)[0].sample != "image":
        return False, "the samples are no images"
    return tensor_cores, "the layout of tensor-core convolutions" if tensor_cores else "no tensor cores in use"


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
