"""What the pool's processes do to compare the layout with torch's device mesh."""

from __future__ import annotations

import torch.distributed as dist

from gradus.parallel.expert import expert_mesh
from gradus.parallel.layout import DIMENSIONS
from gradus.parallel.world import World
from gradus.schema.plan import Mesh


def groups_of_torch(world: World, mesh: Mesh, flattened: list[tuple[str, ...]]) -> dict[str, object]:
    """This rank's coordinates and its group along each dimension, and along several as one, as torch has them."""
    world = world.arranged(mesh)
    assert world.device_mesh is not None
    along = {(name,): world.submesh(name) for name in DIMENSIONS}
    along |= {names: world.flat_mesh(*names) for names in flattened}
    found = {names: dist.get_process_group_ranks(submesh.get_group()) for names, submesh in along.items()}
    found[("expert",)] = dist.get_process_group_ranks(expert_mesh(world).get_group("expert"))
    return {
        "coordinates": dict(zip(DIMENSIONS, world.device_mesh.get_coordinate() or (), strict=True)),
        "expert": expert_mesh(world).get_local_rank("expert"),
        "groups": {names: sorted(ranks) for names, ranks in found.items()},
    }
