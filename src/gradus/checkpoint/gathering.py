"""Gathering: tensors that ranks hold in parts, or in stages of a pipeline, whole on rank 0, one at a time.

All ranks go through the same tensors in the same order. Of a divided one, those that hold a part give theirs; one that
only another stage has is sent. So rank 0 never holds more than one whole tensor besides its own part of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gradus.checkpoint.reading import DTYPES
from gradus.checkpoint.writing import Writable, in_file_order, writable
from gradus.parallel.part import whole
from gradus.parallel.world import World

Descriptions = dict[str, tuple[str, tuple[int, ...]]]  # type and shape, by name


@dataclass(frozen=True)
class Gathering:
    """What is to be written, on every rank: rank 0 gets it from here, the others `give` theirs meanwhile."""

    tensors: dict[str, Writable]  # in no order; `get` may only be called in the order of the file, and on rank 0
    parts: Mapping[str, Callable[[], object]]  # what this rank does when a tensor's turn comes

    def give(self) -> None:
        """Take part in all of it. For all ranks but 0."""
        for name, _ in in_file_order(self.tensors):
            if name in self.parts:
                self.parts[name]()


def gathered(tensors: Mapping[str, Tensor], world: World) -> Gathering:
    """All tensors that ranks hold, by name; one that several stages have is taken from the first. All must call it."""
    mine: Descriptions = {}
    for name, tensor in tensors.items():
        described = writable(name, tensor)
        mine[name] = (described.dtype, described.shape)
    stage_of = dict.fromkeys(mine, 0)
    everything = mine
    if world.mesh.pipeline > 1:
        everything, stage_of = _over_stages(mine, world)
    place = world.place
    writables: dict[str, Writable] = {}
    parts: dict[str, Callable[[], object]] = {}
    for name, (dtype, shape) in everything.items():
        stage = stage_of[name]
        get: Callable[[], Tensor] = partial(_received, dtype, shape, _first_of(stage, world))
        if stage == place.pipeline and place.replicate == 0:  # one replica has all there is
            get = partial(whole, tensors[name])
            sends = stage > 0 and world.rank == _first_of(stage, world)
            parts[name] = partial(_send, get) if sends else get
        writables[name] = Writable(dtype, shape, get)
    return Gathering(writables, parts)


def _over_stages(mine: Descriptions, world: World) -> tuple[Descriptions, dict[str, int]]:
    """What all stages have, and which of them gives it: the same on all ranks."""
    stages: list[Descriptions] = [{} for _ in range(world.mesh.pipeline)]
    dist.all_gather_object(stages, mine, group=world.submesh("pipeline").get_group())
    everything: Descriptions = {}
    stage_of: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name, description in stage.items():
            if name not in everything:
                everything[name], stage_of[name] = description, number
    return everything, stage_of


def _first_of(stage: int, world: World) -> int:
    """The first rank of a stage in the first replica, counted as in `layout`."""
    mesh = world.mesh
    return stage * mesh.shard * mesh.context * mesh.tensor


def _send(get: Callable[[], Tensor]) -> None:
    tensor = get().to("cpu").contiguous()
    if tensor.numel():
        dist.send(tensor.view(-1).view(torch.uint8), dst=0)


def _received(dtype: str, shape: tuple[int, ...], source: int) -> Tensor:
    tensor = torch.empty(shape, dtype=DTYPES[dtype])
    if tensor.numel():
        dist.recv(tensor.view(-1).view(torch.uint8), src=source)
    return tensor
