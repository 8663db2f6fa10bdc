"""Batch normalisation whose statistics are those of the global batch, on any device.

torch's SyncBatchNorm refuses CPU tensors; this one needs only an all-reduce that autograd understands. On CUDA torch's
own kernels are faster, and `share_batch_norm` takes those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _SumOverRanks(torch.autograd.Function):
    """y = sum of x over ranks. Every rank's loss depends on y, so the gradient is a sum over ranks too."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


class SharedBatchNorm(_BatchNorm):
    """Batch normalisation over the samples of all ranks. A muted rank takes part but adds nothing."""

    muted = False

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, found {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or dist.get_world_size() == 1:
            return super().forward(input)
        x = input if input.dtype == torch.float64 else input.float()
        weight = 0.0 if self.muted else 1.0
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        count = x.new_tensor([weight * x.numel() / x.size(1)])
        # The mean first and then the squared distances from it: as stable as torch's own two-pass kernel.
        sums = _sum_over_ranks(torch.cat([x.sum(dims) * weight, count]))
        total = sums[-1]
        if total <= 1:  # as torch refuses it; the running variance would be not a number from here on
            raise ValueError(f"Expected more than 1 value per channel when training, found {total:g} over all ranks")
        mean = sums[:-1] / total
        centred = x - mean.view(shape)
        variance = _sum_over_ranks((centred * centred).sum(dims) * weight) / total
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
        unbiased = variance * (total / (total - 1))
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running * (1 - rate) + value * rate)


def _sum_over_ranks(x: Tensor) -> Tensor:
    y: Tensor = _SumOverRanks.apply(x)  # type: ignore[no-untyped-call]
    return y


def has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def share_batch_norm(model: nn.Module, device: torch.device) -> nn.Module:
    """The model with every BatchNorm replaced by one that sees the global batch."""
    if device.type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        return converted
    return _replaced(model, {})


def _replaced(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """A layer that is used in two places is replaced by one layer in both."""
    if module not in known:
        known[module] = _shared(module) if isinstance(module, _BatchNorm) else module
        for name, child in module._modules.items():
            if child is not None:
                module._modules[name] = _replaced(child, known)
    return known[module]


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


def _shared(layer: _BatchNorm) -> SharedBatchNorm:
    shared = SharedBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats, device="meta"
    )
    shared.weight, shared.bias = layer.weight, layer.bias
    for name, buffer in layer.named_buffers(recurse=False):
        setattr(shared, name, buffer)
    return shared.train(layer.training)
