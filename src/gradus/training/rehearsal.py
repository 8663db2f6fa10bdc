"""Rehearsal: a model is run on tensors that have a shape and no values, as training would run it, to see what it does.

Nothing of it stays: what a forward leaves on its modules (tables of positions, masks, counters) would be without values
and fail the first real step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode  # private, but models ask for it where they branch on values
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gradus.data.transfer import mapped

_AUTOCASTS = ("cuda", "cpu")  # each may be the one that training has
Autocast = tuple[tuple[bool, torch.dtype], ...]


def rehearsed(model: nn.Module, asked: Callable[[Any], Any], batch: Any, watch: TorchDispatchMode | None = None) -> Any:
    """What `asked` returns of a batch, with tensors without values in place of those of the model and of the batch."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:  # on one device, wherever it is: parts of a model may not be anywhere yet
        return mode.from_tensor(tensor.to("meta"))

    whole = _Asked(model, asked)
    faked = {name: fake(tensor) for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
    with _left_as_it_was(model), _under_autocast(), mode, watch or nullcontext(), torch.no_grad():
        return functional_call(whole, faked, (mapped(batch, fake),))


def autocast_now() -> Autocast:
    """Whether products are made in fewer bits here, and in which format."""
    return tuple((torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCASTS)


class LayerCall(NamedTuple):
    layer: nn.Linear
    result: Tensor
    autocast: Autocast  # in which it worked


class UsesOf(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notices the operators that are given a tensor which a layer has returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[LayerCall] = []  # which also hold what was returned, so that ids stay their own
        self._returned: set[int] = set()
        self._used: set[int] = set()
        self._looks = True

    def returned(self, layer: nn.Linear, _: Any, y: Tensor) -> None:
        """A hook for after the layer, before those of others, which may return something else."""
        self.calls.append(LayerCall(layer, y, autocast_now()))
        self._returned.add(id(y))

    def of(self, tensor: Tensor) -> bool:
        return id(tensor) in self._used

    @contextmanager
    def are_not_meant(self) -> Iterator[None]:
        """Inside is what uses it with good reason."""
        before, self._looks = self._looks, False
        try:
            yield
        finally:
            self._looks = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._looks and func.namespace != "prim":  # those ask for a device or a layout, and for no value
            self._used |= self._returned & {id(leaf) for leaf in tree_leaves((args, kwargs))}
        return func(*args, **(kwargs or {}))


class _Asked(nn.Module):
    def __init__(self, model: nn.Module, asked: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.asked = model, asked

    def forward(self, batch: Any) -> Any:
        return self.asked(batch)


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    """In training mode; and afterwards with the attributes that its modules had, and what was in them."""
    before = [(module, dict(vars(module)), _contents(module)) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, attributes, contents in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, content in contents.items():
                _refill(attributes[name], content)


def _contents(module: nn.Module) -> dict[str, Any]:
    return {name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, (dict, list, set))}


def _refill(container: Any, content: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(content)


@contextmanager
def _under_autocast() -> Iterator[None]:
    """As training in 16 bits has it, for those who ask. Tensors without a device are not cast by it."""
    before = autocast_now()
    for device in _AUTOCASTS:
        torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        for device, (enabled, _) in zip(_AUTOCASTS, before, strict=True):
            torch.set_autocast_enabled(device, enabled)
        torch.clear_autocast_cache()
