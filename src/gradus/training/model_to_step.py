"""From a model to a step: a model that a recipe or a script describes becomes what a live run trains.

In this order: check, lay out in memory, split, fill with values, replicate; the optimizer last, unless it is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from gradus.parallel.batch_norm import has_batch_norm
from gradus.parallel.case import refused
from gradus.parallel.local_sgd import LocalSGD, check_can_step_alone
from gradus.parallel.pipeline import StagesHere
from gradus.parallel.recompute import recompute_note
from gradus.parallel.replicate import replicated, unwrapped
from gradus.parallel.support import accumulated_statistics
from gradus.parallel.wiring import Wiring
from gradus.parallel.world import alone
from gradus.planner.one_pass import in_one_pass
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan
from gradus.training.accumulation import check_parameters_are_wide
from gradus.training.chunked_loss import FIELD
from gradus.training.described import Described
from gradus.training.float8 import choose_layers
from gradus.training.graphed_step import GraphedStep
from gradus.training.loss_placement import chunk_loss, may_chunk
from gradus.training.optimizers import build_optimizer
from gradus.training.own_optimizer import let_update_in_one_pass, rebind
from gradus.training.pipeline_step import PipelineStep, wiring_of
from gradus.training.preparation import prepared
from gradus.training.same_on_ranks import check_ranks_agree
from gradus.training.step import TrainingStep

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


def use_model(
    live: LiveRun,
    described: Described,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    fixed_buckets: bool = False,
) -> None:
    """The run has the model, its optimizer and its step after this, and what is to be said of them."""
    if described.note:
        live.recorder.event("model", message=described.note)
    model = _checked(live, described.model)
    live.flops_per_sample = _flops_per_sample(model)
    live.may_chunk_loss = live.objective is not None and may_chunk(model, live.recipe)
    names = {parameter: name for name, parameter in model.named_parameters()}
    wrapped = _split_and_filled(live, described, model, fixed_buckets=fixed_buckets)
    live.model = unwrapped(wrapped)
    live.optimizer = _optimizer(live, optimizer, names)
    if _steps_alone(live):
        live.local_sgd = LocalSGD(
            live.model, live.optimizer, live.world, live.plan.synchronise_every, live.plan.bucket_mib
        )
    live.step = _step(live, wrapped)
    live.step.own = live.watch.own


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """All, and those that are trained."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _checked(live: LiveRun, model: nn.Module) -> nn.Module:
    """The model, in the layout that the plan wants, if all ranks have the same and the plan can train it."""
    plan = live.plan
    live.parameter_counts = parameter_counts(model)
    # Before the first collective over parameters, in which ranks with other ones would wait for ever.
    check_ranks_agree(live.world, {"parameters": live.parameter_counts[0]})
    if has_batch_norm(model) and plan.accumulate > 1:
        raise accumulated_statistics("the model", plan)
    if plan.sharded and plan.accumulate > 1 and plan.accumulate_dtype == "fp32":
        check_parameters_are_wide(model)
    if plan.channels_last:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


def _split_and_filled(live: LiveRun, described: Described, model: nn.Module, *, fixed_buckets: bool) -> nn.Module:
    """The model as this rank calls it, with values in the parts that it holds."""
    recipe, plan, world = live.recipe, live.plan, live.world
    may_pad = live.some_rank_may_pad()
    if plan.loss_chunks > 1:
        plan = live.plan = _with_loss_in_parts(live, model)
    # Of the whole model, and said when the run begins: a pipeline leaves this rank a part of it.
    live.recompute_note = recompute_note(model, plan)
    live.float8_layers = choose_layers(model, plan.fp8_scaling) if plan.precision == "fp8" else None
    wiring = _wiring(live, model) if plan.mesh.pipeline > 1 else None
    wrapped = prepared(model, recipe, plan, world, live.numbers, some_rank_may_pad=may_pad, wiring=wiring)
    described.fill(wrapped, world, shards_on=torch.device("cpu") if plan.offload == "cpu" else None)
    if _steps_alone(live):
        check_can_step_alone(model, plan.synchronise_every, some_rank_may_pad=may_pad)
        return wrapped
    if world.averaging_ranks > 1 and not plan.sharded and plan.mesh.pipeline == 1:
        return replicated(
            wrapped,
            world,
            plan.bucket_mib,
            compression=plan.compression,
            some_rank_may_pad=may_pad,
            fixed_buckets=fixed_buckets,
        )
    return wrapped


