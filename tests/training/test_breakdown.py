"""Where the time of steps goes, written down by a rank that trains, and the sums over a window on a GPU."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from training_cases import CLUSTER

import gradus
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.record.timings import by_rank, mean_seconds, read_timings
from gradus.schema.breakdown import KINDS
from gradus.schema.recipe import Recipe
from gradus.training.breakdown import Window, metrics_of, with_more
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

USER_FILE = """\
import time

import torch
from torch import nn

import gradus


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, None


class Model(nn.Module):
    def __init__(self, forward=0.0, backward=0.0, evaluation=0.0):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.slow = (forward, backward, evaluation)

    def forward(self, x, y):
        time.sleep(self.slow[0] if self.training else self.slow[2])
        return ((Slow.apply(self.layer(x), self.slow[1]) - y) ** 2).mean()


class Data:
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.seconds)
        x = torch.full((4,), index / 64)
        return x, x[:1]


class Optimizer(torch.optim.SGD):
    def __init__(self, parameters, lr=1e-3, seconds=0.0):
        super().__init__(parameters, lr=lr)
        self.seconds = seconds

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


class Hook(gradus.Hook):
    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def on_step(self, run):
        time.sleep(self.seconds)
"""
SECONDS = 0.03


def trained(folder: Path, **changes: Any) -> RunDirectory:
    """A few steps of a run in this process, which writes all there is."""
    run, lost = trained_anyhow(folder, **changes)
    assert lost == []
    return run


def trained_anyhow(folder: Path, in_the_way: str | None = None, **changes: Any) -> tuple[RunDirectory, list[str]]:
    """With what could not be written."""
    file = folder / "slow.py"
    file.write_text(USER_FILE)
    slow = {key: changes.pop(key) for key in ("forward", "backward", "evaluation") if key in changes}
    document: dict[str, Any] = {
        "name": "timed",
        "model": {"use": f"{file}:Model", **slow},
        "data": {"use": f"{file}:Data", "seconds": changes.pop("data", 0.0)},
        "hooks": [{"use": f"{file}:Hook", "seconds": changes.pop("hook", 0.0)}],
        "optimizer": {"use": f"{file}:Optimizer", "lr": 1e-3, "seconds": changes.pop("optimizer", 0.0)},
        "batch": 2,
        "steps": 7,
        "log_every": 3,
        "evaluate": {"batches": 1},
        "plan": {"workers": 0},
        **changes,
    }
    recipe = resolved(Recipe.from_document(document))
    run = RunDirectory.create(folder, recipe.name)
    if in_the_way is not None:
        (run.path / in_the_way).write_text("a file, and no folder")
    attempt = run.new_attempt()
    plan = default_plan(recipe, CLUSTER, 1).plan
    live = LiveRun.from_recipe(recipe, plan, run, attempt, alone(torch.device("cpu")), watched=False)
    ending = train(live)
    return run, live.recorder.close(state=ending.state)


@pytest.mark.parametrize("kind", ["forward", "backward", "optimizer", "data", "hook"])
def test_a_slow_part_is_charged_where_it_is_slow(tmp_path, kind):
    slept = SECONDS / 2 if kind == "data" else SECONDS  # for each of two samples
    run = trained(tmp_path, **{kind: slept})
    lines = read_timings(run)
    found = mean_seconds(lines)
    charged = "other" if kind == "hook" else kind
    times = sum(line.steps for line in lines) - (kind == "hook")  # a hook's time is the next step's
    assert sum(line.steps * line.seconds[charged] for line in lines) >= 0.95 * SECONDS * times
    assert max((k for k in ("data", "forward", "backward", "optimizer", "other")), key=found.__getitem__) == charged
    assert found["host_to_device"] == found["exposed_communication"] == 0.0, "one rank, and no device"


def test_lines_come_with_logged_steps_and_add_up_to_the_time_that_passed(tmp_path):
    began = time.time()
    run = trained(tmp_path, forward=0.01, evaluation=0.05, evaluate={"every": 2, "batches": 1}, checkpoint={"every": 4})
    passed = time.time() - began
    lines = read_timings(run)
    assert [(line.step, line.steps) for line in lines] == [(1, 1), (3, 2), (6, 3), (7, 1)]
    for line in lines:
        assert set(line.seconds) == set(KINDS)
        assert sum(line.seconds.values()) == pytest.approx(line.step_seconds)
        assert line.measured_steps == line.steps
        assert line.memory_peak_bytes is not None
        assert line.memory_reserved_bytes is None, "of a GPU only"
        assert line.own_seconds is not None
        assert line.own_seconds <= line.step_seconds
    total = sum(line.step_seconds * line.steps for line in lines)
    assert lines[2].time - lines[0].time < total < passed
    evaluations = sum(line.seconds["evaluation"] * line.steps for line in lines)
    assert evaluations >= 0.95 * 4 * 0.05, "after steps 2, 4, 6 and, after the last line, 7"
    assert all(line.seconds["checkpoint"] > 0 for line in lines if line.step in (6, 7))


def test_steps_too_short_for_a_line_share_one(tmp_path, monkeypatch):
    monkeypatch.setattr("gradus.training.breakdown.LEAST_SECONDS", 1000.0)
    [line] = read_timings(trained(tmp_path, log_every=1))
    assert (line.step, line.steps) == (7, 7)


def test_metrics_have_the_same_numbers_and_keep_the_meaning_of_step_seconds(tmp_path):
    run = trained(tmp_path, forward=0.01, evaluation=0.05, evaluate={"every": 2, "batches": 1})
    rows = {row["step"]: row for row in read_metrics(run) if row.get("loss") is not None}
    line = next(line for line in read_timings(run) if line.step == 6)
    for kind in ("host_to_device", "forward", "backward", "optimizer", "exposed_communication", "checkpoint", "other"):
        assert rows[6][f"{kind}_seconds"] == line.seconds[kind]
    assert rows[6]["step_seconds"] < line.step_seconds - line.seconds["evaluation"] / 2


def test_a_run_goes_on_without_its_timings_where_they_cannot_be_written(tmp_path, capsys):
    run, lost = trained_anyhow(tmp_path, in_the_way="timings")
    assert [problem for problem in lost if "rank-0.jsonl" in problem]
    assert "timings" in capsys.readouterr().out, "and it is said while there is time to do something about it"
    assert read_metrics(run)[-1]["step"] == 7


def test_an_own_loop_is_timed_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = {"name": "own", "batch": 2, "steps": 4, "log_every": 2, "plan": {"workers": 0}}
    run = gradus.Run.start(recipe, runs=tmp_path / "runs")
    made = torch.nn.Linear(4, 1)
    model, _ = run.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    dataset = [(torch.ones(4), torch.ones(1)) for _ in range(16)]
    for x, y in run.batches(dataset):
        time.sleep(SECONDS)  # of the body: forward
        run.step(((model(x) - y) ** 2).mean())
        time.sleep(2 * SECONDS)  # between steps
    directory = RunDirectory(run.directory)
    run.finish()
    found = mean_seconds([line for line in read_timings(directory) if line.step > 1])
    assert found["forward"] >= 0.95 * SECONDS
    assert found["other"] >= 0.95 * 2 * SECONDS
    assert found["data"] < SECONDS
    assert by_rank(read_timings(directory)).keys() == {0}


def window(**values: Any) -> Window:
    made = Window()
    for name, value in values.items():
        setattr(made, name, value)
    return made


def test_unmeasured_steps_of_a_gpu_are_divided_as_the_measured_ones():
    made = window(steps=10, seconds=10.0, fetching=2.0, host=dict.fromkeys(KINDS, 0.0))
    measured = [{**dict.fromkeys(KINDS, 0.0), "data": 0.3, "host_to_device": 0.1, "forward": 0.2, "backward": 0.6}]
    found = made.on_gpu(measured)
    assert found["data"] == pytest.approx(1.5)
    assert found["host_to_device"] == pytest.approx(0.5)
    assert found["forward"] == pytest.approx(2.0)
    assert found["backward"] == pytest.approx(6.0)
    assert sum(found.values()) == pytest.approx(10.0)


def test_saves_and_evaluations_come_on_top_of_a_gpus_steps():
    host = {**dict.fromkeys(KINDS, 0.0), "evaluation": 3.0, "checkpoint": 1.0, "forward": 99.0}
    found = window(steps=2, seconds=4.0, between=5.0, host=host).on_gpu([{**dict.fromkeys(KINDS, 0.0), "forward": 1.0}])
    assert (found["evaluation"], found["checkpoint"], found["forward"]) == (3.0, 1.0, 4.0)
    assert found["other"] == pytest.approx(1.0), "between steps, and neither saved nor evaluated"


def test_without_a_measured_step_nothing_is_made_up():
    found = window(steps=1, seconds=2.0, fetching=0.5).on_gpu([])
    assert (found["data"], found["other"], sum(found.values())) == (0.5, 1.5, 2.0)


def test_data_never_takes_more_than_the_steps_did():
    found = window(steps=1, seconds=1.0, fetching=3.0).on_gpu([])
    assert sum(found.values()) == 1.0
    assert min(found.values()) >= 0.0


def test_what_follows_the_last_step_is_added_to_its_line():
    line = {"steps": 4, "step_seconds": 1.0, "seconds": {**dict.fromkeys(KINDS, 0.0), "forward": 1.0}, "time": 0.0}
    found = with_more(line, {"evaluation": 2.0})
    assert found["seconds"]["evaluation"] == 0.5
    assert found["step_seconds"] == 1.5
    assert "evaluation_seconds" not in metrics_of(found["seconds"]), "which is that of a whole evaluation"
