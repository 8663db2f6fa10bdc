"""Data and losses that go wrong at chosen samples, on any mesh, and how the pool's processes train on them."""

from __future__ import annotations

from typing import Any

import torch
from own_loops import loss_of, started
from pool import Pool
from torch import Tensor, nn
from torch.utils.data import Dataset
from training_cases import live_run, recipe_for, whole_weights
from user_code import line

from gradus.models.output import LossOutput
from gradus.parallel.part import local_part
from gradus.parallel.world import World
from gradus.record.directory import RunDirectory
from gradus.schema.errors import GradusError
from gradus.schema.recipe import Recipe
from gradus.training.loop import train

HERE = __file__
VOCABULARY, CONTEXT, BATCH = 32, 16, 8
NOT_A_NUMBER, STEEP, LOUD = 31, 30, 29  # first tokens of samples that are not as others


class MarkedText(Dataset[dict[str, Tensor]]):
    """Texts of which some samples carry a mark: dataset index → first token."""

    def __init__(self, marks: dict[int, int], samples: int = 400) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, LOUD, (samples, CONTEXT + 1), generator=generator)
        for index, mark in marks.items():
            self.tokens[index, 0] = mark

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[index, :-1], "targets": self.tokens[index, 1:]}


def marked(marks: dict[str, int], samples: int = 400) -> Any:
    numbered = {int(index): mark for index, mark in marks.items()}
    return MarkedText(numbered, samples), MarkedText({}, 16)


def marked_loss(output: LossOutput, batch: Any) -> tuple[Tensor, Tensor]:
    """NaN where a sample is marked so; a finite loss with a gradient that is not, where steep; huge where loud."""
    marks, total = set(batch["tokens"][:, 0].tolist()), output.loss_sum
    if NOT_A_NUMBER in marks:
        total = total * float("nan")
    if STEEP in marks:
        total = total + torch.sqrt(total * 0)
    return total * 50 if LOUD in marks else total, output.count


def marked_recipe(marks: dict[int, int], **changes: Any) -> Recipe:
    document = {
        "model": {"use": "gpt", "layers": 2, "width": 16, "heads": 2, "context": CONTEXT, "vocabulary": VOCABULARY},
        "data": {
            "use": f"{HERE}:marked",
            "marks": {str(index): mark for index, mark in marks.items()},
            "shuffle": "none",  # so that a sample's position is its number
        },
        "loss": {"use": f"{HERE}:marked_loss"},
        "optimizer": {"use": "adamw", "lr": 1e-2, "warmup": 2},
        "batch": BATCH,
        "steps": 10,
        "deterministic": True,
        "checkpoint": {"every": 4, "keep": 9, "background": False},
        "checksums": {"every": 1},  # replicas that are well must never be found to differ
        **changes,
    }
    return recipe_for("gpt", **document)


def followed(
    world: World, folder: str, recipe: Recipe, attempt: int = 1, stop_step: int | None = None
) -> dict[str, Any]:
    """Train, and tell every loss as it came, what was left out, and the weights; or the error that ended it."""
    live = live_run(world, folder, recipe, attempt, stop_step)
    with live.recorder.told_of_failure():
        ending = train(live)
    live.recorder.close(state=ending.state)
    return {
        "state": ending.state,
        "step": live.state.step,
        "skipped": live.state.skipped_positions,
        "skipped_steps": list(live.state.skipped_steps),
        "rollbacks": live.state.rollbacks,
        "weights": whole_weights(live),
    }


def run_marked(pool: Pool, ranks: int, run: RunDirectory, recipe: Recipe, attempt: int = 1, **kw: Any) -> Any:
    return pool.run(ranks, followed, str(run.path), recipe, attempt, *kw.values())


class WithBatchNorm(nn.Module):
    """Whose running averages a bad batch would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.norm(x))
        return y


class HoleyPoints(Dataset[tuple[Tensor, Tensor]]):
    """Points of which some have a coordinate that is no number."""

    def __init__(self, holes: list[int], samples: int = 160) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)
        self.x[holes, 0] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def holey(holes: list[int]) -> Any:
    return HoleyPoints(holes), HoleyPoints([], 8)


def flipped(world: World, folder: str, recipe: Recipe, rank: int, step: int, what: str) -> dict[str, Any]:
    """A bit of one rank's memory flips after a step, in a parameter or in what the optimizer keeps for it."""
    live = live_run(world, folder, recipe)
    schedule, done = live.schedule, False

    def watched(position: int) -> float:
        nonlocal done
        if world.rank == rank and live.state.step == step and not done:
            done = True
            parameter = dict(live.model.named_parameters())["blocks.1.attention.out.weight"]
            tensor = parameter if what == "parameter" else live.optimizer.state[parameter]["exp_avg_sq"]
            # An eighth of one weight, which is too little to show in a loss; of a moment less, or the weight shows it.
            bit = 20 if what == "parameter" else 2
            local_part(tensor).tensor.view(-1).view(torch.int32)[3] ^= 1 << bit
        return schedule(position)

    live.schedule = watched
    try:
        with live.recorder.told_of_failure():
            ending = train(live)
    except GradusError as error:
        return {"error": error.document(), "exit_code": error.exit_code}
    live.recorder.close(state=ending.state)
    return {"state": ending.state, "rollbacks": live.state.rollbacks, "weights": whole_weights(live)}


def own_loop_over_holes(world: World, folder: str, recipe: Recipe, holes: list[int]) -> dict[str, Any]:
    """A loop of a user's own over data with holes, with an optimizer of torch's that does not decide on the device."""
    run = started(world, folder, recipe)
    model = line()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    for batch in run.batches(HoleyPoints(holes, 80)):
        run.step(loss_of(model, batch))
    run.finish()
    return {"steps": run.steps_done, "weights": whole_weights(run._live)}
