"""What the pool's ranks do in tests of weights that are drawn, sent, saved and read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_loops
import torch
import user_code
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gradus.models import initialise
from gradus.models.gpt import GPT
from gradus.models.resnet import ResNet
from gradus.models.settings import GPTSettings, ResNetSettings
from gradus.parallel.materialise import materialise
from gradus.parallel.part import whole
from gradus.parallel.world import World
from gradus.schema.plan import Mesh
from gradus.schema.recipe import Recipe
from gradus.training.described import described_model

SETTINGS = GPTSettings(layers=2, width=24, heads=2, context=16, vocabulary=61, positions="rotary")
CPU = torch.device("cpu")


def model_of(kind: str) -> nn.Module:
    return GPT(SETTINGS) if kind == "gpt" else ResNet(ResNetSettings(depth=18, classes=7, small_input=True))


def drawn_whole(kind: str, seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: p.detach() for name, p in model_of(kind).named_parameters()}


def drawn_in_parts(world: World, kind: str, seed: int, chunk: int) -> tuple[dict[str, Tensor], int]:
    """The weights of a model that was divided before they were drawn, and how many numbers this rank drew."""
    with torch.device("meta"):
        model = model_of(kind)
    mesh = init_device_mesh("cpu", (world.size,))
    for block in getattr(model, "blocks", []):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialise(model, CPU)
    if kind == "gpt":
        assert model.head.output.weight is model.embedding.token.weight  # type: ignore[union-attr]
    before, initialise.CHUNK = initialise.CHUNK, chunk
    drawn = 0
    put_rows = initialise.put_rows

    def counted(target: Tensor, rows: Tensor, first_row: int = 0) -> None:
        nonlocal drawn
        drawn += rows.numel()
        put_rows(target, rows, first_row)

    initialise.put_rows = counted
    try:
        torch.manual_seed(seed)
        model.init_weights()  # type: ignore[operator]
    finally:
        initialise.put_rows, initialise.CHUNK = put_rows, before
    return {name: whole(p) for name, p in model.named_parameters()}, drawn


def drawn_along(world: World, dims: tuple[int, int]) -> Tensor:
    """A matrix on a 2 x 2 mesh; for each dimension of the mesh, the dimension it is cut along, or -1 for copies."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = distribute_tensor(torch.zeros(7, 5), mesh, [Replicate() if dim < 0 else Shard(dim) for dim in dims])
    initialise.draw(tensor, "matrix", "normal", 1.0, seed=3)
    return whole(tensor)


def described_and_filled(world: World, document: dict[str, Any], folder: str, mesh: dict[str, int]) -> dict[str, Any]:
    """A model of the user's own, built, divided and filled; its whole values, and where they came from."""
    world = world.arranged(Mesh(**mesh))
    recipe = Recipe.from_document(document, folder=Path(folder))
    described = described_model(recipe, world, torch.float32, divided=True)
    model = described.model
    shapes_only = all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    kept = len(described.values)
    fully_shard(model, mesh=world.flat_mesh("shard", "context"))
    described.fill(model, world)
    values = {name: whole(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    return {"values": values, "note": described.note, "shapes_only": shapes_only, "kept": kept}


def own_loop(world: World, folder: str, recipe: Recipe, attempt: int) -> dict[str, Tensor]:
    """A loop of the user's own around a model that each rank builds with other weights; rank 0's count."""
    run = own_loops.started(world, folder, recipe, attempt)
    torch.manual_seed(world.rank)
    model: nn.Module = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(user_code.Points()):
        run.step(own_loops.loss_of(model, batch))
    run.finish()
    return {name: whole(p) for name, p in run._live.model.named_parameters()}
