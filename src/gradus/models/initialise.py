"""How the reference models get their weights: the same ones now or later, whole or divided over any number of ranks.

A value depends on the seed, the name of its parameter and its place in it, and on nothing that was drawn before. Each
parameter is drawn in chunks of rows, each with a generator of its own, so that a rank that holds some rows draws the
chunks that these lie in and no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # private, as is all of FakeTensorMode
from torch.overrides import TorchFunctionMode

from gradus.parallel.part import local_part, put_rows
from gradus.schema.stable_hash import stable_hash

# Projections that add to the residual stream; those of a mixture of experts are stacked.
RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.experts.down", "mlp.shared.down.weight")
RANDOM_FILLS = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)
# Numbers in a chunk. CUDA's generator gives each thread its own numbers; so few fit on any GPU's threads at once, and
# the values do not depend on how many it has.
CHUNK = 2**17


class BareLayers(TorchFunctionMode):
    """Layers built inside draw no random numbers: only the model's `init_weights` does, so that nothing is drawn twice.

    It may run in the constructor or later, after a construction on the meta device, where it does nothing.
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


@torch.no_grad()
def draw(
    tensor: Tensor,
    name: str,
    kind: Literal["normal", "uniform"],
    scale: float,
    *,
    seed: int | None = None,
    drawn_on: torch.device | None = None,
) -> None:
    """Fill what this rank holds of a tensor with normal numbers of this deviation, or uniform ones up to `scale`.

    Without a seed it is the one that torch was given last. They are drawn in float32 on the tensor's own device:
    another kind of device draws other numbers, unless `drawn_on` names one for all.
    """
    if tensor.is_meta or isinstance(tensor, FakeTensor):  # there is nothing to fill
        return
    seed = torch.initial_seed() if seed is None else seed
    part = local_part(tensor)
    shape = tuple(tensor.shape) or (1,)
    rows_at_once = max(1, CHUNK // max(1, math.prod(shape[1:])))
    device = drawn_on or part.tensor.device
    generator = torch.Generator(device)
    for chunk in range(part.rows.start // rows_at_once, math.ceil(part.rows.stop / rows_at_once)):
        first = chunk * rows_at_once
        generator.manual_seed(stable_hash("weights", seed, name, chunk) & (2**63 - 1))
        drawn = torch.empty((min(rows_at_once, shape[0] - first), *shape[1:]), dtype=torch.float32, device=device)
        if kind == "normal":
            drawn.normal_(std=scale, generator=generator)
        else:
            drawn.uniform_(-scale, scale, generator=generator)
        put_rows(tensor, drawn, first)


def reset_layers(
    model: nn.Module, drawn_on: torch.device | None = None, *, rectified_convolutions: bool = False
) -> None:
    """Initialise every layer as PyTorch does by default, running statistics included.

    With `rectified_convolutions`, those start as He et al. propose for what goes through a ReLU, so that gradients keep
    their size on the way back.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d) and rectified_convolutions:
            assert layer.bias is None, "the batch normalisation that follows has one"
            deviation = math.sqrt(2 / (layer.out_channels * math.prod(layer.kernel_size)))
            draw(layer.weight, f"{name}.weight", "normal", deviation, drawn_on=drawn_on)
        elif isinstance(layer, nn.Conv2d | nn.Linear):
            bound = math.prod(layer.weight.shape[1:]) ** -0.5
            for key, parameter in layer.named_parameters(recurse=False):
                draw(parameter, f"{name}.{key}", "uniform", bound, drawn_on=drawn_on)
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.reset_parameters()


def init_transformer(model: nn.Module, residual_scale: float = 1.0, *, drawn_on: torch.device | None = None) -> None:
    """GPT-2's way: matrices and tables normal(0, 0.02), biases zero, norms one.

    `residual_scale` shrinks the projections that add to the residual stream, so that its variance does not grow
    with depth.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            adds_to_residual = name.endswith(RESIDUAL)
            scale = 0.02 * (residual_scale if adds_to_residual else 1.0)
            draw(parameter, name, "normal", scale, drawn_on=drawn_on)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
        else:
            nn.init.ones_(parameter)


def fill_tables(model: nn.Module) -> None:
    """Compute the buffers that follow from a model's settings, which no file of weights holds."""
    for layer in model.modules():
        fill = getattr(layer, "fill_tables", None)
        if fill is not None:
            fill()