def _with_loss_in_parts(live: LiveRun, model: nn.Module) -> Plan:
    """The plan as it can be done: what the planner saw of the model need not be what it does on this machine."""
    plan = live.plan
    try:
        chunk_loss(model, plan.loss_chunks, live.objective, _example(live) if live.objective is not None else None)
    except InputError as problem:
        if "loss_chunks" in live.recipe.plan.fixed or problem.details.get("field") != FIELD:
            raise
        live.warn(f"{problem.message}. Here all logits are computed at once, and take the memory that they take")
        return plan.model_copy(update={"loss_chunks": 1})
    return plan


def _optimizer(
    live: LiveRun, own: torch.optim.Optimizer | None, names: dict[nn.Parameter, str]
) -> torch.optim.Optimizer:
    """The recipe's, or the script's own with the parameters as they are now. `names`: of those that it was made for."""
    recipe, plan = live.recipe, live.plan
    narrow = plan.narrow_weights and live.world.device.type == "cuda"
    if own is None:
        return build_optimizer(live.model, recipe.optimizer, narrow_weights=narrow)
    if plan.cuda_graph:
        why = "the script has an optimizer of its own, whose numbers a recording would freeze"
        hint = "let the recipe name the optimizer, and call run.prepare(model)"
        raise refused("plan.cuda_graph", "true", why, allowed="false", hint=hint)
    rebind(own, names, live.model)
    if narrow and in_one_pass(plan, offered=recipe.on_nan != "skip"):
        let_update_in_one_pass(own)
    return own


def _step(live: LiveRun, wrapped: nn.Module) -> TrainingStep | PipelineStep:
    recipe, plan, world = live.recipe, live.plan, live.world
    if isinstance(wrapped, StagesHere):
        assert live.objective is not None
        return PipelineStep(
            wrapped,
            live.optimizer,
            live.objective,
            live.numbers,
            world,
            plan,
            clip=recipe.optimizer.clip,
            seed=recipe.seed,
            on_nan=recipe.on_nan,
        )
    step = (GraphedStep if plan.cuda_graph else TrainingStep)(
        wrapped,
        live.optimizer,
        live.objective,
        live.numbers,
        alone(world.device) if _steps_alone(live) else world,
        accumulate=plan.accumulate,
        clip=recipe.optimizer.clip,
        seed=recipe.seed,
        zero=plan.zero,
        accumulate_in_fp32=plan.accumulate_dtype == "fp32",
        local_sgd=live.local_sgd,
        on_nan=recipe.on_nan,
        narrow_weights=plan.narrow_weights,
        others_write_weights=bool(recipe.hooks) or live.objective is None,
        narrow_in_calls=live.objective is None,
    )
    if isinstance(step, GraphedStep):
        step.tell = live.warn
    live.watch.own.watch_gradients(step.model)
    return step


def _steps_alone(live: LiveRun) -> bool:
    return live.plan.synchronise_every > 1 and live.world.size > 1


def _wiring(live: LiveRun, model: nn.Module) -> Wiring:
    """Where the model may be cut into stages, seen on a batch of one sample."""
    assert live.objective is not None, "own loops have no pipeline"
    return wiring_of(model, live.recipe, live.plan, live.objective, _example(live))


def _example(live: LiveRun) -> Any:
    """A batch of one sample, for its shapes."""
    raw = live.train_data.fetch(np.zeros(1, dtype=np.int64), live.recipe.seed)
    return live.train_data.finish(raw, live.numbers.parameters)


def _flops_per_sample(model: nn.Module) -> float | None:
    count = getattr(model, "flops_per_sample", None)
    return float(count()) if callable(count) else None
