"""Compilation: each repeated block is compiled once, and so are the parts around the blocks.

A block's code is compiled for the first block and used for all that look alike, so that compile time does not grow with
depth. A model without repeated blocks is compiled whole.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

MINIMUM_SHARE = 0.5  # of the parameters: with less in repeated blocks, there is more to gain from the whole graph


def compile_model(model: nn.Module) -> None:
    """Arrange, in place, for parts of the model to be compiled when they are first called."""
    parts = parts_to_compile(model)
    for part in parts:
        part.compile()


def parts_to_compile(model: nn.Module) -> list[nn.Module]:
    blocks = repeated_blocks(model)
    if not blocks:
        return [model]
    inside = {id(module) for block in blocks for module in block.modules()}

    def around(module: nn.Module) -> list[nn.Module]:
        """The largest modules that hold no repeated block."""
        if id(module) in inside:
            return []
        if not any(id(child) in inside for child in module.modules()):
            return [module] if any(True for _ in module.parameters()) else []
        return [part for child in module.children() for part in around(child)]

    return [*blocks, *around(model)]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of a list or sequence of modules that look alike and hold most of the model's parameters."""
    total = sum(p.numel() for p in model.parameters())
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        shape, count = Counter(_shape(child) for child in module).most_common(1)[0]
        blocks = [child for child in module if _shape(child) == shape]
        held = sum(p.numel() for block in blocks for p in block.parameters())
        if count >= 2 and held >= MINIMUM_SHARE * total:
            return blocks
    return []


def _shape(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *((name, tuple(p.shape)) for name, p in module.named_parameters()))
