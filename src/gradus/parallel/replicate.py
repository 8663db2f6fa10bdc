"""replicate: every rank holds the whole model, and gradients are averaged while backward goes on (DDP)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from gradus.parallel.batch_norm import STATISTICS, SharedBatchNorm, share_batch_norm
from gradus.parallel.world import World
from gradus.schema.errors import InputError
from gradus.schema.foreign import is_pretrained_model

NAMES_SHOWN = 5  # of parameters that get no gradient


def averaging_group(world: World) -> dist.ProcessGroup | None:
    """The ranks that have the same parameters and other samples or tokens; None where these are all ranks."""
    if world.averaging_ranks == world.size:
        return None
    return world.flat_mesh("replicate", "shard", "context").get_group()


def replicated(
    model: nn.Module,
    world: World,
    bucket_mib: int,
    *,
    compression: Literal["none", "bf16"] = "none",
    some_rank_may_pad: bool,
    fixed_buckets: bool = False,
) -> nn.Module:
    """The model with gradients averaged over the ranks that hold the same; batch statistics are shared as well.

    They start with the parameters and buffers of the first of them, whatever their constructors drew. Gradients travel
    in bf16 with that `compression`: half the bytes, at three significant digits. `some_rank_may_pad` says whether some
    step leaves a rank without a real sample, which must then stay out of the batch statistics.
    With `fixed_buckets`, gradients are reduced in the same order from the first step on, at the price of a walk over
    the graph in each: an own loop cannot be warmed up.
    """
    if world.averaging_ranks == 1 or not any(p.requires_grad for p in model.parameters()):
        return model
    group = averaging_group(world)
    share_batch_norm(model, world.device, some_rank_may_pad=some_rank_may_pad, group=group)
    with warnings.catch_warnings():
        # torch 2.13 deprecates broadcast_buffers. What replaces it is unknown to 2.11, and always broadcasts buffers at
        # the start, where it fails for some that `broadcast` can (int16 over gloo, expanded ones).
        warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)
        wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=bucket_mib,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # before every forward; see `share_buffers`
            # With which DDP does not regroup its buckets after the first step, either.
            find_unused_parameters=fixed_buckets or any(map(_may_leave_out_parameters, model.modules())),
        )
    if compression == "bf16":
        # Not by its own name, for which DDP demands NCCL; gloo adds up bf16 as well.
        wrapped.register_comm_hook(group, lambda group, bucket: bf16_compress_hook(group, bucket))
    broadcast(model.buffers(), group)
    return wrapped


def share_buffers(model: nn.Module, world: World) -> None:
    """Give all replicas the buffers of the first, before an evaluation or a checkpoint. All ranks must call it.

    Batch statistics are left out: they are those of the global batch, the same everywhere. Any other buffer that
    forward updates (an average of activations, a codebook) has seen only its own rank's samples since the last call.
    Evaluations and checkpoints then hold what the first has seen: the same on every rank, but not what one rank would
    have seen of the whole batch. Without such buffers this walks over the modules and sends nothing.
    """
    if world.averaging_ranks > 1:
        broadcast(_local_buffers(model), averaging_group(world))


def _local_buffers(model: nn.Module) -> list[Tensor]:
    # Found anew each time (under a millisecond for 1,000 modules): forward may put a new tensor in a buffer's place.
    return [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if not (isinstance(module, (SharedBatchNorm, nn.SyncBatchNorm)) and name in STATISTICS)
    ]


@torch.no_grad()
def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """The first rank's values in the tensors of all ranks of a group, sent as bytes so that any type will do."""
    for tensor in tensors:
        buffer = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if buffer.numel() == 0:
            continue
        held = buffer
        for dim, stride in enumerate(buffer.stride()):
            if stride == 0:  # expanded: one value in memory stands for all along this dimension
                held = held.narrow(dim, 0, 1)
        values = held.contiguous()
        dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=0)
        held.copy_(values)


def check_every_parameter_is_used(model: nn.Module) -> None:
    """Refuse, after a backward, a model with trainable parameters that got no gradient.

    One rank would leave them as they are without a word; DDP on several would wait for their gradients.
    """
    inner = unwrapped(model)
    excused = {p for module in inner.modules() if _may_leave_out_parameters(module) for p in module.parameters()}
    unused = [name for name, p in inner.named_parameters() if p.requires_grad and p.grad is None and p not in excused]
    if unused:
        raise _unused_parameters(unused)


def _may_leave_out_parameters(module: nn.Module) -> bool:
    """Models of Hugging Face have parts for other uses than the one at hand: a pooler, a mask token, a second head."""
    return is_pretrained_model(type(module))


def explain_ddp_error(error: RuntimeError, model: nn.Module) -> Exception:
    """What DDP says when a backward left out parameters, as `check_every_parameter_is_used` says it.

    DDP says it at the forward after that backward, and gives the numbers of the parameters. Other errors stay as they
    are.
    """
    text = str(error)
    if "Expected to have finished reduction in the prior iteration" not in text:
        return error
    trained = [name for name, p in unwrapped(model).named_parameters() if p.requires_grad]
    found = re.search(r"Parameter indices which did not receive grad for rank \d+:([ \d]+)", text)
    numbers = [int(number) for number in found[1].split()] if found else []
    return _unused_parameters([trained[number] for number in numbers if number < len(trained)])


def _unused_parameters(names: list[str]) -> InputError:
    shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
    which = f"{shown} ({len(names)} of its trainable parameters)" if names else "some trainable parameters"
    return InputError(
        f"model: no gradient reaches {which}",
        hint="use them in forward, or freeze them with requires_grad_(False)",
        field="model",
        found=names or None,
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
