"""The memory that a real training step takes on a CPU, as torch's own tracker of tensors sees it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker

# It also makes the backend "fake" known.
from torch.testing._internal.distributed.fake_pg import FakeStore

from gradus.data.loader import MicroBatch
from gradus.models import catalogue
from gradus.parallel.replicate import replicated
from gradus.parallel.world import World
from gradus.schema.plan import Mesh
from gradus.schema.recipe import Recipe
from gradus.training.loss_placement import chunk_loss
from gradus.training.objective import Objective
from gradus.training.optimizers import build_optimizer
from gradus.training.pipeline_step import PipelineStep, wiring_of
from gradus.training.precision import numbers_for
from gradus.training.preparation import prepared
from gradus.training.step import TrainingStep

CPU = torch.device("cpu")


def tracked_peak(world: World, recipe: Recipe, loss_kernel: bool | None = None) -> int:
    """Bytes of tensors at the worst moment of the second step on this rank of the recipe's plan.

    Where the plan wants more ranks than there are, the others are made up: they send nothing, and get nothing. A loss
    in chunks may run as on a GPU, with something else that needs no memory in place of its kernel.
    """
    if loss_kernel:
        with patch("gradus.training.loss_kernel.loss_and_gradient", _zeros_for_logits):
            return _peak(world, recipe, loss_kernel)
    return _peak(world, recipe, loss_kernel)


def _zeros_for_logits(logits: torch.Tensor, targets: torch.Tensor, columns: int) -> torch.Tensor:
    logits.zero_()
    return torch.zeros(len(logits))


def _peak(world: World, recipe: Recipe, loss_kernel: bool | None) -> int:
    plan = recipe.plan
    size = plan.mesh.world_size
    if size == world.size:
        return _tracked(world.arranged(plan.mesh), recipe, loss_kernel)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        made_up = World(0, 0, size, CPU, mesh=Mesh(replicate=size))
        return _tracked(made_up.arranged(plan.mesh), recipe, loss_kernel)
    finally:
        dist.destroy_process_group()


def _tracked(world: World, recipe: Recipe, loss_kernel: bool | None) -> int:
    plan, clip = recipe.plan, recipe.optimizer.clip
    numbers = numbers_for(plan.precision, CPU)
    built = catalogue.build(recipe.model.use, recipe.model.options)
    objective = Objective(recipe, built)
    shape = (plan.micro_batch, recipe.model.options["context"])
    # Various ones, so that experts get about as many each.
    tokens = torch.randint(recipe.model.options["vocabulary"], shape, generator=torch.Generator().manual_seed(1))
    if plan.loss_chunks > 1:
        chunk_loss(built, plan.loss_chunks, objective, None, loss_kernel)
    staged = plan.mesh.pipeline > 1
    wiring = wiring_of(built, recipe, plan, objective, (tokens, tokens)) if staged else None
    model: Any = prepared(built, recipe, plan, world, numbers, some_rank_may_pad=False, wiring=wiring)
    if not plan.divided:
        model = replicated(model, world, plan.bucket_mib, some_rank_may_pad=False)
    optimizer = build_optimizer(model, recipe.optimizer)
    given = (model, optimizer, objective, numbers, world)
    step = (
        PipelineStep(*given, plan, clip=clip, seed=1)
        if staged
        else TrainingStep(
            *given,
            accumulate=plan.accumulate,
            clip=clip,
            seed=1,
            zero=plan.zero,
            narrow_weights=plan.narrow_weights,
        )
    )
    tracker: Any = MemTracker()

    def micro_batches() -> Any:
        while True:
            tracker.reset_mod_stats()  # it wants each module to run once
            yield MicroBatch((tokens, tokens), plan.micro_batch, 0)

    for number in range(2):  # in the second, DDP regroups its buckets
        step.run(micro_batches(), number, 1e-3, measure_norm=False)
    if staged:
        _without_modules(tracker)
        stages = model.pipeline_cut.stages
        received = [info.buffer for stage in _torchs(step._schedule) for infos in _infos(stage) for info in infos]
        tracker.track_external(*stages, optimizer, *(tensor for tensor in received if tensor is not None))
    else:
        copies = [copy.narrow for copy in step._narrow._copies.values()] if step._narrow is not None else []
        tracker.track_external(model, optimizer, *copies)
    with tracker:
        step.run(micro_batches(), 2, 1e-3, measure_norm=False)
    return int(tracker.get_tracker_snapshot("peak")[CPU]["Total"])


def _torchs(schedule: Any) -> list[Any]:
    """The stages as torch has them, of a schedule for one or for several to a rank."""
    return schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]


def _infos(stage: Any) -> list[Any]:
    return [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]


def _without_modules(tracker: Any) -> None:
    """Stages run several times before their first backward, which the tracker's statistics of modules cannot take."""
    tracker._pre_fw_hook = tracker._post_fw_hook = tracker._pre_bw_hook = tracker._post_bw_hook = lambda *_: None
