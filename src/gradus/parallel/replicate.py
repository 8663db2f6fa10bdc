"""replicate: every rank holds the whole model, and gradients are averaged while backward goes on (DDP)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradus.parallel.batch_norm import share_batch_norm
from gradus.parallel.world import World


def replicated(model: nn.Module, world: World, bucket_mib: int) -> nn.Module:
    """The model with gradients averaged over all ranks; batch statistics are shared as well."""
    if world.size == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    model = share_batch_norm(model, world.device)
    return DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=bucket_mib,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,  # batch statistics are already the same on every rank
    )


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside the wrapper."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(inner, nn.Module)
    return inner


def reducing_gradients(model: nn.Module, reduce: bool) -> AbstractContextManager[None]:
    """While accumulating, gradients stay local: only the last micro-batch's backward reduces them."""
    if reduce or not isinstance(model, DistributedDataParallel):
        return nullcontext()
    return model.no_sync()
