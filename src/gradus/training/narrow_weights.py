"""Narrow weights: copies of a model's parameters in 16 bits, with which it computes.

Autocast rounds a weight whenever a layer uses it, and leaves embeddings, and all that is added up from them between the
layers, in fp32. Here parameters are rounded once a step, and activations are in 16 bits throughout, as they are where
FSDP2 gathers parameters in such a format. The parameters themselves stay as they are: the optimizer, checkpoints and
evaluation know no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn

# Kernels of batch and instance norms want their weights as wide as their statistics; a recurrent layer has a list of
# its weights besides its parameters.
_LEFT_ALONE = (nn.modules.batchnorm._NormBase, nn.RNNBase)


class TakesNarrowGradients(Protocol):
    """An optimizer that takes gradients of copies as they are, and writes parameters and copies in one pass."""

    def update(self, gradients: Mapping[Tensor, Tensor], narrow: Mapping[Tensor, Tensor], factor: Tensor) -> None:
        """Apply `gradients`, each times `factor`, and round the new weights into those that are `narrow`."""

    def norm(self, gradients: Mapping[Tensor, Tensor], narrow: Mapping[Tensor, Tensor]) -> Tensor:
        """Of all `gradients` as one."""

    def expect_recording(self) -> None:
        """Before an update is recorded as a graph."""

    def settle(self) -> None:
        """After an update was recorded."""

    def set_rates(self) -> None:
        """The groups' learning rates, for an update that was recorded."""


def that_takes_narrow(optimizer: torch.optim.Optimizer, model: nn.Module) -> TakesNarrowGradients | None:
    """The optimizer, if it is such a one, and the model one that it can do it for: in fp32, without gaps in memory."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    can = getattr(optimizer, "takes_narrow_gradients", False) and all(
        parameter.dtype == torch.float32 and is_dense(parameter) for parameter in trained
    )
    return cast(TakesNarrowGradients, optimizer) if can else None


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == 0 or last + 1 == tensor.numel()


@dataclass
class _Copy:
    of: nn.Parameter
    narrow: nn.Parameter
    seen: tuple[int, int] | None = None  # which values of a frozen parameter it has


class NarrowWeights:
    """In place of the parameters from `put_in` to `take_out`; backward belongs in between, it may compute again."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self._copies: dict[int, _Copy] = {}
        self._places: list[tuple[nn.Module, str, _Copy]] = []
        self.are_in = False
        for module in model.modules():
            if isinstance(module, _LEFT_ALONE):
                continue
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dtype == torch.float32:
                    self._places.append((module, name, self._copy(parameter, dtype)))

    def _copy(self, parameter: nn.Parameter, dtype: torch.dtype) -> _Copy:
        """One for each parameter, in however many places the model has it."""
        if id(parameter) not in self._copies:
            narrow = nn.Parameter(torch.empty_like(parameter, dtype=dtype), requires_grad=parameter.requires_grad)
            self._copies[id(parameter)] = _Copy(parameter, narrow)
        return self._copies[id(parameter)]

    def refresh(self, *, trained: bool = True) -> None:
        """Round the parameters as they are now: before the first forward pass of a step.

        Those that are trained in any case, or, where the optimizer writes the copies too, if something else changed
        them.
        """
        changed = [
            copy
            for copy in self._copies.values()
            if (trained and copy.of.requires_grad) or copy.seen != _values(copy.of)
        ]
        with torch.no_grad():
            if changed:
                torch._foreach_copy_([copy.narrow for copy in changed], [copy.of for copy in changed])
        for copy in changed:
            copy.seen = _values(copy.of)

    def put_in(self) -> None:
        """Where the model has its parameters: what a script has put there since, as `functional_call` does for a call,
        stays. So does one whose gradient somebody waits for or changes, by a hook: a copy's gradient is not its."""
        if self.are_in:
            return
        for module, name, copy in self._places:
            if module._parameters.get(name) is copy.of and not _is_hooked(copy.of):
                copy.narrow.requires_grad_(copy.of.requires_grad)  # which a script may freeze, or no longer
                module._parameters[name] = copy.narrow
        self.are_in = True

    def take_out(self) -> None:
        if not self.are_in:
            return
        for module, name, copy in self._places:
            if module._parameters.get(name) is copy.narrow:
                module._parameters[name] = copy.of
        self.are_in = False

    def copies(self) -> dict[Tensor, Tensor]:
        """The narrow weights of the parameters that are trained."""
        return {copy.of: copy.narrow for copy in self._copies.values() if copy.of.requires_grad}

    def gradients(self) -> list[tuple[Tensor, Tensor]]:
        """Parameters and the gradients of their copies; with those of the parameters themselves, which a loss may have
        used that took hold of them before."""
        for copy in self._copies.values():
            wide = copy.of.grad
            if wide is not None:
                narrow = copy.narrow.grad
                copy.narrow.grad = (wide if narrow is None else wide + narrow).to(copy.narrow.dtype)
                copy.of.grad = None
        return [(copy.of, copy.narrow.grad) for copy in self._copies.values() if copy.narrow.grad is not None]

    def clear_gradients(self) -> None:
        for copy in self._copies.values():
            copy.narrow.grad = None

    def hand_over_gradients(self) -> None:
        """Those of the copies become the parameters' own, added to what is there of earlier micro-batches."""
        with torch.no_grad():
            used = [(copy.of, gradient) for copy in self._copies.values() if (gradient := copy.narrow.grad) is not None]
            first = [(parameter, gradient) for parameter, gradient in used if parameter.grad is None]
            added = [(parameter.grad, gradient) for parameter, gradient in used if parameter.grad is not None]
            wide = [torch.empty_like(parameter) for parameter, _ in first]
            if first:
                torch._foreach_copy_(wide, [gradient for _, gradient in first])
            for (parameter, _), gradient in zip(first, wide, strict=True):
                parameter.grad = gradient
            for total, gradient in added:
                total.add_(gradient)
        self.clear_gradients()


def _is_hooked(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _values(parameter: Tensor) -> tuple[int, int]:
    """Something else once a parameter has other values."""
    return parameter.data_ptr(), parameter._version
