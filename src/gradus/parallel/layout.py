"""Layout: which ranks form which group, and on which node. Pure functions of the mesh, without torch, for launchers
and ranks alike.

Ranks are numbered so that tensor runs fastest, then context, shard, pipeline and replicate. Nodes are filled in the
order of ranks, so the groups that talk most lie inside one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradus.schema.plan import Mesh

DIMENSIONS = ("replicate", "pipeline", "shard", "context", "tensor")  # from outermost to innermost


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the mesh: its number along each dimension."""

    replicate: int = 0
    pipeline: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0
    expert: int = 0  # its number among the ranks that share the experts


def place_of(rank: int, mesh: Mesh) -> Place:
    """The place of a rank; the numbers count as those on a clock do, tensor fastest."""
    assert 0 <= rank < mesh.world_size, f"rank {rank} of {mesh.world_size}"
    numbers: dict[str, int] = {}
    rest = rank
    for name in reversed(DIMENSIONS):
        rest, numbers[name] = divmod(rest, getattr(mesh, name))
    # Experts reuse the ranks of shard × context; neighbours share them, so that tokens travel a short way.
    return Place(**numbers, expert=_among_shards(numbers["shard"], numbers["context"], mesh) % mesh.expert)


def rank_at(place: Place, mesh: Mesh) -> int:
    """The rank that stands at a place: the other way round."""
    rank = 0
    for name in DIMENSIONS:
        rank = rank * getattr(mesh, name) + getattr(place, name)
    return rank


def groups(mesh: Mesh, dimensions: Sequence[str]) -> list[list[int]]:
    """The ranks in groups: members of a group differ only along `dimensions`. Every rank is in exactly one.

    `expert` stands alone: its groups lie inside those of shard × context, neighbours together.
    """
    known = (*DIMENSIONS, "expert")
    assert all(name in known for name in dimensions), f"{dimensions}: not all of {known}"
    assert "expert" not in dimensions or len(dimensions) == 1, f"{dimensions}: expert is no factor of the mesh"
    members: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        place = place_of(rank, mesh)
        if "expert" in dimensions:
            group = _among_shards(place.shard, place.context, mesh) // mesh.expert
            key = (place.replicate, place.pipeline, group, place.tensor)
        else:
            key = tuple(getattr(place, name) for name in DIMENSIONS if name not in dimensions)
        members.setdefault(key, []).append(rank)
    return list(members.values())


def group_size(mesh: Mesh, dimensions: Sequence[str]) -> int:
    return math.prod(getattr(mesh, name) for name in dimensions)


def node_of(rank: int, ranks_per_node: int) -> int:
    return rank // ranks_per_node


def nodes_spanned(mesh: Mesh, dimension: str, ranks_per_node: int) -> int:
    """Over how many nodes the widest group along a dimension reaches; 1: none of its groups crosses a node."""
    return max(len({node_of(rank, ranks_per_node) for rank in group}) for group in groups(mesh, [dimension]))


def _among_shards(shard: int, context: int, mesh: Mesh) -> int:
    """The number among the ranks over which parameters are sharded."""
    return shard * mesh.context + context
