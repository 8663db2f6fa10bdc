"""State: the model and the optimizer as named tensors and plain numbers, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradus.checkpoint.base import base_of, fingerprint_tensor
from gradus.checkpoint.weights import ADAPTER_MARK, MODEL_PREFIX
from gradus.schema.errors import InputError


def collect(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by name (`model.<parameter>`, `optimizer.<parameter>.<key>`), and what of the optimizer is no tensor.

    Of a model with adapters only what is trained, and the buffers; a fingerprint stands for the rest.
    """
    base = base_of(model)
    tensors = {f"{MODEL_PREFIX}{name}": tensor for name, tensor in _saved_tensors(model).items()}
    tensors |= fingerprint_tensor(base) if base else {}
    numbers: dict[str, Any] = {}
    for name, state in _optimizer_states(model, optimizer).items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
            elif value is None or isinstance(value, (int, float, str)):
                numbers.setdefault(name, {})[key] = value
            else:
                raise InputError(
                    f"optimizer: its state {key!r} of {name} is a {type(value).__name__}, which a checkpoint cannot "
                    "hold; allowed: tensors, numbers and text",
                    field="optimizer.use",
                )
    return tensors, {"parameters": numbers, "groups": [_group_numbers(group) for group in optimizer.param_groups]}


@torch.no_grad()
def restore_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Put saved weights and buffers back in place. Names and shapes must be those of this model."""
    expected = _saved_tensors(model)
    _check_base(model, tensors)
    saved = {name.removeprefix(MODEL_PREFIX): t for name, t in tensors.items() if name.startswith(MODEL_PREFIX)}
    if saved.keys() != expected.keys():
        missing, unexpected = sorted(expected.keys() - saved.keys()), sorted(saved.keys() - expected.keys())
        raise InputError(
            f"the checkpoint is of another model: missing {missing[:5]}, unexpected {unexpected[:5]}", field="model"
        )
    for name, tensor in expected.items():
        if tensor.shape != saved[name].shape:
            raise InputError(
                f"the checkpoint is of another model: {name} is {tuple(saved[name].shape)} there and "
                f"{tuple(tensor.shape)} here",
                field="model",
            )
    for name, tensor in expected.items():
        tensor.copy_(saved[name])


@torch.no_grad()
def restore_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    numbers: Mapping[str, Any],
    *,
    groups: bool,
) -> None:
    """Put the optimizer's state back. With `groups`, also what some optimizers keep in their parameter groups."""
    if groups:
        found, began = len(optimizer.param_groups), len(numbers["groups"])
        if found != began:
            raise InputError(
                f"optimizer: it has {found} groups of parameters, and the checkpoint is of one with {began}",
                hint="make it from the same groups as when the run began",
                field="optimizer",
                found=found,
                allowed=began,
            )
        for group, saved in zip(optimizer.param_groups, numbers["groups"], strict=True):
            group.update(saved)
    for name, parameter in _trained(model).items():
        prefix = f"optimizer.{name}."
        state: dict[str, Any] = dict(numbers["parameters"].get(name, {}))
        for key in tensors:
            if key.startswith(prefix) and "." not in key[len(prefix) :]:
                state[key[len(prefix) :]] = _placed(tensors[key], parameter, optimizer)
        if state:
            optimizer.state[parameter] = state


def _placed(tensor: Tensor, parameter: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    # Step counters live on the host, except where the kernel that updates the parameter decides on the device whether
    # to: torch's fused optimizers, and LAMB.
    on_device = getattr(optimizer, "_step_supports_amp_scaling", False)
    on_host = tensor.dim() == 0 and not on_device and parameter.dim() > 0
    if on_host:
        return tensor.clone()
    placed = torch.empty_like(parameter, dtype=tensor.dtype) if tensor.shape == parameter.shape else None
    return tensor.to(parameter.device, copy=True) if placed is None else placed.copy_(tensor)


def _group_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers of a parameter group, without its learning rate: that is the schedule's or the script's own."""
    rates = ("lr", "lr_factor")
    return {k: v for k, v in group.items() if isinstance(v, (bool, int, float, str)) and k not in rates}


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters (a shared one once) and the buffers that are meant to be saved."""
    kept = model.state_dict(keep_vars=True)
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors.update({name: buffer for name, buffer in model.named_buffers() if name in kept})
    return tensors


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    base = base_of(model)
    return {name: t for name, t in model_tensors(model).items() if base is None or name not in base.names}


def _check_base(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Adapters mean something only beside the weights that they were trained with."""
    base, saved = base_of(model), tensors.get(ADAPTER_MARK)
    if (base is None) != (saved is None):
        found, now = ("a whole model", "adapters") if saved is None else ("adapters only", "a whole model")
        raise InputError(
            f"lora: the checkpoint holds {found}, and the recipe now asks for {now}",
            hint="start a new run for that; gradus checkpoint export merges adapters into a whole model",
            field="lora",
        )
    if base is not None and saved is not None and saved.item() != base.fingerprint:
        raise InputError(
            "model.weights: the checkpoint's adapters were trained beside other weights than those that are loaded now",
            hint="bring back the file that model.weights named when the run began, and freeze the same parameters",
            field="model.weights",
        )


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _optimizer_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: optimizer.state[p] for name, p in _trained(model).items() if p in optimizer.state}
