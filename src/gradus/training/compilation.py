"""Compilation: each repeated block is compiled once, and so are the parts around the blocks.

A block's code is compiled for the first block and used for all that look alike, so that compile time does not grow with
depth. A model without such blocks is compiled whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
from torch import nn

from gradus.parallel.blocks import parameter_count, repeated_blocks
from gradus.training.chunked_loss import ChunkedLoss, OutputLayer, PartOfLoss
from gradus.training.graph_passes import with_graph_passes

MINIMUM_SHARE = (
    0.5  # of the parameters: with less in blocks that look alike, there is more to gain from the whole graph
)
# Such as those of an encoder and a decoder. Each shape is compiled for training, for evaluation and for a short batch,
# and after eight versions of one function the compiler gives up on it without an error.
MOST_SHAPES = 2


def compile_model(model: nn.Module) -> None:
    """Arrange, in place, for parts of the model to be compiled when they are first called."""
    parts = parts_to_compile(model)
    set_apart(model)
    for part in parts:
        compile_part(part, **with_graph_passes())


def compile_part(part: nn.Module, **how: Any) -> None:
    """As `part.compile`, unless its user has compiled it; `how` is for torch.compile."""
    if part._compiled_call_impl is None and not _is_one_kernel(part):
        part._compiled_call_impl = torch.compile(call_to_compile(part), **how)


def why_not_compiled(model: nn.Module) -> str | None:
    """Where nothing of the model is, although its plan says so."""
    parts = parts_to_compile(model)
    if any(part._compiled_call_impl is not None or not _is_one_kernel(part) for part in parts):
        return None
    kinds = " and ".join(sorted({type(part).__name__ for part in parts}))
    return f"nothing is compiled (plan.compile): {kinds} is torch's own, in a kernel of its own, and all of the model"


def _is_one_kernel(part: nn.Module) -> bool:
    return _computes_as_torchs_own(part) and not any(True for _ in part.children())


def call_to_compile(part: nn.Module) -> Callable[..., Any]:
    """What `part.compile` compiles, also for modules of torch's own, such as nn.Sequential.

    The compiler does not look into torch's own files, unless it comes from elsewhere: for such modules that method does
    nothing, without a word.
    """
    return _called_from_here(part) if _computes_as_torchs_own(part) else part._call_impl


def _computes_as_torchs_own(part: nn.Module) -> bool:
    """Whether its `forward` is that of a module of torch's own; a subclass may have it as well."""
    owner = next(kind for kind in type(part).__mro__ if "forward" in vars(kind))
    return owner is not nn.Module and owner.__module__.startswith("torch.nn.")  # nn.Module's: compiled by its user


def _called_from_here(part: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return part._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Versions of compiled code are counted by function, and there can be only so many of each.
    kind = type(part).__qualname__
    call.__code__ = _code_of.setdefault(kind, call.__code__.replace(co_name=f"call_{kind}"))
    return call


_code_of: dict[str, CodeType] = {}


def set_apart(model: nn.Module, **how: Any) -> None:
    """What must not be a part of a larger graph: it is left out, or compiled by itself. `how` is for torch.compile."""
    for module in model.modules():
        if getattr(module, "eager", False):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        if isinstance(module, PartOfLoss):
            module.compile(**with_graph_passes(dynamic=False, **how))


def parts_to_compile(model: nn.Module) -> list[nn.Module]:
    blocks = _blocks_that_share_code(model)
    if not blocks:
        return [model]
    inside = {id(module) for block in blocks for module in block.modules()}

    def around(module: nn.Module) -> list[nn.Module]:
        """The largest modules that hold no repeated block."""
        if id(module) in inside or isinstance(module, OutputLayer):  # which does nothing in training
            return []
        if not any(id(child) in inside for child in module.modules()):
            return [module] if any(True for _ in module.parameters()) else []
        return [part for child in module.children() for part in around(child)]

    return [*blocks, *around(model)]


def names_of_compiled(model: nn.Module) -> list[str]:
    """The parts that are compiled, by their names in the model; "" is all of it."""
    names = {id(module): name for name, module in model.named_modules()}
    by_themselves = [module for module in model.modules() if isinstance(module, PartOfLoss)]
    return [names[id(part)] for part in [*parts_to_compile(model), *by_themselves]]


def names_left_out(model: nn.Module) -> list[str]:
    """What is in those parts and not compiled with them, as far as it is not inside of blocks."""
    return [name for name, module in model.named_modules() if isinstance(module, ChunkedLoss)]


def _blocks_that_share_code(model: nn.Module) -> list[nn.Module]:
    """Of the repeated blocks, those of a shape that occurs more than once, if they are most of the model."""
    found = repeated_blocks(model)
    times = Counter(map(_shape, found))
    blocks = [block for block in found if times[_shape(block)] > 1]
    many_shapes = len({_shape(block) for block in blocks}) > MOST_SHAPES
    if many_shapes or parameter_count(blocks) < MINIMUM_SHARE * parameter_count([model]):
        return []
    return blocks


def _shape(module: nn.Module) -> tuple[object, ...]:
    return (type(module), *((name, tuple(p.shape)) for name, p in module.named_parameters()))
