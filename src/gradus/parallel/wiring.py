"""Wiring: how a batch flows through a model that is a list of blocks between a head and a tail, seen and not believed.

A model's forward is run once on the meta device, which computes nothing. What each part is given is compared with what
the part before it returned: only where it is the very same tensor can a pipeline do the same by sending it on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from gradus.schema.errors import InputError, unknown_name
from gradus.schema.recipe import PipelineParts

REFERENCE_PARTS = PipelineParts(head="embedding", blocks="blocks", tail="head")
FIELD = "pipeline_parts"
ModelCall = Callable[[Callable[..., Any], Any], Any]  # of a model and a batch
CONSTANTS = (type(None), bool, int, float, str)


@dataclass(frozen=True)
class Source:
    """Where an argument of a part comes from: the part before it, the batch (by key or position), or it is fixed."""

    kind: Literal["flow", "batch", "constant"]
    value: Any = None

    def find(self, flow: Tensor | None, batch: Any) -> Any:
        if self.kind == "flow":
            return flow
        return batch[self.value] if self.kind == "batch" else self.value


@dataclass(frozen=True)
class Call:
    """How a model's forward calls one of its parts."""

    positional: tuple[Source, ...]
    named: Mapping[str, Source]

    def made(self, part: nn.Module, flow: Tensor | None, batch: Any) -> Any:
        named = {key: source.find(flow, batch) for key, source in self.named.items()}
        return part(*(source.find(flow, batch) for source in self.positional), **named)


@dataclass(frozen=True)
class Wiring:
    """The parts of a model in the order of the flow, how each is called, and what it costs to compute."""

    parts: PipelineParts
    calls: tuple[Call, ...]  # of the head, of each block, of the tail
    costs: tuple[float, ...]  # of the same: FLOPs of a forward pass, or else parameters

    @property
    def blocks(self) -> int:
        return len(self.calls) - 2

    @property
    def paths(self) -> list[str]:
        return part_paths(self.parts, self.blocks)


def part_paths(parts: PipelineParts, blocks: int) -> list[str]:
    """Names of the head, the blocks and the tail in the model."""
    return [parts.head, *(f"{parts.blocks}.{number}" for number in range(blocks)), parts.tail]


@dataclass
class _Seen:
    """What was seen of one part while the model ran."""

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)  # of the tensors it was given, when it was
    output: Any = None
    version: int | None = None  # of the output, when it was returned
    flops: float = 0.0


def traced(model: nn.Module, parts: PipelineParts, call: ModelCall, batch: Any) -> Wiring:
    """The wiring of a model; InputError says which edge is broken.

    `call(model, batch)` calls the model as training does; `batch` is an example, of which only the shapes matter.
    """
    modules = _parts_of(model, parts)
    paths = part_paths(parts, len(modules) - 2)
    example = _on_meta(batch)
    seen = [_Seen() for _ in modules]
    result = _run(model, modules, seen, call, example)
    origins = {id(value): key for key, value in _entries(example)}
    calls = [_call_of(index, paths, seen, origins) for index in range(len(modules))]
    if result is not seen[-1].output:
        raise _broken(f"the model's result is not what {paths[-1]} returned", "let forward return the tail's output")
    flops = [part.flops for part in seen]
    counted = sum(flops[1:-1]) > 0
    costs = flops if counted else [float(_multiplied_parameters(module)) for module in modules]
    return Wiring(parts, tuple(calls), tuple(costs))


def _multiplied_parameters(module: nn.Module) -> int:
    """An embedding looks rows up, which is nearly free."""
    layers = [layer for layer in module.modules() if not isinstance(layer, nn.Embedding)]
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False))


def _parts_of(model: nn.Module, parts: PipelineParts) -> list[nn.Module]:
    found = {}
    for name in ("head", "blocks", "tail"):
        path = getattr(parts, name)
        try:
            found[name] = model.get_submodule(path)
        except AttributeError:
            names = [known for known, _ in model.named_modules() if known]
            raise unknown_name("part of the model:", path, names, field=f"{FIELD}.{name}") from None
    blocks = found["blocks"]
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)) or not len(blocks):
        raise InputError(
            f"{FIELD}.blocks: {parts.blocks} is a {type(blocks).__name__}, allowed: a ModuleList or Sequential that is "
            "not empty",
            field=f"{FIELD}.blocks",
            found=type(blocks).__name__,
        )
    return [found["head"], *blocks, found["tail"]]


