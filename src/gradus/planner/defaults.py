"""Plain defaults: a plan from a recipe and a cluster, without a search. What the recipe fixes is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gradus.hardware.catalogue import find_gpu
from gradus.models import catalogue
from gradus.parallel.case import Case
from gradus.parallel.support import check_supported
from gradus.planner.batch_split import split_batch
from gradus.planner.model_facts import facts_of
from gradus.planner.profile.request import capability_of
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import Prediction
from gradus.schema.recipe import OWN, Recipe

MOST_WORKERS = 4
NARROW_CHOSEN = ("bf16", "fp8")  # precisions that get narrow weights unasked; those of fp16 have a smaller range

Chosen = tuple[Any, str]  # a value, and why


@dataclass(frozen=True)
class Choice:
    """A plan, for each of its fields the reason, and what is predicted of it, if its model could be looked into."""

    plan: Plan
    reasons: dict[str, str]
    prediction: Prediction | None = None


def default_world_size(recipe: Recipe, cluster: Cluster) -> int:
    """How many ranks to start when nobody says: as the recipe's mesh needs, else the GPUs that can share the batch."""
    if "mesh" in recipe.plan.fixed:
        return recipe.plan.mesh.world_size
    shares = recipe.batch // math.prod(_fixed_split(recipe).values())
    return next((ranks for ranks in range(room_for(recipe, cluster), 0, -1) if shares % ranks == 0), 1)


def default_plan(recipe: Recipe, cluster: Cluster, nproc: int | None = None, *, own_loop: bool = False) -> Choice:
    """The plan for this many ranks, or for as many as suit; what cannot be is refused with the numbers."""
    world_size = nproc or default_world_size(recipe, cluster)
    with recipe.blamed():
        check_ranks(recipe, cluster, world_size, nproc)
        choice = _default_plan(recipe, cluster, world_size, own_loop)
    room = room_for(recipe, cluster)
    if nproc is None and "mesh" not in recipe.plan.fixed and world_size < room:
        return Choice(choice.plan, choice.reasons | {"mesh": why_not_all(recipe, room, world_size)})
    return choice


