"""Ghosts: blocks that are like one that was already traced, and are not run again.

A model with a hundred equal blocks runs two of them. Every further one takes its place in forward and in backward as a
ghost: it hands on tensors of the right shape, and is counted as a call like the first. Blocks are alike if their
modules, parameters, settings and inputs are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gradus.planner.profile.recording import Call, Recorder

REAL = 2  # so many of a kind run: what becomes of the first one's output is seen where the second one uses it
AROUND = "around the blocks"
_POSITIONS = ("idx", "index", "number", "layer_id", "name")  # where a block stands, not what it does


@dataclass(frozen=True)
class _Shape:
    """Of a tensor that a block returns."""

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    flows: bool  # whether gradients flow back from it


@dataclass
class _Kind:
    """Blocks that are alike: the calls of those that ran, and what they return."""

    calls: list[int]
    results: list[Any] | None = None  # shapes of tensors, and anything else as it is
    spec: TreeSpec | None = None


@dataclass(frozen=True)
class Block:
    """A repeated block, by its name in the model."""

    name: str
    module: nn.Module
    made_of: Any  # what makes it like others, before any of them ran: what one keeps from its first call, others lack

    @classmethod
    def of(cls, name: str, module: nn.Module) -> Block:
        return cls(name, module, _made_of(module))


@contextmanager
def watched(blocks: Iterable[Block], recorder: Recorder, *, ghosts: bool = True) -> Iterator[None]:
    """Inside, each call of a block is a call of its own in the record, and those that are like others are ghosts."""
    kinds: dict[Any, _Kind] = {}
    replaced: list[tuple[nn.Module, Any]] = []
    recorder.enter(Call(AROUND, False))
    for block in blocks:
        replaced.append((block.module, vars(block.module).get("forward")))
        _watch(block, recorder, kinds, ghosts)
    try:
        yield
    finally:
        for module, forward in replaced:
            if forward is None:
                del module.forward
            else:
                module.forward = forward


def _watch(block: Block, recorder: Recorder, kinds: dict[Any, _Kind], ghosts: bool) -> None:
    name, module = block.name, block.module
    forward = module.forward

    def watched_forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        kind = kinds.setdefault((block.made_of, tuple(map(_looks, leaves)), spec, torch.is_grad_enabled()), _Kind([]))
        if ghosts and len(kind.calls) >= REAL and kind.results is not None:
            call = Call(name, True, like=kind.calls[0], module=module)
            recorder.hand_to_ghost(leaves)
            output = _ghost(recorder, call, leaves, kind)
            recorder.returned(call, tree_flatten(output)[0])
        else:
            call = Call(name, True, module=module)
            kind.calls.append(recorder.enter(call))
            output = forward(*args, **kwargs)
            results, result_spec = tree_flatten(output)
            recorder.returned(call, results)
            call.output = sum(t.numel() * t.element_size() for t in results if isinstance(t, Tensor))
            if not _share_memory(leaves, results):
                kind.results, kind.spec = [_shape(result) for result in results], result_spec
        recorder.enter(Call(AROUND, False))
        return output

    module.forward = watched_forward


def _ghost(recorder: Recorder, call: Call, leaves: list[Any], kind: _Kind) -> Any:
    assert kind.results is not None
    assert kind.spec is not None
    assert call.module is not None
    recorder.enter(call)
    anchor = next((p for p in call.module.parameters() if p.requires_grad), None)  # gradients flow back in any case
    shapes = [result for result in kind.results if isinstance(result, _Shape)]
    tensors = iter(_Ghost.apply(recorder, shapes, anchor, *(leaf for leaf in leaves if isinstance(leaf, Tensor))))  # type: ignore[no-untyped-call]
    return tree_unflatten([next(tensors) if isinstance(r, _Shape) else r for r in kind.results], kind.spec)


class _Ghost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorder: Recorder, shapes: list[_Shape], anchor: Tensor | None, *inputs: Tensor) -> Any:
        ctx.recorder = recorder
        ctx.inputs = [(tuple(t.shape), t.dtype) for t in inputs]
        with recorder.paused():
            made = [torch.empty_strided(shape.size, shape.strides, dtype=shape.dtype) for shape in shapes]
        ctx.mark_non_differentiable(*(t for t, shape in zip(made, shapes, strict=True) if not shape.flows))
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with ctx.recorder.paused():
            back = [
                torch.empty(size, dtype=dtype) if needed else None
                for needed, (size, dtype) in zip(ctx.needs_input_grad[3:], ctx.inputs, strict=True)
            ]
        return (None, None, None, *back)


def _made_of(block: nn.Module) -> Any:
    """What makes two blocks alike: classes, parameters and settings, but not their place in the model."""
    found = []
    for name, module in block.named_modules():
        settings = tuple(
            sorted(
                (key, repr(_setting(value)))
                for key, value in vars(module).items()
                if not key.startswith("_") and not key.endswith(_POSITIONS)
            )
        )
        tensors = tuple(
            (key, tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            for key, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        )
        found.append((name, type(module), settings, tensors))
    return tuple(found)


def _setting(value: Any) -> Any:
    """A setting as far as it decides what runs. What cannot be compared is left out: configurations, other modules."""
    if isinstance(value, float):  # a rate of 0.1 or 0.2 makes no difference; one of 0 does
        return value != 0
    if isinstance(value, (int, str, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return [_setting(item) for item in value]
    if isinstance(value, dict):
        return sorted((str(key), repr(_setting(item))) for key, item in value.items())
    return getattr(value, "__qualname__", None) or type(value).__qualname__  # a function, by its name


def _looks(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.requires_grad
    return repr(leaf) if isinstance(leaf, (int, float, str, type(None))) else type(leaf)


def _shape(result: Any) -> Any:
    if not isinstance(result, Tensor):
        return result
    return _Shape(tuple(result.shape), tuple(result.stride()), result.dtype, result.requires_grad)


def _share_memory(inputs: list[Any], outputs: list[Any]) -> bool:
    given = {t.untyped_storage()._cdata for t in inputs if isinstance(t, Tensor)}
    return any(t.untyped_storage()._cdata in given for t in outputs if isinstance(t, Tensor))
