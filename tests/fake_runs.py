"""Runs a model on fake tensors as CUDA would, and lists the operators that ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradus.planner.profile.as_cuda import AsCuda
from gradus.planner.profile.expected import as_expected

HOPPER, AMPERE, VOLTA = (9, 0), (8, 0), (7, 0)


# Views, and what only allocates or asks.
LAUNCH_NOTHING = frozenset(
    {"_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty"}
    | {"empty_like", "empty_strided", "expand", "is_pinned", "lift_fresh", "new_empty", "new_empty_strided", "permute"}
    | {"select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view"}
)


class Result(NamedTuple):
    """Of a tensor that an operator returned. The tensor itself would stay in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int


class Operators(TorchDispatchMode):
    """The names of all operators, each with what came out."""

    def __init__(self, real: bool = False) -> None:
        super().__init__()
        self.real = real  # tensors have numbers
        self.ran: list[tuple[str, list[Result]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = NotImplemented if self.real else as_expected(func, args, kwargs or {})
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        results = [Result(tuple(t.shape), t.dtype, t.numel() * t.element_size()) for t in tensors]
        self.ran.append((func._schema.name.partition("::")[2], results))
        return out

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]

    @property
    def work(self) -> Counter[str]:
        """How often each operator ran that launches something."""
        return Counter(name for name in self.names if name not in LAUNCH_NOTHING)


@dataclass
class Trace:
    forward: list[str] = field(default_factory=list)  # names of operators
    backward: list[str] = field(default_factory=list)
    operators: Operators = field(default_factory=Operators)
    without_gradient: list[str] = field(default_factory=list)


@contextmanager
def on_fake_gpu(
    autocast: torch.dtype | None = None, capability: tuple[int, int] = HOPPER, **options: Any
) -> Iterator[tuple[Operators, AsCuda]]:
    """Inside, tensors are fake, and what runs is listed."""
    operators, as_cuda = Operators(), AsCuda(autocast, capability, **options)
    with _fake_gpu(capability), operators, as_cuda:
        yield operators, as_cuda


def _fake_gpu(capability: tuple[int, int]) -> FakeTensorMode:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    mode.capability = capability  # type: ignore[attr-defined]  # for models that ask their device
    return mode


def made_fake(model: nn.Module) -> nn.Module:
    """With fake parameters and buffers; to be called where tensors are fake."""
    made: dict[int, nn.Parameter] = {}  # by id of the real one: some are in two places
    real = list(model.parameters())
    for parameter in real:
        made[id(parameter)] = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer)
    return model


def traced(
    model: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    autocast: torch.dtype | None = torch.bfloat16,
    capability: tuple[int, int] = HOPPER,
    **options: Any,
) -> Trace:
    """One pass forward and backward."""
    trace = Trace()
    with _fake_gpu(capability):
        made_fake(model.train())
        with trace.operators, AsCuda(autocast, capability, **options) as as_cuda:
            with as_cuda.forward():
                loss = loss_of(model)
            trace.forward = trace.operators.names
            loss.backward()
    trace.backward = trace.operators.names[len(trace.forward) :]
    trace.without_gradient = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return trace
