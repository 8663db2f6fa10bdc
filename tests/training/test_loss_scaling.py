"""Loss scaling: the same scales as torch's GradScaler, and a step that overflows leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import CLUSTER, MODELS, recipe_for, stopped_at

from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.schema.recipe import OptimizerBlock
from gradus.training import loss_scaling
from gradus.training.gradients import scale
from gradus.training.live_run import LiveRun, TrainingState
from gradus.training.loop import train
from gradus.training.loss_scaling import LossScale, step_unless
from gradus.training.optimizers import build_optimizer

CPU = torch.device("cpu")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 0.1, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    "lamb": {"lr": 0.1, "weight_decay": 0.1},
    "lars": {"lr": 0.1, "weight_decay": 0.1},
    "adadelta": {"lr": 0.1, "weight_decay": 0.1},
}


@pytest.mark.parametrize(("interval", "share_of_overflows"), [(1, 0.3), (3, 0.1), (7, 0.02), (2, 0.9), (3, 0.0)])
def test_scales_are_those_of_grad_scaler_at_every_step(
    monkeypatch: pytest.MonkeyPatch, interval: int, share_of_overflows: float
) -> None:
    """With no overflow at all the scale meets the end of fp32, where GradScaler stops growing."""
    monkeypatch.setattr(loss_scaling, "GROWTH_INTERVAL", interval)
    ours = LossScale(CPU)
    theirs = torch.amp.GradScaler("cpu", growth_interval=interval)
    assert ours.scale.item() == theirs.get_scale()
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    theirs.scale(torch.zeros(()))
    pattern = torch.rand(400, generator=torch.Generator().manual_seed(interval)) < share_of_overflows
    seen = set()
    for overflows in pattern.tolist():
        parameter.grad = torch.full((3,), math.inf if overflows else 0.0)
        theirs.unscale_(optimizer)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(1.0 if overflows else 0.0))
        assert ours.scale.item() == theirs.get_scale()
        seen.add(ours.scale.item())
    assert len(seen) > 3, "the pattern must move the scale"


def test_the_interval_of_growth_is_that_of_grad_scaler() -> None:
    theirs = torch.amp.GradScaler("cpu")
    assert theirs.get_growth_interval() == loss_scaling.GROWTH_INTERVAL
    assert theirs.get_growth_factor() == loss_scaling.GROWTH
    assert theirs.get_backoff_factor() == loss_scaling.BACKOFF
    assert theirs.get_scale() == loss_scaling.INITIAL_SCALE


def test_unscaling_divides_every_gradient_by_the_scale() -> None:
    gradients = [torch.randn(4, 3), torch.randn(2, dtype=torch.float64)]
    expected = [g / 65536.0 for g in gradients]
    scale(gradients, 1.0 / LossScale(CPU).scale)
    for found, wanted in zip(gradients, expected, strict=True):
        assert torch.equal(found, wanted)


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every parameter, and every tensor of optimizer state that is not zero."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            if isinstance(value, Tensor) and value.any():
                found[f"{name}.{key}"] = value.clone()
    return found


def set_gradients(model: nn.Module, seed: int, poison: float | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    if poison is not None:
        first = next(model.parameters())
        assert first.grad is not None
        first.grad.view(-1)[0] = poison


@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("use", OPTIMIZERS)
def test_a_skipped_step_leaves_parameters_and_optimizer_state_as_they_were(use: str, poison: float) -> None:
    model = two_layers()
    optimizer = build_optimizer(model, OptimizerBlock(use=use, **OPTIMIZERS[use]))
    for step in range(3):
        set_gradients(model, step)
        step_unless(optimizer, torch.tensor(0.0))
    before = snapshot(model, optimizer)
    assert len(before) > len(list(model.parameters())), "there must be state to spoil"
    set_gradients(model, 9, poison)
    step_unless(optimizer, torch.tensor(1.0))
    after = snapshot(model, optimizer)
    assert after.keys() == before.keys()
    for name, value in after.items():
        assert torch.equal(value, before[name]), name


OF_SGD: list[dict[str, Any]] = [{"dampening": 0.5}, {"nesterov": True}, {"momentum": 0.0}]


@pytest.mark.parametrize(("use", "options"), [*((use, {}) for use in OPTIMIZERS), *(("sgd", more) for more in OF_SGD)])
def test_a_run_whose_first_steps_overflow_goes_on_as_if_they_had_not_been(use: str, options: dict[str, Any]) -> None:
    """An uninitialised momentum buffer would show here."""
    weights = []
    for overflows in (0, 2):
        model = two_layers()
        optimizer = build_optimizer(model, OptimizerBlock(use=use, **{**OPTIMIZERS[use], **options}))
        for _ in range(overflows):
            set_gradients(model, 9, math.inf)
            step_unless(optimizer, torch.tensor(1.0))
        for step in range(4):
            set_gradients(model, step)
            step_unless(optimizer, torch.tensor(0.0))
        weights.append([p.detach().clone() for p in model.parameters()])
    for undisturbed, found in zip(*weights, strict=True):
        assert torch.equal(found, undisturbed)


def test_the_flag_does_not_stay_on_the_optimizer() -> None:
    model = two_layers()
    optimizer = build_optimizer(model, OptimizerBlock(use="adamw", lr=0.1))
    set_gradients(model, 1)
    step_unless(optimizer, torch.tensor(1.0))
    assert not hasattr(optimizer, "found_inf")
    set_gradients(model, 1)
    before = next(model.parameters()).detach().clone()
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before)


STEPS = 12
TOO_HIGH = 2.0**20


def fp16_run(folder: Path, attempt: int = 1, first_scale: float | None = None, stop_step: int | None = None) -> LiveRun:
    optimizer = {**MODELS["gpt"]["optimizer"], "warmup": 4}
    changes: dict[str, Any] = {"steps": STEPS, "batch": 4, "plan": {"precision": "fp16"}, "optimizer": optimizer}
    changes["evaluate"] = {"batches": 1}
    recipe = recipe_for("gpt", **changes, deterministic=True)
    live = LiveRun.from_recipe(recipe, default_plan(recipe, CLUSTER, 1).plan, RunDirectory(folder), attempt, alone(CPU))
    assert live.step.loss_scale is not None
    if first_scale is not None:
        live.step.loss_scale.scale.fill_(first_scale)
    if stop_step is not None:
        stopped_at(live, stop_step)
    ending = train(live)
    live.recorder.close(state=ending.state)
    return live


@pytest.fixture(scope="module", autouse=True)
def _backend_switches() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small are slower on more, much slower where others compute as well
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """A run whose loss scale is so high that its first steps overflow."""
    run = RunDirectory.create(tmp_path_factory.mktemp("runs"), "never-stopped")
    return fp16_run(run.path, first_scale=TOO_HIGH)


def test_steps_that_overflow_are_counted_logged_and_not_scheduled(never_stopped: LiveRun) -> None:
    live, run = never_stopped, never_stopped.run
    skipped = live.state.skipped_steps
    assert skipped[:2] == [0, 1], "the scale is too high at first, and is halved until it is not"
    assert len(skipped) < STEPS / 2

    events = [event for event in read_events(run) if event["event"] == "skipped-step"]
    assert [event["step"] for event in events] == [step + 1 for step in skipped]
    assert [event["scale_before"] for event in events] == [TOO_HIGH / 2**before for before in range(len(skipped))]
    assert all(event["scale_after"] == event["scale_before"] / 2 for event in events)
    assert [event["skipped_steps"] for event in events] == list(range(1, len(skipped) + 1))

    # An overflow is known one step late: the step after it still has the rate that it would have had.
    positions = [step - sum(s <= step - 2 for s in skipped) for step in range(STEPS)]
    rows = read_metrics(run)
    assert [row["lr"] for row in rows] == [live.schedule(position) for position in positions]
    assert positions[-1] == STEPS - 1 - len(skipped)
    assert live.step.loss_scale is not None
    assert live.step.loss_scale.scale.item() == TOO_HIGH / 2 ** len(skipped)
    assert all(math.isfinite(row["loss"]) for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_weights_do_not_move_while_steps_are_skipped(tmp_path: Path, never_stopped: LiveRun) -> None:
    """The first step that is not skipped starts from the initial weights."""
    first_good = next(step for step in range(STEPS) if step not in never_stopped.state.skipped_steps)
    frozen = fp16_run(RunDirectory.create(tmp_path, "frozen").path, first_scale=float("inf"))
    assert frozen.state.skipped_steps == list(range(STEPS))
    losses, of_initial_weights = ([row["loss"] for row in read_metrics(live.run)] for live in (never_stopped, frozen))
    assert losses[: first_good + 1] == of_initial_weights[: first_good + 1]
    assert losses[first_good + 1] != of_initial_weights[first_good + 1]


@pytest.mark.parametrize("stop_step", [0, 1, 2, 5])
def test_a_run_resumed_after_skipped_steps_has_the_rates_of_one_never_stopped(
    tmp_path: Path, never_stopped: LiveRun, stop_step: int
) -> None:
    run = RunDirectory.create(tmp_path, "stopped")
    first = fp16_run(run.path, first_scale=TOO_HIGH, stop_step=stop_step)
    assert first.state.step == stop_step + 1, "a request is seen at the next boundary"
    run.stop_file.unlink()
    second = fp16_run(run.path, attempt=2)
    assert second.state.skipped_steps == never_stopped.state.skipped_steps
    rows, expected = read_metrics(run), read_metrics(never_stopped.run)
    for key in ("step", "lr", "loss", "grad_norm", "loss_scale"):
        assert [row[key] for row in rows] == [row[key] for row in expected], key
    for name, weight in second.model.state_dict().items():
        assert torch.equal(weight, never_stopped.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("step", "skipped", "position"),
    [(0, [], 0), (1, [0], 1), (2, [0], 1), (3, [0, 1], 1), (3, [0, 2], 2), (4, [0, 2], 2), (10, [0, 2], 8)],
)
def test_the_schedule_learns_of_a_skipped_step_one_step_late(step: int, skipped: list[int], position: int) -> None:
    assert TrainingState(step=step, skipped_steps=skipped).schedule_position() == position
