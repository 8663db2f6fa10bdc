"""Averaging: tensors made equal over ranks, in few messages. For what neither DDP nor FSDP2 reduces by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def average_(
    tensors: Iterable[Tensor], group: dist.ProcessGroup | None, bucket_mib: int, compression: str = "none"
) -> None:
    """Give all ranks of a group the mean of each tensor, in place. All must bring the same ones, in the same order."""
    for bucket in _buckets(tensors, bucket_mib * 2**20):
        sent = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sent = sent.bfloat16() if compression == "bf16" else sent
        dist.all_reduce(sent, group=group)
        means = (sent / dist.get_world_size(group)).to(bucket[0].dtype)
        parts = torch.split(means, [tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def _buckets(tensors: Iterable[Tensor], most_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors of one kind together, up to a number of bytes, so that few messages carry them all."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > most_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        if bucket:
            yield bucket
