"""How the reference models get their weights, and that they get the same ones now or later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn


class ReferenceModel(Protocol):
    def modules(self) -> Iterator[nn.Module]: ...
    def init_weights(self) -> None: ...


def materialise(model: ReferenceModel) -> None:
    """Allocate and initialise a model built on the meta device, unless the meta device is what the caller asked for.

    Models build their layers on meta first, so the layers' own constructors draw no random numbers: only
    `init_weights` does, and the weights are the same whether it runs here or later, after `to_empty`.
    """
    device = torch.get_default_device()
    if device.type == "meta":
        return
    # By hand, because to_empty fails on a model built under FakeTensorMode, which is how a planner may build it.
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device=device)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty_like(buffer, device=device))
    model.init_weights()


def reset_layers(model: nn.Module) -> None:
    """Initialise every layer as PyTorch does by default, running statistics included."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            layer.reset_parameters()


def init_transformer(model: nn.Module, residual_scale: float = 1.0) -> None:
    """GPT-2's way: matrices and tables normal(0, 0.02), biases zero, norms one.

    `residual_scale` shrinks the projections that add to the residual stream, so that its variance does not grow
    with depth.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            adds_to_residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            nn.init.normal_(parameter, std=0.02 * (residual_scale if adds_to_residual else 1.0))
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)
