"""Owners: which rank writes what of a checkpoint, and where in its file. Nobody asks anybody.

Ranks that hold the same box of a tensor are known from the mesh: those of the same pipeline stage, but for the
dimensions along which the tensor is divided. Each of them divides what they all hold in the same way, so all know whose
turn it is.

    shard 2 × replicate 2       rank 0, 2: rows 0 to 3 of w and v      rank 0 writes those of w, rank 2 those of v
                                rank 1, 3: rows 4 to 7 of w and v      rank 1 writes those of w, rank 3 those of v
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gradus.checkpoint.part import PartLayout, lay_out, part_name
from gradus.checkpoint.writing import dtype_name
from gradus.parallel.layout import DIMENSIONS, place_of
from gradus.parallel.part import local_part
from gradus.parallel.world import World
from gradus.schema.plan import Mesh

HOOKS_PREFIX = "hooks."  # of the names of what hooks keep
Numbers = tuple[int, ...]  # of a rank along each dimension of some mesh, or several ranks
Division = tuple[DeviceMesh, Numbers] | None


def owned(tensors: Mapping[str, Tensor], world: World, alone: Collection[str] = ()) -> dict[str, Tensor]:
    """Of what this rank holds, what it writes. `alone` names what only rank 0 has, or what only its own counts of.

    Hooks are somebody's own, and may keep other things on some ranks. So that no rank is mistaken about whose turn a
    weight is, theirs are divided apart from the rest, and what is whole falls to the first of all that should have it.
    """
    mine = {name: tensors[name] for name in alone if name in tensors} if world.leads else {}
    of_hooks = {n: tensor for n, tensor in tensors.items() if n.startswith(HOOKS_PREFIX) and n not in alone}
    if of_hooks and world.rank == _same_stage(world.rank, world.mesh)[0]:
        mine |= {name: tensor for name, tensor in of_hooks.items() if not isinstance(tensor, DTensor)}
    divided = {name: tensor for name, tensor in of_hooks.items() if isinstance(tensor, DTensor)}
    rest = {name: tensor for name, tensor in tensors.items() if name not in of_hooks and name not in alone}
    return mine | _share(rest, world) | _share(divided, world)


def _share(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Of tensors that ranks hold alike, the share of this rank."""
    alike: dict[Division, dict[str, int]] = {}  # what is divided alike, with the bytes of the box that is here
    for name, tensor in tensors.items():
        local = local_tensor(tensor)
        if local.numel() or not tensor.numel():  # where there are more ranks than rows, some hold nothing
            alike.setdefault(_division(tensor), {})[name] = local.nbytes
    shared: dict[Numbers, dict[str, int]] = {}  # the ranks that hold the same, and what that is
    for division, sizes in alike.items():
        shared.setdefault(_holders(division, world), {}).update(sizes)
    return {name: tensors[name] for holders, sizes in shared.items() for name in _turn_of(world.rank, holders, sizes)}


def _turn_of(rank: int, holders: Sequence[int], sizes: Mapping[str, int]) -> Iterator[str]:
    """The names that fall to a rank: the largest first, each to whoever has least until then."""
    loads = [(0, holder) for holder in holders]  # a heap: the least first
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + size, owner))
        if owner == rank:
            yield name


def _division(tensor: Tensor) -> Division:
    """Over which ranks a tensor is divided, and along which dimensions of their mesh; None: all have all of it."""
    if not isinstance(tensor, DTensor):
        return None
    return tensor.device_mesh, tuple(dim for dim, p in enumerate(tensor.placements) if not p.is_replicate())


def _holders(division: Division, world: World) -> Numbers:
    """The ranks that hold the same box of tensors that are divided alike, this one among them, in order."""
    if division is None:
        return _same_stage(world.rank, world.mesh)
    group = division[0].mesh
    return _same_box(world.rank, world.mesh, tuple(group.shape), tuple(group.flatten().tolist()), division[1])


@lru_cache
def _same_stage(rank: int, mesh: Mesh) -> Numbers:
    stage = place_of(rank, mesh).pipeline
    return tuple(r for r in range(mesh.world_size) if place_of(r, mesh).pipeline == stage)


@lru_cache
def _same_box(rank: int, mesh: Mesh, sizes: Numbers, group: Numbers, divided: Numbers) -> Numbers:
    """Those at the same place along the divided dimensions of a group of ranks, which stands for all like it.

    A rank that is in another group like this one is looked for here by who would be in its place.
    """
    where = {member: _along(position, sizes) for position, member in enumerate(group)}
    here = [where[rank][dim] for dim in divided]
    for numbers_of in (_standard, _by_expert):
        numbers = {r: numbers_of(r, mesh) for r in range(mesh.world_size)}
        own = numbers[rank]
        spanned = [dim for dim in range(len(own)) if len({numbers[member][dim] for member in group}) > 1]
        by_numbers = {number: r for r, number in numbers.items()}
        stands_for = {
            r: by_numbers[tuple(n if dim in spanned else own[dim] for dim, n in enumerate(numbers[r]))]
            for r in _same_stage(rank, mesh)
        }
        if set(stands_for.values()) == set(group):
            return tuple(r for r, member in stands_for.items() if [where[member][dim] for dim in divided] == here)
    # A mesh of somebody's own: its groups may each write the same, of which one is taken.
    return tuple(sorted(member for member in group if [where[member][dim] for dim in divided] == here))


def _along(position: int, sizes: Sequence[int]) -> Numbers:
    numbers = []
    for size in reversed(sizes):
        position, number = divmod(position, size)
        numbers.append(number)
    return tuple(reversed(numbers))


def _standard(rank: int, mesh: Mesh) -> Numbers:
    place = place_of(rank, mesh)
    return tuple(getattr(place, name) for name in DIMENSIONS)


def _by_expert(rank: int, mesh: Mesh) -> Numbers:
    """The ranks of shard × context once more, as those that share all experts and those that hold the same."""
    place = place_of(rank, mesh)
    group = (place.shard * mesh.context + place.context) // mesh.expert
    return (place.replicate, place.pipeline, group, place.expert, place.tensor)


def part_layout(tensors: Mapping[str, Tensor], rank: int, ranks: int) -> PartLayout:
    """The file for what a rank writes: of each tensor the box that it holds."""
    boxes = []
    for name, tensor in tensors.items():
        part = local_part(tensor)
        boxes.append((name, dtype_name(name, part.tensor), tuple(tensor.shape), part.offset, tuple(part.tensor.shape)))
    return lay_out(part_name(rank, ranks), boxes)


def local_tensor(tensor: Tensor) -> Tensor:
    """The memory of what this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
