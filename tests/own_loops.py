"""Loops of a user's own, as the pool's processes run them. The same line through points as in `user_runs`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import user_code
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.nn import functional as F
from training_cases import CLUSTER

from gradus.models import catalogue
from gradus.parallel.world import World
from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.record.stop import request_stop
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.joining import Place
from gradus.training.own_loop import Run
from gradus.training.randomness import seed_for_construction


def own_recipe(**changes: Any) -> Recipe:
    return Recipe.from_document({"name": "own", "batch": 8, "steps": 10, "seed": 7, **changes})


def started(world: World, folder: str, recipe: Recipe, attempt: int = 1) -> Run:
    """A run as `Run.start` makes it, except that the world is the pool's and signals stay as they are."""
    choice = default_plan(recipe, CLUSTER, world.size)
    run = Run(recipe, Place(world, RunDirectory(Path(folder)), attempt, choice, True, ExitStack()))
    seed_for_construction("model", recipe.seed)
    return run


def loss_of(model: torch.nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    x, y = batch
    squares = (model(x) - y.reshape(-1, 1).to(x.dtype)) ** 2
    return squares.sum(), squares.numel()


def fitted(
    world: World,
    folder: str,
    recipe: Recipe,
    attempt: int = 1,
    stop_step: int | None = None,
    break_step: int | None = None,
    hidden: int = 0,
    compiled: bool = False,
) -> dict[str, Any]:
    """The loop of the documentation, to its end. What it left."""
    run = started(world, folder, recipe, attempt)
    run._live.stop.look_every_seconds = 0.0
    model = user_code.line()
    if hidden:
        # Several of DDP's buckets, so that the order in which it reduces them matters.
        inner = [torch.nn.Linear(hidden, hidden) for _ in range(3)]
        model = torch.nn.Sequential(
            torch.nn.Linear(4, hidden), *inner, torch.nn.Dropout(0.1), torch.nn.Linear(hidden, 1)
        )
    if compiled:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    batches, evaluations = 0, []
    for batch in run.batches(user_code.Points()):
        batches += 1
        run.step(loss_of(model, batch))
        if run.evaluation_due:
            evaluations.append(run.evaluate(user_code.Points(), lambda batch: {"loss": loss_of(model, batch)}))
            run.log(evaluations=len(evaluations))
        if run.steps_done == stop_step and world.leads:
            request_stop(RunDirectory(Path(folder)), "test")
        if run.steps_done == break_step:
            break
    run.finish()
    weights = {name: value.detach().clone() for name, value in run._live.model.state_dict().items()}
    rates = [group["lr"] for group in optimizer.param_groups]
    return {
        "steps": run.steps_done,
        "stopped": run.stopped,
        "batches": batches,
        "evaluations": evaluations,
        "weights": weights,
        "rates": rates,
    }


def mean_over_parts(world: World, folder: str, where: str) -> str:
    """What a loop is told that gives the mean over a rank's part of the sequences."""
    run = started(world, folder, own_recipe(plan={"mesh": {"context": world.size}}))
    model = catalogue.build("gpt", {"layers": 1, "width": 16, "heads": 2, "context": 16, "vocabulary": 32})
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.01))
    data = user_code.RaggedText()

    def mean(batch: Any) -> torch.Tensor:
        return user_code.mean_of_tokens(model(**batch), batch)

    try:
        if where == "evaluate":
            run.evaluate(data, mean)
        for batch in run.batches(data):
            run.step(mean(batch))
    except InputError as error:
        return str(error)
    return "no error"