def ranks_on_a_node(cluster: Cluster, plan: Plan) -> int:
    """How many ranks a node takes. Without GPUs they are spread evenly."""
    if cluster.gpus_per_node:
        return cluster.gpus_per_node * plan.ranks_per_gpu
    return -(-plan.mesh.world_size // cluster.nodes)


def room_for(recipe: Recipe, cluster: Cluster) -> int:
    """How many ranks the GPUs take; 0 where there are none, and the CPU takes any number."""
    return cluster.nodes * cluster.gpus_per_node * recipe.plan.ranks_per_gpu


def _fixed_split(recipe: Recipe) -> dict[str, int]:
    """What the recipe itself says about how a rank's share of the batch is cut up."""
    return {name: getattr(recipe.plan, name) for name in ("micro_batch", "accumulate") if name in recipe.plan.fixed}


def why_not_all(recipe: Recipe, room: int, ranks: int) -> str:
    refused = {1: f"{room}", 2: f"{room - 1} or {room}"}.get(room - ranks, f"{ranks + 1} to {room}")
    fixed = "".join(f", {name} {value}" for name, value in _fixed_split(recipe).items())
    places = "GPUs" if recipe.plan.ranks_per_gpu == 1 else f"places on GPUs ({recipe.plan.ranks_per_gpu} on each)"
    return f"{ranks} of {room} {places}: batch {recipe.batch}{fixed} cannot be split evenly over {refused} ranks"


def check_ranks(recipe: Recipe, cluster: Cluster, world_size: int, nproc: int | None) -> None:
    """Refuse more ranks than the GPUs take."""
    room = room_for(recipe, cluster)
    if room and world_size > room:
        field = "--nproc" if nproc else "plan.mesh"
        gpus, shared = cluster.nodes * cluster.gpus_per_node, recipe.plan.ranks_per_gpu
        has = f"{gpus}" if shared == 1 else f"{gpus}, which take {room} with plan.ranks_per_gpu {shared}"
        hint = 'to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""'
        if cluster.scheduler.kind == "slurm":  # whose nodes do not see what is set here
            hint = f"use --nproc {cluster.gpus_per_node * shared}, or more --nodes"
        if nproc is None:
            hint = f"for {room} ranks: plan.mesh={' or '.join(m.flow() for m in recipe.plan.mesh.nearest(room))}"
        raise InputError(
            f"{field}: {world_size} ranks need {'a GPU each' if shared == 1 else 'GPUs'}, but {cluster.name} has {has}",
            hint=f"{hint}; ranks may share a GPU: plan.ranks_per_gpu={-(-world_size // gpus)}",
            field=field,
            found=world_size,
            allowed=room,
        )


def _default_plan(recipe: Recipe, cluster: Cluster, world_size: int, own_loop: bool) -> Choice:
    fixed = {name: getattr(recipe.plan, name) for name in recipe.plan.fixed}
    mesh, why = (fixed["mesh"], "") if "mesh" in fixed else _mesh(world_size, fixed.get("zero", 0))
    mesh.check(world_size)
    chosen: dict[str, Chosen] = {"mesh": (mesh, why)}
    chosen["zero"] = _zero(mesh)
    schedule = fixed.get("pipeline_schedule", "1f1b")
    if mesh.pipeline > 1:
        chosen["pipeline_schedule"] = ("1f1b", "idles no longer than gpipe, and keeps fewer activations")
        chosen["stages_per_rank"] = _stages_per_rank(schedule)
    stages: int = fixed.get("stages_per_rank") or chosen.get("stages_per_rank", (1, ""))[0]
    chosen["micro_batch"], chosen["accumulate"] = split_batch(recipe.batch, mesh, schedule, stages, fixed)
    split = {name: value for name, (value, _) in chosen.items()} | fixed
    chosen |= surroundings(recipe, cluster, Plan(**split))

    plan = Plan(**({name: value for name, (value, _) in chosen.items()} | fixed))
    plan.check(recipe.batch, world_size)
    check_supported(case_of(recipe, cluster, plan, own_loop))
    return Choice(plan, reasons_of(chosen, recipe))


def reasons_of(chosen: dict[str, Chosen], recipe: Recipe) -> dict[str, str]:
    return {name: why for name, (_, why) in chosen.items()} | dict.fromkeys(recipe.plan.fixed, "fixed by the recipe")


def case_of(recipe: Recipe, cluster: Cluster, plan: Plan, own_loop: bool = False) -> Case:
    gpus = cluster.gpus_per_node > 0
    return Case(recipe, plan, facts_of(recipe), gpus, cluster.gpu_name, capability_of(cluster), own_loop)


def surroundings(
    recipe: Recipe, cluster: Cluster, split: Plan, *, takes_narrow: bool = False, narrow_failure: str = ""
) -> dict[str, Chosen]:
    """What does not cut up the work but follows from how it is cut, from the model and from the machine.

    `takes_narrow`: the model was traced with weights in 16 bits. Reference models are known to take them.
    `narrow_failure`: how it failed with them, and only with them.
    """
    fixed, mesh, gpus = recipe.plan.fixed, split.mesh, cluster.gpus_per_node > 0
    pipeline = mesh.pipeline > 1
    chosen: dict[str, Chosen] = {"precision": _precision(cluster, capability_of(cluster), pipeline)}
    precision = recipe.plan.precision if "precision" in fixed else chosen["precision"][0]
    chosen["narrow_weights"] = _narrow_weights(recipe, split, precision, gpus, takes_narrow, narrow_failure)
    chosen["compile"] = _compile(gpus, pipeline and split.pipeline_schedule == "zero-bubble")
    tensor_cores = gpus and precision in ("bf16", "fp16", "tf32")
    chosen["channels_last"] = _channels_last(recipe, tensor_cores, split.sharded)
    on_a_node = ranks_on_a_node(cluster, Plan(mesh=mesh, ranks_per_gpu=recipe.plan.ranks_per_gpu))
    cores = max(1, cluster.cpu_cores // min(on_a_node, mesh.world_size))
    workers = min(MOST_WORKERS, cores - 1)
    chosen["workers"] = (
        workers,
        f"{count_text(cores, 'core')} for each rank, one of them for the rank itself",
    )
    every = recipe.checkpoint.every
    chosen["checkpoint_every"] = ("10m", "default") if every is None else (every, "from the recipe")
    if every == "auto":
        chosen["checkpoint_every"] = ("auto", "the run decides, from the stall that it measures")
    return chosen


def _mesh(world_size: int, zero: int) -> Chosen:
    if world_size == 1:
        return Mesh(), "one rank"
    if zero:
        return Mesh(shard=world_size), f"{world_size} ranks, among which zero {zero} divides the model's state"
    return Mesh(replicate=world_size), f"{world_size} ranks, each with the whole model"


def _zero(mesh: Mesh) -> Chosen:
    if mesh.shard == 1:
        return 0, "nothing is sharded: mesh.shard is 1"
    if mesh.pipeline > 1:
        return 1, "a pipeline reduces gradients once, at its end, so 2 saves no more, and 3 would gather more often"
    return 3, "the least memory; where the model fits, 1 and 2 gather parameters less often"


def _stages_per_rank(schedule: str) -> Chosen:
    if schedule == "interleaved":
        return 2, "with two stages on each rank, interleaved idles half as long as 1f1b"
    return 1, f"{schedule} needs no more"


def _narrow_weights(
    recipe: Recipe, split: Plan, precision: str, gpus: bool, takes_narrow: bool, narrow_failure: str
) -> Chosen:
    if not gpus:
        return False, "they pay where weights are read from a GPU's memory"
    if split.sharded:
        return False, "sharded parameters are gathered in 16 bits anyway"
    if split.mesh.world_size > 1:
        return False, "for one rank: gradients of replicas are reduced as those of the parameters"
    if precision not in NARROW_CHOSEN:
        return False, f"weights of precision {precision} stay as they are; {' or '.join(NARROW_CHOSEN)} would have them"
    if recipe.model.use == OWN:
        # Nobody has traced that model: training/narrow_calls.py tries.
        return True, "weights are rounded once a step, for your model's calls; if it takes none such, the run says so"
    if narrow_failure:
        return False, f"with weights in 16 bits {narrow_failure}"
    if not takes_narrow and facts_of(recipe).kind != "reference":
        return False, "the model was not traced with them, and may not take them; the recipe can say true"
    return True, "weights are rounded once a step, and layers add up in 16 bits"


def _compile(gpus: bool, zero_bubble: bool) -> Chosen:
    if not gpus:
        return False, "compiling for the CPU takes longer than it gains"
    if zero_bubble:
        return False, "zero-bubble takes backward apart, which torch cannot do with compiled stages"
    return True, "pays on a GPU"


def _channels_last(recipe: Recipe, tensor_cores: bool, sharded: bool) -> Chosen:
    if not recipe.model.built_in:
        return False, "your own model may reshape what this layout makes non-contiguous; the recipe can say true"
    if catalogue.resolve(recipe.model.use, recipe.model.options)[0].sample != "image":
        return False, "the samples are no images"
    if sharded:
        return False, "FSDP2 divides only weights that lie in memory row by row"
    return tensor_cores, "the layout of tensor-core convolutions" if tensor_cores else "no tensor cores in use"


def _precision(cluster: Cluster, capability: tuple[int, int] | None, in_stages: bool) -> Chosen:
    if cluster.gpus_per_node == 0:
        return "fp32", "the CPU"
    if capability is None and not (cluster.gpu_name and find_gpu(cluster.gpu_name)):
        return "bf16", f"assumed: the catalogue does not know {cluster.gpu_name or 'the GPU'}"
    if capability is not None and capability < (8, 0):
        if in_stages:
            return "fp32", f"{cluster.gpu_name} has no bf16, and a pipeline cannot scale the loss as fp16 needs it"
        return "fp16", f"{cluster.gpu_name} has no bf16"
    return "bf16", f"{cluster.gpu_name} has it, and it needs no loss scaling"
