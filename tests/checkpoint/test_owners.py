"""Owners: each box of each tensor is written by one rank, without a word between them, and read back on any mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from owner_cases import MESHES, SHAPES, boxes_of_all, divided, resharded, whole
from pool import Pool

from gradus.checkpoint.commit import tiles
from gradus.checkpoint.owners import owned, part_layout
from gradus.checkpoint.snapshot import Snapshot
from gradus.checkpoint.store import CheckpointStore
from gradus.parallel.world import World
from gradus.schema.plan import Mesh

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A checkpoint for each mesh, by its number as the step, and what ranks found when they read each of them."""
    folder = tmp_path_factory.mktemp("parts")
    return folder, pool.run(4, resharded, str(folder))


def test_what_is_saved_on_any_mesh_is_read_on_any_other(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    """Uneven shards, fewer rows than ranks, tensor × shard, stages of a pipeline, experts, copies, numbers, nothing."""
    for result in saved[1]:
        assert result["wrong"] == []
        assert {"Shard", "Replicate", "_StridedShard"} <= result["placements"], "the last is FSDP2's over tensor's"


@pytest.mark.parametrize("number", range(len(MESHES)))
def test_whatever_the_mesh_the_checkpoint_holds_whole_tensors(
    saved: tuple[Path, list[dict[str, Any]]], number: int
) -> None:
    checkpoint = CheckpointStore(saved[0]).open(number)
    found = checkpoint.tensors()
    assert found.keys() == SHAPES.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.double(), whole(name).double()), name
    assert len(checkpoint.manifest["files"]) == 4


def test_the_boxes_that_ranks_write_are_each_written_once(saved: tuple[Path, list[dict[str, Any]]]) -> None:
    """Nothing that two ranks hold is in two files, but for what two stages of a pipeline have under one name."""
    for number, mesh in enumerate(MESHES):
        checkpoint = CheckpointStore(saved[0]).open(number)
        used = sum(stored.byte_count for stored in checkpoint.stored().values())
        headers = sum(file["header"]["bytes"] for file in checkpoint.manifest["files"].values())
        written = sum(file["bytes"] for file in checkpoint.manifest["files"].values())
        twice = whole("flags").nbytes if mesh.pipeline > 1 else 0
        assert written == headers + used + twice, mesh


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(replicate=8),
        Mesh(replicate=2, shard=2, tensor=2),
        Mesh(pipeline=2, shard=2, context=2),
        Mesh(replicate=2, pipeline=2, context=3),
        Mesh(shard=4, context=2, expert=4, tensor=2),
        Mesh(replicate=2, shard=2, context=2, expert=2),
    ],
    ids=lambda mesh: " ".join(f"{name} {ways}" for name, ways in mesh if ways > 1),
)
def test_every_box_has_one_owner_on_any_mesh(pool: Pool, mesh: Mesh) -> None:
    """Each rank decides for itself; together they write all there is, and nothing twice but for shared stages."""
    [ranks] = pool.run(1, boxes_of_all, mesh, divided)
    by_name: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    shapes = {}
    for rank in ranks:
        for name, (shape, offset, box) in rank.items():
            shapes[name] = shape
            by_name.setdefault(name, []).append((offset, box))
    for name, boxes in by_name.items():
        copies = 1 if name.startswith("stage.") else mesh.pipeline
        assert len(boxes) == copies * len(set(boxes)), f"{name}: {boxes}"
        assert tiles(shapes[name], sorted(set(boxes))), name
    assert min(map(len, ranks)) > 0, "nobody is idle"


def test_ranks_that_hold_the_same_share_its_bytes_evenly() -> None:
    """As ranks of a world without groups would divide plain tensors: the largest first, to whoever has least."""
    sizes = [900, 500, 400, 300, 200, 100, 60, 40]
    tensors = {f"t{size}": torch.zeros(size, dtype=torch.uint8) for size in sizes}
    written = []
    for rank in range(3):
        at = World(rank, rank, 3, CPU, mesh=Mesh(replicate=3))
        written.append(sum(tensor.numel() for tensor in owned(tensors, at).values()))
    assert sum(written) == sum(sizes)
    assert max(written) == 900, "no more than the largest, which is one rank's"


def test_what_only_rank_0_has_is_written_by_rank_0() -> None:
    tensors = {f"hook.{n}": torch.zeros(1000) for n in range(6)} | {f"t{n}": torch.zeros(1) for n in range(6)}
    for rank in range(3):
        here = {name: tensor for name, tensor in tensors.items() if rank == 0 or name.startswith("t")}
        at = World(rank, rank, 3, CPU, mesh=Mesh(replicate=3))
        mine = owned(here, at, alone={f"hook.{n}" for n in range(6)})
        assert {name for name in mine if name.startswith("hook")} == {name for name in here if name.startswith("hook")}
        assert len([name for name in mine if name.startswith("t")]) == 2


def test_what_hooks_keep_does_not_decide_who_writes_a_weight() -> None:
    """A hook of each rank's own keeps another tensor, and one of another size, on each."""
    weights = {f"t{n}": torch.zeros(10 + n) for n in range(12)}
    written: list[str] = []
    for rank in range(3):
        at = World(rank, rank, 3, CPU, mesh=Mesh(replicate=3))
        hooks = {"hooks.mine.sums": torch.zeros(7**rank), f"hooks.mine.of-{rank}": torch.zeros(100)}
        mine = owned(weights | hooks, at)
        assert {name: t for name, t in mine.items() if name in weights} == owned(weights, at)
        written += mine
    assert sorted(written) == sorted([*weights, "hooks.mine.sums", "hooks.mine.of-0"]), "the first rank's, as a whole"


def test_a_snapshot_holds_the_bytes_of_the_file(tmp_path: Path) -> None:
    tensors = {name: whole(name) for name in SHAPES} | {
        "turned": torch.randn(4, 6).t(),
        "every other": torch.arange(9)[::2],
    }
    layout = part_layout(tensors, 0, 1)
    snapshot = Snapshot(CPU)
    snapshot.copy(layout, tensors)
    store = CheckpointStore(tmp_path)
    store.save(1, tensors, {})
    written = (store.path(1) / layout.file_name).read_bytes()
    assert written[: len(layout.header)] == layout.header
    assert written[len(layout.header) :] == bytes(snapshot.bytes(len(layout.header), layout.total_bytes))
    snapshot.close()