def misused(world: World, folder: str, how: str) -> tuple[str, str | None]:
    """What a loop is told that does something wrong."""
    run = started(world, folder, own_recipe())
    model = user_code.line()
    optimizer = torch.optim.SGD((user_code.line() if how == "optimizer of another model" else model).parameters(), 0.01)
    try:
        if how == "batches before prepare":
            run.batches(user_code.Points())
        if how == "no optimizer":
            run.prepare(model)
        if how == "optimizer first":
            run.prepare(optimizer, model)  # type: ignore[arg-type]
        if how == "scheduler second":
            run.prepare(model, torch.optim.lr_scheduler.StepLR(optimizer, 3))  # type: ignore[arg-type]
        if how == "data third":
            run.prepare(model, optimizer, torch.utils.data.DataLoader(user_code.Points()))  # type: ignore[arg-type]
        model, optimizer = run.prepare(model, optimizer)
        if how == "prepare twice":
            run.prepare(model, optimizer)
        if how == "step without a batch":
            run.step(torch.zeros(()))
        if how == "no length":
            run.batches(iter([1, 2]))
        if how == "loader":
            run.batches(torch.utils.data.DataLoader(user_code.Points()))
        if how == "loader for an evaluation":
            run.evaluate(torch.utils.data.DataLoader(user_code.Points()), lambda batch: loss_of(model, batch))
        for x, y in run.batches(user_code.Points()):
            loss = F.mse_loss(
                model(x).reshape(-1), y.reshape(-1).to(x.dtype), reduction="none" if how == "vector" else "mean"
            )
            if how == "no step":
                continue
            if how == "evaluate before step":
                run.evaluate(user_code.Points(), lambda batch: loss_of(model, batch))
            if how == "own backward":
                loss.backward()
            run.step(loss.detach() if how == "detached" else loss.item() if how == "number" else loss)
            if how == "step twice":
                run.step(loss)
    except InputError as error:
        return str(error), error.hint
    return "no error", None


def kept_module(world: World, folder: str, plan: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """What a loop finds in the module that it kept, and the whole state dict that torch gives of the prepared one."""
    run = started(world, folder, own_recipe(steps=2, plan=plan))
    own = user_code.line()
    vars(own)["note"] = "mine"
    model, _ = run.prepare(own, torch.optim.SGD(own.parameters(), lr=0.01))
    for batch in run.batches(user_code.Points()):
        run.step(loss_of(model, batch))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(model, options=options)
    run.finish()
    return str(own.note), whole


def head_only(world: World, folder: str) -> list[float]:
    """Gradient norms of a loop whose optimizer holds a part of the model, on the same batch again and again."""
    run = started(world, folder, own_recipe(batch=64, steps=4))
    body, head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    model, _ = run.prepare(torch.nn.Sequential(body, head), torch.optim.SGD(head.parameters(), lr=1e-9))
    for batch in run.batches(user_code.Points()):
        run.step(loss_of(model, batch))
    run.finish()
    from gradus.record.metrics import read_metrics

    return [row["grad_norm"] for row in read_metrics(RunDirectory(Path(folder)))]


def weighted(world: World, folder: str, weight: float, accumulate: int) -> torch.Tensor:
    """The weights after one step whose losses all have the same small weight, as (sum, count)."""
    run = started(world, folder, own_recipe(batch=8, steps=1, plan={"precision": "fp64", "accumulate": accumulate}))
    model = user_code.line()
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    for batch in run.batches(user_code.Points()):
        total, count = loss_of(model, batch)
        run.step((total * weight, count * weight))
    run.finish()
    return run._live.model.state_dict()["weight"].clone()


def evaluated_with_output(world: World, folder: str) -> dict[str, float]:
    """`run.evaluate` with the whole output of a Hugging Face model, as `run.step` takes it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    run = started(world, folder, own_recipe(batch=4, steps=1))
    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model: torch.nn.Module = GPT2LMHeadModel(config)
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tokens = torch.arange(8).repeat(8, 1)
    data = [{"input_ids": row, "labels": row} for row in tokens]
    for batch in run.batches(data):
        run.step(model(**batch))
    results = run.evaluate(data, lambda batch: model(**batch))
    run.finish()
    return dict(results)


def scheduled(world: World, folder: str, attempt: int, steps: int, kind: str) -> list[float]:
    """The learning rates of a loop with a scheduler of torch's."""
    run = started(world, folder, own_recipe(steps=steps), attempt)
    model = user_code.line()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler: Any = {
        "step": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5),
        "exponential": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        "one-cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
        "sequence": lambda: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
            ],
            [4],
        ),
    }[kind]()
    model, optimizer = run.prepare(model, optimizer, scheduler)
    for batch in run.batches(user_code.Points()):
        run.step(loss_of(model, batch))
    run.finish()
    from gradus.record.metrics import read_metrics

    return [row["lr"] for row in read_metrics(RunDirectory(Path(folder)))]
