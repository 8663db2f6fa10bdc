"""The optimizer and the scheduler that an own loop brings: whether they fit, and what their learning rates mean."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gradus.schema.errors import InputError
from gradus.schema.recipe import OWN, OptimizerBlock, Recipe
from gradus.training.device import has_triton
from gradus.training.narrow_weights import is_dense
from gradus.training.optimizers import LR_FACTOR


def check_arguments(model: Any, optimizer: Any, scheduler: Any) -> None:
    """What `run.prepare` was given, each in its place."""
    steps = callable(getattr(scheduler, "step", None)) and hasattr(scheduler, "optimizer")
    wanted = (
        ("model", model, isinstance(model, nn.Module), "a torch.nn.Module"),
        ("optimizer", optimizer, optimizer is None or isinstance(optimizer, torch.optim.Optimizer), "one of torch's"),
        ("scheduler", scheduler, scheduler is None or steps, "one of torch's"),
    )
    for name, given, fits, allowed in wanted:
        if not fits:
            raise InputError(
                f"run.prepare: found {type(given).__name__} as the {name}, allowed: {allowed}",
                hint="run.prepare(model, optimizer, scheduler), in this order; data goes to run.batches(dataset)",
                field=name,
                found=type(given).__name__,
            )


def note_learning_rates(optimizer: torch.optim.Optimizer, block: OptimizerBlock) -> str | None:
    """The schedule multiplies the optimizer's own learning rates; a recipe that names one replaces the first.

    Returns what is to be said about that, if it does.
    """
    first = float(optimizer.param_groups[0]["lr"])
    for group in optimizer.param_groups:
        group[LR_FACTOR] = float(group["lr"]) / (1.0 if block.use == OWN else first or 1.0)
    if block.use == OWN or first == block.lr:
        return None
    return f"learning rate {block.lr:g} of the recipe in place of the optimizer's {first:g}"


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, recipe: Recipe) -> None:
    """An optimizer of this model's parameters, all of which exist by now."""
    own = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(p) not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise InputError(
            f"run.prepare: {foreign} parameters of the optimizer are not the model's",
            hint="make the optimizer from the parameters of the very model that is prepared",
            field="optimizer",
            found=foreign,
        )
    if recipe.optimizer.moments != "fp32":
        raise InputError(
            f"optimizer.moments: found {recipe.optimizer.moments}, and the script has an optimizer of its own",
            hint="leave the optimizer to the recipe: run.prepare(model)",
            field="optimizer.moments",
            found=recipe.optimizer.moments,
            allowed="fp32",
        )
    if recipe.lora is not None:
        raise InputError(
            "lora: its matrices are made by run.prepare, and this optimizer was made before",
            hint="leave the optimizer to the recipe: run.prepare(model)",
            field="lora",
        )


def rebind(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], model: nn.Module) -> None:
    """Let the optimizer update the parameters that the model has now, in place of those that it was made from.

    Sharding puts other tensors in their places; an optimizer that still held the old ones would train nothing.
    """
    now = dict(model.named_parameters())
    if all(now.get(name) is parameter for parameter, name in names.items()):
        return
    if optimizer.state:
        raise InputError(
            "run.prepare: the optimizer has taken steps already, and the plan divides the parameters over ranks",
            hint="prepare the model and the optimizer before the first step",
            field="optimizer",
        )
    for group in optimizer.param_groups:
        group["params"] = [now[names[parameter]] for parameter in group["params"]]
        if len({isinstance(p, DTensor) and p.device_mesh for p in group["params"]}) > 1:
            # torch's combined kernels take only parameters that are divided alike.
            group.update({key: False for key in ("foreach", "fused") if key in group})


def let_update_in_one_pass(optimizer: torch.optim.Optimizer) -> None:
    """Let torch's own AdamW, in place, write narrow weights as well, as the recipe's does. Others stay as they are."""
    if _is_plain_adamw(optimizer) and has_triton():
        from gradus.training.one_pass_adamw import OnePassAdamW  # which needs Triton

        OnePassAdamW.take_over(optimizer)


def _is_plain_adamw(optimizer: torch.optim.Optimizer) -> TypeGuard[torch.optim.AdamW]:
    """Whether all that it does is what the kernel does, to parameters in fp32."""
    replaced = vars(optimizer).get("step")  # by a scheduler, which counts steps, or by somebody else
    return (
        type(optimizer) is torch.optim.AdamW
        and (replaced is None or hasattr(replaced, "_wrapped_by_lr_sched"))
        and not any(group[key] for group in optimizer.param_groups for key in ("amsgrad", "maximize", "differentiable"))
        and not any(isinstance(n, Tensor) for group in optimizer.param_groups for n in (group["lr"], *group["betas"]))
        and all(p.dtype == torch.float32 and is_dense(p) for group in optimizer.param_groups for p in group["params"])
    )


def check_scheduler(scheduler: LRScheduler, optimizer: torch.optim.Optimizer | None, recipe: Recipe) -> None:
    """A scheduler that `run.step` can step, and that nothing else competes with."""
    if isinstance(scheduler, ReduceLROnPlateau):
        raise InputError(
            "run.prepare: a ReduceLROnPlateau is stepped with a metric, which only the script knows",
            hint="step it yourself after run.evaluate, and leave it out here; it is then not in the checkpoint",
            field="scheduler",
        )
    if scheduler.optimizer is not optimizer:
        raise InputError(
            "run.prepare: the scheduler is not of this optimizer",
            hint="run.prepare(model, optimizer, scheduler) with the optimizer that the scheduler was made for",
            field="scheduler",
        )
    if recipe.optimizer.schedules:
        raise InputError(
            "run.prepare: a scheduler was given, and the recipe has warmup or decay as well",
            hint="leave one of them out",
            field="optimizer.decay",
        )
