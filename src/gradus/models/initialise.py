"""How the reference models get their weights, and that they get the same ones now or later."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

RANDOM_FILLS = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)


class BareLayers(TorchFunctionMode):
    """Layers built inside draw no random numbers: only the model's `init_weights` does.

    So no weight is drawn twice, and the weights from a seed are the same whether `init_weights` runs in the
    constructor or later, after a construction on the meta device (where it does nothing) and `to_empty`.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in RANDOM_FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


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
