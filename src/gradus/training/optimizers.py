"""Optimizers by name: torch's own where it has them (fused), LAMB and LARS for large batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from gradus.parallel.pipeline import StagesHere
from gradus.schema.callables import import_callable, is_import_path
from gradus.schema.errors import InputError
from gradus.schema.patterns import matching
from gradus.schema.recipe import OptimizerBlock
from gradus.training.device import has_triton
from gradus.training.layerwise import Lamb, Lars
from gradus.training.narrow_moments import NarrowMomentsAdamW

LR_FACTOR = "lr_factor"  # in a parameter group: what the schedule's learning rate is multiplied with


def build_optimizer(model: nn.Module, block: OptimizerBlock, *, narrow_weights: bool = False) -> torch.optim.Optimizer:
    """The recipe's optimizer over the parameters that are trained. The learning rate is set at every step.

    `narrow_weights`: the model has copies of them in 16 bits, on a GPU, which some optimizers write as well.
    """
    groups = parameter_groups(model, block)
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in block.options.items()}
    try:
        if narrow_weights and block.use == "adamw" and has_triton():
            from gradus.training.one_pass_adamw import OnePassAdamW, OnePassNarrowMoments  # which need Triton

            return (OnePassNarrowMoments if block.moments == "bf16" else OnePassAdamW)(groups, lr=block.lr, **options)
        return _built(groups, block, options)
    except (TypeError, ValueError, IndexError) as error:
        raise InputError(f"optimizer: {block.use} refused its settings: {error}", field="optimizer") from error


def parameter_groups(model: nn.Module, block: OptimizerBlock) -> list[dict[str, Any]]:
    """The groups that the recipe names, then the rest: weights with weight decay; norms, biases and other vectors
    without, unless the recipe says otherwise."""
    rest = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # A stage of a pipeline has some of them only, and maybe none that a pattern names, or that is trained.
    trained = dict.fromkeys(model.pipeline_cut.trained if isinstance(model, StagesHere) else rest)
    if not trained:
        raise InputError("model: it has no parameters that require gradients", field="model")
    groups: list[dict[str, Any]] = []
    for number, wanted in enumerate(block.groups):
        matched = matching(trained, wanted.match, f"optimizer.groups.{number}.match")
        decay = block.weight_decay if wanted.weight_decay is None else wanted.weight_decay
        always = block.decay_norms_and_biases or wanted.weight_decay is not None
        for name in matched:
            del trained[name]
        members = [rest.pop(name) for name in matched if name in rest]
        groups += [{**group, LR_FACTOR: wanted.lr_factor} for group in _by_decay(members, decay, always)]
    groups += _by_decay(list(rest.values()), block.weight_decay, block.decay_norms_and_biases)
    return groups or [{"params": []}]


def _by_decay(parameters: list[nn.Parameter], weight_decay: float, always: bool) -> list[dict[str, Any]]:
    if always:
        groups = [{"params": parameters, "weight_decay": weight_decay}]
    else:
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
    return [
        {**group, "params": alike}
        for group in groups
        for alike in _by_mesh(group["params"])  # type: ignore[arg-type]
    ]


def _by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters that are divided over the same ranks together: torch's fused kernels take only such."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def _built(groups: list[dict[str, Any]], block: OptimizerBlock, options: dict[str, Any]) -> torch.optim.Optimizer:
    if is_import_path(block.use):
        built = import_callable(block.use, "optimizer.use")(groups, lr=block.lr, **options)
        if not isinstance(built, torch.optim.Optimizer):
            raise InputError(
                f"optimizer.use: {block.use} returned {type(built).__name__}, allowed: a torch.optim.Optimizer",
                field="optimizer.use",
            )
        return built
    if block.moments == "bf16":
        return NarrowMomentsAdamW(groups, lr=block.lr, **options)
    if block.use == "adamw":
        return torch.optim.AdamW(groups, lr=block.lr, fused=True, **options)
    if block.use == "sgd":
        return _sgd(groups, block.lr, options)
    if block.use == "adadelta":
        return torch.optim.Adadelta(groups, lr=block.lr, **options)
    if block.use == "lamb":
        return Lamb(groups, lr=block.lr, **options)
    assert block.use == "lars", block.use
    return Lars(groups, lr=block.lr, **options)


def _sgd(groups: list[dict[str, Any]], lr: float, options: dict[str, Any]) -> torch.optim.SGD:
    """SGD whose momentum is zero before the first step.

    torch's fused kernel leaves new momentum uninitialised when loss scaling skips the first step, and later steps take
    it for real. From zero the first step is the same, except with dampening, which torch leaves out of the first step:
    that is for the unfused kernels, which the host lets skip.
    """
    # DTensor has no rule for the fused kernel.
    divided = any(isinstance(parameter, DTensor) for group in groups for parameter in group["params"])
    optimizer = torch.optim.SGD(groups, lr=lr, fused=not options.get("dampening") and not divided, **options)
    if options.get("momentum") and not options.get("dampening"):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer
