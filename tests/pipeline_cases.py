"""What the pool's processes do in tests of pipelines: small models trained in stages and by one process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradus.data.loader import MicroBatch
from gradus.models import catalogue
from gradus.parallel.blocks import repeated_blocks
from gradus.parallel.part import whole
from gradus.parallel.pipeline import Flow, Stage, StagePlace, cut, run_schedule, scheduled
from gradus.parallel.shard import shard
from gradus.parallel.stages import stages_of
from gradus.parallel.wiring import Wiring, traced
from gradus.parallel.world import World
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import PipelineParts, Recipe
from gradus.training.objective import Objective
from gradus.training.optimizers import build_optimizer
from gradus.training.pipeline_step import PipelineStep, wiring_of
from gradus.training.precision import numbers_for
from gradus.training.step import TrainingStep

STEPS, MICRO_BATCH, CONTEXT = 3, 2, 8
GPT: dict[str, Any] = {"use": "gpt", "layers": 8, "width": 16, "heads": 2, "context": CONTEXT, "vocabulary": 32}


@dataclass(frozen=True)
class Case:
    """A model, how it is split, and how many samples each micro-batch of a step has (of all data ranks together)."""

    mesh: dict[str, int]
    plan: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=lambda: GPT)
    samples: tuple[int, ...] = (4, 4, 4, 4)
    frozen: str = "nothing"  # a pattern at the start of names

    def planned(self) -> Plan:
        mesh = Mesh(**self.mesh)
        zero = 3 if mesh.shard > 1 else 0
        given = {"zero": zero, "micro_batch": MICRO_BATCH, "accumulate": len(self.samples), "precision": "fp64"}
        return Plan(mesh=mesh, **{**given, **self.plan})

    def recipe(self) -> Recipe:
        return Recipe.from_document(
            {"name": "stages", "model": self.model, "data": {"use": "synthetic-tokens"}, "batch": 1, "steps": STEPS}
            | {
                "optimizer": {
                    "use": "adamw",
                    "lr": 0.01,
                    "weight_decay": 0.1,
                    "groups": [{"match": ["head.*"], "lr_factor": 0.5}],
                }
            }
        )


def build(case: Case) -> tuple[Recipe, nn.Module]:
    recipe = case.recipe()
    torch.manual_seed(1)
    model = catalogue.build(recipe.model.use, recipe.model.options).double()
    for name, parameter in model.named_parameters():
        if re.match(case.frozen, name):
            parameter.requires_grad_(False)
    return recipe, model


def batch_of(case: Case, samples: int, key: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(key)
    if case.model["use"] == "vit":
        images = torch.rand(samples, 3, 16, 16, generator=generator, dtype=torch.float64)
        return {"images": images, "labels": torch.randint(10, (samples,), generator=generator)}
    tokens = torch.randint(32, (samples, CONTEXT), generator=generator)
    targets = torch.randint(32, (samples, CONTEXT), generator=generator)
    targets[:, : int(torch.randint(1, 4, (), generator=generator))] = -100  # not all micro-batches weigh the same
    return {"tokens": tokens, "targets": targets}


def micro_batches(case: Case, rank: int, ranks: int) -> Iterator[MicroBatch]:
    """The part of one data rank; the last ones of a step may be short, or without samples."""
    for step in range(STEPS):
        for index, samples in enumerate(case.samples):
            inputs = batch_of(case, MICRO_BATCH * ranks, 100 * step + index)
            first, size = (rank * MICRO_BATCH, MICRO_BATCH) if ranks > 1 else (0, len(next(iter(inputs.values()))))
            here = max(0, min(samples - first, size))
            rows = slice(first, first + max(1, here))
            yield MicroBatch({key: value[rows] for key, value in inputs.items()}, here, 10 * index + first)


def alone(world: World, case: Case) -> dict[str, Any]:
    """What one process makes of the same samples."""
    recipe, model = build(case)
    plan, data_ranks = case.planned(), case.planned().mesh.data_ranks
    optimizer = build_optimizer(model, recipe.optimizer)
    step = TrainingStep(
        model,
        optimizer,
        Objective(recipe, model),
        numbers_for("fp64", world.device),
        world,
        accumulate=plan.accumulate * data_ranks,
        clip=0.5,
        seed=3,
    )
    streams = [micro_batches(case, rank, data_ranks) for rank in range(data_ranks)]
    results = _trained(step, (micro for several in zip(*streams, strict=True) for micro in several), model)
    with torch.no_grad():
        measured = Objective(recipe, model)(model, batch_of(case, 3, 99), 3)
    return {**results, "validation": (measured.loss_sum / measured.count).item()}


def in_stages(world: World, case: Case) -> dict[str, Any]:
    plan = case.planned()
    world = world.arranged(plan.mesh)
    recipe, model = build(case)
    objective = Objective(recipe, model)
    blocks = repeated_blocks(model)
    part = cut(model, wiring_of(model, recipe, plan, objective, batch_of(case, 1, 0)), plan, world)
    del model
    held = part.pipeline_cut
    if plan.zero:
        for stage in held.stages:
            shard(stage, world, plan, None, blocks)
    optimizer = build_optimizer(part, recipe.optimizer)
    step = PipelineStep(part, optimizer, objective, numbers_for("fp64", world.device), world, plan, clip=0.5, seed=3)
    results = _trained(step, micro_batches(case, world.data_rank, world.data_ranks), part)
    with torch.no_grad():
        measured = step.measure(part, batch_of(case, 3, 99), 3)
    totals = world.sum_(torch.stack([measured.loss_sum.double(), measured.count.double()]))
    return {**results, "counts": held.counts, "tied": held.tied, "validation": (totals[0] / totals[1]).item()}


def changing_shapes(world: World) -> str:
    """What is said of a micro-batch with longer sequences than the first one had."""
    case = Case({"pipeline": 2})
    plan = case.planned()
    world = world.arranged(plan.mesh)
    recipe, model = build(case)
    objective = Objective(recipe, model)
    part = cut(model, wiring_of(model, recipe, plan, objective, batch_of(case, 1, 0)), plan, world)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    step = PipelineStep(part, optimizer, objective, numbers_for("fp64", world.device), world, plan, clip=None, seed=3)
    micros = list(micro_batches(case, 0, 1))[: plan.accumulate]
    micros[2] = MicroBatch({key: value[:, :-1] for key, value in micros[2].inputs.items()}, 2, 0)
    try:
        step.run(iter(micros), 0, 0.01, measure_norm=False)
    except InputError as error:
        return str(error)
    return "nothing"


def _trained(step: TrainingStep, stream: Iterator[MicroBatch], model: nn.Module) -> dict[str, Any]:
    numbers = [step.run(stream, index, 0.01, measure_norm=True).wait() for index in range(STEPS)]
    weights = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    return {
        "loss": [n.loss for n in numbers],
        "norm": [n.grad_norm for n in numbers],
        "weights": weights,
        "parameters": [name for name, _ in model.named_parameters()],
    }


def order_of(world: World, schedule: str, per_rank: int, micro_batches: int) -> dict[int, list[str | None]]:
    """What each rank does when, by torch's own table: `2F5` is the forward of micro-batch 5 in stage 2."""
    world = world.arranged(Mesh(pipeline=world.size))
    count = world.size * per_rank
    nothing = Wiring(PipelineParts(head="", blocks="", tail=""), (), ())
    stages = [Stage(StagePlace(s, count, range(0), nothing)) for s in stages_of(world.rank, world.size, per_rank)]
    flow = Flow((1,), torch.float32)
    flows = [(None if stage.pipeline_place.is_first else flow, flow) for stage in stages]
    order = scheduled(stages, flows, schedule, micro_batches, world).pipeline_order
    return {rank: [None if action is None else str(action) for action in row] for rank, row in order.items()}


noted: list[tuple[int, str]] = []  # (stage, F or B) in the order in which this rank came to them


class _Note(torch.autograd.Function):
    """Writes down when it is passed, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: int) -> Tensor:  # type: ignore[override]
        ctx.stage = stage
        if not x.is_meta:
            noted.append((stage, "F"))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        noted.append((ctx.stage, "B"))
        return gradient, None


class Noting(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Note.apply(x * self.weight, self.stage)  # type: ignore[no-untyped-call]
        return y


class Chain(nn.Module):
    """Blocks that are alike between a head and a tail."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.head, self.tail = nn.Linear(2, 2), nn.Linear(2, 1)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.tail(x)
        return y


class Sample:
    inputs = (torch.ones(1, 2),)

    def computing(self, stage: int) -> Any:
        return nullcontext()

    def lost(self, stage: nn.Module, flow: Tensor, answer: Any) -> Tensor:
        loss: Tensor = answer(flow, self.inputs).sum()
        return loss


def scheduled_chain(world: World, blocks: list[nn.Module], schedule: str, per_rank: int, micro_batches: int) -> Any:
    """A chain in stages of equally many blocks, ready for `run_schedule` with so many of `Sample`."""
    stages = world.size * per_rank
    alike = [len(blocks) // stages] * stages
    plan = Plan(mesh=Mesh(pipeline=world.size), stages_per_rank=per_rank, stage_blocks=alike)
    model = Chain(blocks)
    parts = PipelineParts(head="head", blocks="blocks", tail="tail")
    wiring = traced(model, parts, lambda call, batch: call(*batch), Sample.inputs)
    world = world.arranged(plan.mesh)
    held = cut(model, wiring, plan, world).pipeline_cut
    flow, last = Flow((1, 2), torch.float32), Flow((), torch.float32)
    flows = [
        (None if s.pipeline_place.is_first else flow, last if s.pipeline_place.is_last else flow) for s in held.stages
    ]
    return scheduled(held.stages, flows, schedule, micro_batches, world)


def performed(world: World, schedule: str, per_rank: int, micro_batches: int) -> list[str | None]:
    """What this rank really does in a step, in the words of `order_of`. Stages take micro-batches in their order."""
    blocks: list[nn.Module] = [Noting(stage) for stage in range(world.size * per_rank)]
    run = scheduled_chain(world, blocks, schedule, per_rank, micro_batches)
    noted.clear()
    run_schedule(run, [Sample() for _ in range(micro_batches)])
    return [f"{stage}{kind}{noted[:at].count((stage, kind))}" for at, (stage, kind) in enumerate(noted)]
