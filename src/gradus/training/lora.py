"""LoRA: small matrices that are trained beside some Linear layers, which themselves stay as they are.

A layer `y = W x + b` becomes `y = W x + b + (alpha / rank) B A x`, with A drawn at random and B zero, so that training
starts from the very model it is given. W and b keep their names; A and B are `<layer>.lora_a` and `<layer>.lora_b`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.models.initialise import draw
from gradus.schema.errors import InputError
from gradus.schema.patterns import matching
from gradus.schema.recipe import LoraBlock
from gradus.schema.stable_hash import stable_hash

FIELD = "lora.targets"


class LoraLinear(nn.Linear):
    """A Linear layer with its update beside it. It holds the weight and the bias of the layer that it replaces."""

    def __init__(self, layer: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)  # not Linear's own: that would draw a weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.training = layer.training
        self.scale = scale
        self.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        self.lora_b = nn.Parameter(layer.weight.new_empty(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x, self.lora_a), self.lora_b)
        return F.linear(x, self.weight, self.bias) + self.scale * update

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight of one Linear layer that does the same."""
        update = self.lora_b.double() @ self.lora_a.double()
        return (self.weight.double() + self.scale * update).to(self.weight.dtype)


def with_lora(model: nn.Module, block: LoraBlock, seed: int) -> nn.Module:
    """The model, frozen, with trainable matrices beside the Linear layers that the recipe names. Changed in place.

    It may be on the meta device; then `start_adapters` is for later.
    """
    layers = _targets(model, block.targets)
    scale = (block.rank if block.alpha is None else block.alpha) / block.rank
    model.requires_grad_(False)
    for layer in layers.values():
        adapted = LoraLinear(layer, block.rank, scale)
        if layer is model:
            model = adapted
            break
        for parent, key in _places(model, layer):
            setattr(parent, key, adapted)
    if any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        # Its shortcut for evaluation takes the weights out of its Linear layers, past what stands beside them.
        torch.backends.mha.set_fastpath_enabled(False)
    start_adapters(model, seed)
    return model


@torch.no_grad()
def start_adapters(model: nn.Module, seed: int) -> None:
    """The matrices as training begins, of each the part that this rank holds. On the meta device nothing happens yet.

    They depend on the seed and the name of the layer alone, and are drawn on the host: alike for any device.
    """
    for name, layer in adapted_layers(model).items():
        bound = math.sqrt(1 / layer.in_features)  # as torch starts a Linear layer
        host = torch.device("cpu")
        draw(layer.lora_a, f"{name}.lora_a", "uniform", bound, seed=stable_hash("lora", seed), drawn_on=host)
        nn.init.zeros_(layer.lora_b)


@torch.no_grad()
def merge_adapters(model: nn.Module) -> None:
    """Turn every adapted layer, in place, into the one Linear layer that does the same."""
    for layer in adapted_layers(model).values():
        layer.weight.copy_(layer.merged())
        del layer.lora_a, layer.lora_b
        layer.__class__ = nn.Linear  # type: ignore[assignment]


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def _targets(model: nn.Module, patterns: list[str]) -> dict[str, nn.Linear]:
    """The Linear layers that the patterns name, less those whose weight is something else as well.

    An update of a tied output projection could not be merged: its weight is the token embedding too.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    named = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    if not named:
        raise InputError("lora: the model has no Linear layer", field="lora", found=type(model).__name__)
    chosen = {name: named[name] for name in matching(named, patterns, FIELD)}
    alone = {name: layer for name, layer in chosen.items() if holders[id(layer.weight)] == 1}
    if not alone:
        raise InputError(
            f"{FIELD}: the weight of {', '.join(chosen)} is another layer's too, so that it cannot have an update of "
            "its own",
            field=FIELD,
            found=patterns,
            allowed=sorted(name for name, layer in named.items() if holders[id(layer.weight)] == 1),
        )
    return alone


def _places(model: nn.Module, layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where a module hangs: more than one place, if it is shared."""
    for parent in list(model.modules()):
        for key, child in list(parent._modules.items()):
            if child is layer:
                yield parent, key
