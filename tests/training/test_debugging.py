"""What helps to find a mistake: anomaly mode and dry runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from training_cases import CLUSTER, recipe_for
from user_runs import line_recipe

from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.record.outcome import read_outcome
from gradus.record.variables import DRY_RUN
from gradus.schema.cluster import Cluster
from gradus.schema.recipe import Recipe
from gradus.training import dry_run
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.rank import run_rank

CPU = torch.device("cpu")


class NanInBackward(nn.Module):
    """sqrt has an infinite slope at zero, and zero times that is no number."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.sqrt(self.weight * 0) * x).sum(1, keepdim=True)


def live_run(recipe: Recipe, run: RunDirectory) -> LiveRun:
    return LiveRun.from_recipe(recipe, default_plan(recipe, CLUSTER, 1).plan, run, 1, alone(CPU))


def test_anomaly_mode_names_the_forward_operation(run: RunDirectory) -> None:
    recipe = line_recipe(model={"use": f"{__file__}:NanInBackward"}, anomaly=True)
    try:
        with (
            pytest.warns(UserWarning, match=r"(?s)MulBackward0.*test_debugging.py.*torch.sqrt\(self.weight \* 0\)"),
            pytest.raises(RuntimeError, match="returned nan values"),
        ):
            train(live_run(recipe, run))
    finally:
        torch.autograd.set_detect_anomaly(False)


def test_a_run_without_it_switches_it_off_again(run: RunDirectory) -> None:
    torch.autograd.set_detect_anomaly(True)
    live_run(line_recipe(), run).recorder.close()
    assert not torch.is_anomaly_enabled()


def test_one_sample_can_be_learnt_by_heart(run: RunDirectory) -> None:
    data = {"use": "stdlib-text", "max_bytes": 200_000, "limit": 1, "validation": 0}
    live = live_run(recipe_for("gpt", data=data, steps=200, batch=4), run)
    train(live)
    live.recorder.close()
    assert read_metrics(run)[-1]["loss"] < 0.1


def test_a_dry_run_takes_one_step_and_says_what_was_built(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(DRY_RUN, "1")
    recipe = recipe_for("gpt", steps=100_000, evaluate={"every": 50})
    attempt = run.new_attempt()
    folder = run.attempt_path(attempt)
    (folder / "recipe.yaml").write_text(recipe.to_yaml())
    (folder / "plan.yaml").write_text(default_plan(recipe, CLUSTER, 1).plan.to_yaml())
    assert run_rank(run, attempt, alone(CPU)).state == "finished"
    [row] = read_metrics(run)
    assert (row["step"], row["samples"]) == (1, 24)
    summary = "\n".join((read_outcome(run, attempt) or {})["summary"])
    parameters = sum(p.numel() for p in live_parameters(recipe))
    assert f"GPT, {parameters:,} parameters" in summary
    assert f"loss {row['loss']:.4g}; validation loss {row['validation_loss']:.4g}" in summary
    assert "GiB" in summary


def live_parameters(recipe: Recipe) -> list[nn.Parameter]:
    from gradus.training.building import build_model

    return list(build_model(recipe, CPU, torch.float32).parameters())


def test_a_dry_run_keeps_everything_but_the_budget() -> None:
    recipe = line_recipe(steps=None, epochs=3, evaluate={"every": 5, "metric": "loss"}, checkpoint={"best": True})
    short = dry_run.shortened(recipe)
    assert (short.steps, short.epochs, short.evaluate.batches, short.data.limit) == (1, None, 1, recipe.batch)
    assert (short.model, short.optimizer, short.checkpoint) == (recipe.model, recipe.optimizer, recipe.checkpoint)


@pytest.mark.parametrize("chunks", [64, 65])
def test_more_parts_of_a_loss_than_there_are_tokens_are_told(run: RunDirectory, chunks: int) -> None:
    document = {"name": "r", "model": {"use": "gpt", "layers": 1, "width": 8, "heads": 1, "context": 16}}
    document |= {"data": {"use": "synthetic-tokens"}, "batch": 4, "steps": 1, "optimizer": {"lr": 0.1}}
    live_run(resolved(Recipe.from_document({**document, "plan": {"loss_chunks": chunks}})), run).recorder.close()
    warnings = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    told = ["plan.loss_chunks is 65, and a micro-batch has 64 tokens: each is a part of its own"]
    assert warnings == told * (chunks > 64)


def test_a_node_that_lacks_the_gpus_of_its_cluster_says_that_it_trains_on_the_cpu(run: RunDirectory) -> None:
    folder = run.attempt_path(run.new_attempt())
    cluster = Cluster(name="site", nodes=1, gpus_per_node=2, gpu="A100 SXM 80GB", cpu_cores=8, memory_gib=64)
    (folder / "cluster.yaml").write_text(cluster.to_yaml())
    live_run(line_recipe(), run).recorder.close()
    (warning,) = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    assert warning.startswith("trains on the CPU: site promises 2 × A100 SXM 80GB on each node")
