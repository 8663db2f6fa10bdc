"""Batch normalisation whose statistics are those of the global batch, on any device.

torch's SyncBatchNorm refuses CPU tensors and counts padding; this one needs only an all-reduce that autograd
understands, and ranks can be muted. Where that does not matter torch's kernels are faster, and `share_batch_norm` takes
those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from gradus.schema.errors import InputError

# Exactly these: a subclass may have a forward of its own, which would be lost.
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _SumOverRanks(torch.autograd.Function):
    """y = sum of x over ranks. Every rank's loss depends on y, so the gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        y = x.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SharedBatchNorm(_BatchNorm):
    """Batch normalisation over the samples of all ranks. A muted rank takes part but adds nothing.

    On CUDA nothing here makes the host wait for the device.
    """

    muted = False
    process_group: dist.ProcessGroup | None = None  # that is, all ranks

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, found {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        x = input if input.dtype == torch.float64 else input.float()
        if not self.training:
            # Gathered weights may be narrower than the statistics, which torch's function does not take.
            factor, shift = (None if part is None else part.to(x.dtype) for part in (self.weight, self.bias))
            untracked = self.running_mean is None or self.running_var is None
            y = F.batch_norm(x, self.running_mean, self.running_var, factor, shift, untracked, eps=self.eps)
            return y.to(input.dtype)
        if dist.get_world_size(self.process_group) == 1:
            return super().forward(input)
        self._check_input_dim(input)
        weight = 0.0 if self.muted else 1.0
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = x.new_full((1,), weight * x.numel() / x.size(1))
        # The mean first and then the squared distances from it: as stable as torch's own two-pass kernel.
        sums = sum_over_ranks(torch.cat([x.sum(dims) * weight, count]), self.process_group)
        total = sums[-1]
        if x.device.type == "cpu" and total <= 1:  # as torch refuses it; on a GPU the host does not know the total
            raise ValueError(f"Expected more than 1 value per channel when training, found {total:g} over all ranks")
        mean = sums[:-1] / total
        centred = x - mean.view(shape)
        variance = sum_over_ranks((centred * centred).sum(dims) * weight, self.process_group) / total
        self._update_running_statistics(mean.detach(), variance.detach(), total.detach())
        y = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape)
        if self.bias is not None:
            y = y + self.bias.view(shape)
        return y.to(input.dtype)

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, variance: Tensor, total: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        rate = 1.0 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
        unbiased = variance * (total / (total - 1).clamp(min=1))  # a single value must not make it not a number
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - rate) + value * rate)


def sum_over_ranks(x: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    y: Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return y


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def share_batch_norm(
    model: nn.Module, device: torch.device, *, some_rank_may_pad: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Turn every BatchNorm of the model, in place, into one that sees the global batch.

    `group` is of the ranks that have other samples, all if it is None. The layers stay the same objects, so hooks, and
    references that the model holds to them, keep working.
    """
    kind = nn.SyncBatchNorm if device.type == "cuda" and not some_rank_may_pad else SharedBatchNorm
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm):
            if type(layer) not in PLAIN:
                raise _cannot_be_shared(name, layer)
            layer.__class__ = kind
            layer.process_group = group  # type: ignore[assignment]


def _cannot_be_shared(name: str, layer: _BatchNorm) -> InputError:
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    where = f"model: its layer {name}" if name else "model: it"
    if isinstance(layer, LazyModuleMixin):
        return InputError(
            f"{where} is a {kind} that does not know its number of features yet",
            hint="give num_features, or let the constructor of the model call it once",
            field="model",
            found=kind,
        )
    return InputError(
        f"{where} is a {kind}, a BatchNorm that may have a forward of its own; it would normalise over the local batch "
        "of each rank, not over the global one",
        hint="use a plain nn.BatchNorm followed by the activation, or train on one rank",
        field="model",
        found=kind,
        allowed=[f"nn.{plain.__name__}" for plain in PLAIN],
    )


@contextmanager
def muted_batch_norm(model: nn.Module, muted: bool) -> Iterator[None]:
    """While muted, this rank's samples are padding and stay out of the statistics."""
    layers = [module for module in model.modules() if isinstance(module, SharedBatchNorm)] if muted else []
    for layer in layers:
        layer.muted = True
    try:
        yield
    finally:
        for layer in layers:
            layer.muted = False
