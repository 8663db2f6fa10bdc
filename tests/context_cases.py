"""What the pool's processes do in tests of split sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.models.bert import BERT
from gradus.models.gpt import GPT
from gradus.models.output import IGNORED
from gradus.models.settings import BERTSettings, GPTSettings
from gradus.parallel.context import apply_context, attend_gathered, attend_in_ring, part_of, split_sequence
from gradus.parallel.world import World
from gradus.planner.resolve import resolved
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

LENGTH = 16
SMALL = {"vocabulary": 32, "context": LENGTH, "layers": 2, "width": 32, "heads": 4}
MODELS: dict[str, Any] = {
    "gpt rotary": lambda: GPT(GPTSettings(**SMALL, kv_heads=2, positions="rotary", norm="rmsnorm", tied=False)),
    "gpt learned": lambda: GPT(GPTSettings(**SMALL, positions="learned")),
    "gpt latent": lambda: GPT(
        GPTSettings(**SMALL, positions="rotary", norm="rmsnorm", attention="latent", kv_rank=8, value_width=6)
    ),
    "bert": lambda: BERT(BERTSettings(**SMALL)),
}


def recipe_for(model: str, mesh: dict[str, int], **more: Any) -> Recipe:
    """Two steps, with an evaluation after each."""
    document = {
        "name": "split",
        "model": {"use": model, **SMALL, "vocabulary": 256},
        "data": {"use": "stdlib-text", "max_bytes": 50_000},
        "batch": 4,
        "steps": 2,
        "optimizer": {"use": "adamw", "lr": 3e-3},
        "evaluate": {"every": 1, "batches": 4},
        "plan": {"mesh": mesh, "precision": "fp64", "checkpoint_every": 100},
    }
    return resolved(Recipe.from_document({**document, **more}))


def attend(
    world: World, way: str, causal: bool, kv_heads: int, dtype: torch.dtype = torch.float64, v_width: int = 8
) -> list[float]:
    """How far output and gradients are from those of one process, relative to the largest number in them."""
    world = world.arranged(Mesh(context=world.size))
    generator = torch.Generator().manual_seed(1)

    def random(heads: int, width: int) -> Tensor:
        return torch.randn(2, heads, LENGTH, width, generator=generator, dtype=torch.float64)

    whole = [random(4, 8), random(kv_heads, 8), random(kv_heads, v_width)]
    grad = random(4, v_width)
    exact = [x.clone().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*exact, is_causal=causal, enable_gqa=True)
    expected.backward(grad)

    def part(x: Tensor) -> Tensor:
        return part_of(x, world.place.context, world.mesh.context, dim=2)

    mine = [part(x).to(dtype).requires_grad_() for x in whole]
    mesh = world.submesh("context")
    if way == "ring":
        found = attend_in_ring(*mine, causal=causal, dropout=0.0, mesh=mesh, otherwise_gather=False)
    else:
        found = attend_gathered(*mine, causal=causal, dropout=0.0, mesh=mesh)
    found.backward(part(grad).to(dtype))
    pairs = [(found, expected), *((x.grad, y.grad) for x, y in zip(mine, exact, strict=True))]
    return [((x.double() - part(y)).abs().max() / y.abs().max()).item() for x, y in pairs]


def batch(model: str) -> tuple[Tensor, Tensor]:
    """Tokens, and targets of which most are ignored, and nearly all that count are in the first chunk."""
    generator = torch.Generator().manual_seed(2)
    tokens, targets = torch.randint(0, 32, (2, 3, LENGTH), generator=generator).unbind()
    if model == "bert":
        targets[:, 3:-1] = IGNORED
    return tokens, targets


def step(world: World, model_name: str, plan: Plan, recompute: bool = False, compiled: bool = False) -> dict[str, Any]:
    """Loss, accuracy and gradients of one step over split sequences, summed over the ranks."""
    world = world.arranged(plan.mesh)
    torch.manual_seed(0)
    model = MODELS[model_name]().double()
    apply_context(model, world, plan)
    if recompute:
        for block in model.blocks:
            _recompute(block)
    if compiled:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    tokens, targets = split_sequence(batch(model_name), world)
    output = model.train()(tokens, targets)
    output.loss_sum.backward()
    evaluated = model.eval()(tokens, targets)
    numbers = torch.stack([output.loss_sum.detach(), output.count, evaluated.loss_sum.detach(), evaluated.correct])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    if world.size > 1:
        for tensor in (numbers, *gradients.values()):
            dist.all_reduce(tensor)
    return {"numbers": numbers, "gradients": gradients, "counted": float(output.count)}


def _recompute(block: nn.Module) -> None:
    forward = block.forward
    block.forward = lambda x: torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)  # type: ignore[assignment]


def refusal_of_ring(world: World, dropout: float) -> tuple[str, dict[str, Any]]:
    world = world.arranged(Mesh(context=world.size))
    q = torch.randn(1, 2, 4, 8)
    mesh = world.submesh("context")
    try:
        attend_in_ring(q, q, q, causal=True, dropout=dropout, mesh=mesh, otherwise_gather=False)
    except InputError as error:
        # What a plan leaves open is computed by the other way.
        found = attend_in_ring(q, q, q, causal=True, dropout=dropout, mesh=mesh, otherwise_gather=True)
        assert found.shape == q.shape
        return error.message, error.details
    raise AssertionError("not refused")
