"""Base: the weights that a checkpoint does not hold, because the recipe builds them again and they never change.

With adapters (lora) that is nearly the whole model. A checkpoint holds a fingerprint of them in their place, so that a
run does not go on upon another base without a word.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradus.checkpoint.weights import ADAPTER_MARK
from gradus.parallel.part import whole
from gradus.parallel.world import World

_ATTRIBUTE = "_gradus_base"
_CHUNK = 4 * 1024 * 1024  # numbers at once: the sums are taken in 64 bits


@dataclass(frozen=True)
class Base:
    names: frozenset[str]
    fingerprint: int


def mark_base(model: nn.Module, world: World | None = None) -> None:
    """Remember which parameters are not trained, and what they are, as those that checkpoints leave out.

    Of a model that is divided over a world's ranks, all of them must call it.
    """
    frozen = {name: p for name, p in sorted(model.named_parameters()) if not p.requires_grad}
    lines = {name: f"{name} {tuple(p.shape)} {bits_summed(p)}\n" for name, p in frozen.items()}
    if world is not None and world.mesh.pipeline > 1:  # each stage knows its own
        group = world.submesh("pipeline").get_group()
        stages: list[dict[str, str]] = [{} for _ in range(world.mesh.pipeline)]
        dist.all_gather_object(stages, lines, group=group)
        lines = {name: line for stage in stages for name, line in stage.items()}
    digest = hashlib.blake2b(digest_size=8)
    for _, line in sorted(lines.items()):
        digest.update(line.encode())
    fingerprint = int.from_bytes(digest.digest(), "little", signed=True)
    vars(model)[_ATTRIBUTE] = Base(frozenset(frozen), fingerprint)


def base_of(model: nn.Module) -> Base | None:
    found: Base | None = vars(model).get(_ATTRIBUTE)
    return found


def fingerprint_tensor(base: Base) -> dict[str, Tensor]:
    """The fingerprint as a checkpoint holds it."""
    return {ADAPTER_MARK: torch.tensor([base.fingerprint], dtype=torch.int64)}


@torch.no_grad()
def bits_summed(parameter: Tensor) -> int:
    """A number that depends on every bit of a parameter and its place, the same on any device.

    Taken in whole numbers, which wrap around and so add up in any order, and of the values in 32 bits, so that it does
    not depend on the precision that a run keeps its parameters in.
    """
    flat = whole(parameter).reshape(-1)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].to(torch.float32).view(torch.int32).to(torch.int64)
        places = torch.arange(start, start + bits.numel(), device=bits.device, dtype=torch.int64)
        weights = places * -7046029254386353131 + 1  # odd steps: no two places within reach weigh the same
        total += int(torch.sum((bits + 1) * weights).item())
    return total % 2**64