def _run(
    model: nn.Module,
    modules: list[nn.Module],
    seen: list[_Seen],
    call: ModelCall,
    example: Any,
) -> Any:
    """Run the model on the meta device, with its parts watched."""
    counter = FlopCounterMode(display=False)

    def before(index: int, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        part = seen[index]
        part.calls.append((args, named))
        part.versions = [_version(value) for value in (*args, *named.values())]
        part.flops -= counter.get_total_flops()

    def after(index: int, output: Any) -> None:
        part = seen[index]
        part.output, part.version = output, _version(output)
        part.flops += counter.get_total_flops()

    hooks = []
    for index, module in enumerate(modules):
        hooks.append(
            module.register_forward_pre_hook(
                lambda _, args, named, index=index: before(index, args, named), with_kwargs=True
            )
        )
        hooks.append(module.register_forward_hook(lambda _, args, output, index=index: after(index, output)))
    tensors = {name: tensor.to("meta") for name, tensor in [*model.named_parameters(), *model.named_buffers()]}

    def on_meta(*args: Any, **named: Any) -> Any:
        return functional_call(model, tensors, args, named)

    try:
        with torch.no_grad(), counter:
            return call(on_meta, example)
    except Exception as error:
        raise InputError(
            f"{FIELD}: the model cannot be run without data, to see how its parts follow each other: "
            f"{type(error).__name__}: {error}",
            hint="forward must run on the meta device: no .item(), no branch on values, no tensor outside parameters "
            "and buffers",
            field=FIELD,
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def _call_of(index: int, paths: list[str], seen: list[_Seen], origins: dict[int, Any]) -> Call:
    part, path = seen[index], paths[index]
    if len(part.calls) != 1:
        times = "never" if not part.calls else f"{len(part.calls)} times"
        raise _broken(f"forward calls {path} {times}, allowed: once", "each part has one place in the flow")
    args, named = part.calls[0]
    before = seen[index - 1] if index else None
    flows = 0

    def source(value: Any, version: int | None) -> Source:
        nonlocal flows
        if before is not None and value is before.output and isinstance(value, Tensor):
            flows += 1
            if version != before.version:
                raise _broken(f"what {paths[index - 1]} returned is changed in place before {path} gets it", OUTSIDE)
            return Source("flow")
        if id(value) in origins:
            return Source("batch", origins[id(value)])
        if isinstance(value, CONSTANTS):
            return Source("constant", value)
        given = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        known = "the batch has nothing like it" if before is None else f"it is not what {paths[index - 1]} returned"
        raise _broken(f"forward gives {path} {given}, and {known}", OUTSIDE)

    versions = iter(part.versions)
    positional = tuple(source(value, next(versions)) for value in args)
    by_name = {key: source(value, next(versions)) for key, value in named.items()}
    if before is not None and flows != 1:
        raise _broken(f"forward does not give {path} what {paths[index - 1]} returned", OUTSIDE)
    if before is None and not any(s.kind == "batch" for s in (*positional, *by_name.values())):
        raise _broken(f"forward gives {path} nothing of the batch", "the head is the part that reads the batch")
    if index < len(paths) - 1 and not isinstance(part.output, Tensor):
        raise _broken(
            f"{path} returns a {type(part.output).__name__}, allowed: a tensor", "a stage sends one tensor to the next"
        )
    return Call(positional, by_name)


OUTSIDE = "do inside the parts what forward does between them: only the parts' outputs go from stage to stage"


def _broken(what: str, hint: str) -> InputError:
    return InputError(f"{FIELD}: {what}", hint=hint, field=FIELD)


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) else None


def _entries(batch: Any) -> list[tuple[Any, Any]]:
    """What of a batch can be recognised as the same object."""
    pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return [(key, value) for key, value in pairs if not isinstance(value, CONSTANTS)]


def _on_meta(batch: Any) -> Any:
    def moved(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return {key: moved(value) for key, value in batch.items()}
    return tuple(moved(value) for value in batch)
