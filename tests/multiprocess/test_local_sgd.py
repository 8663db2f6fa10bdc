"""Local SGD: replicas that step alone and are averaged, against the same written out in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from training_cases import Trained, recipe_for, run_on, same_weights, trained

from gradus.data.loader import Loader, Slices
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.recipe import Recipe
from gradus.training.building import build_model, open_data
from gradus.training.optimizers import build_optimizer

EVERY, STEPS, RANKS, BATCH = 3, 8, 2, 8
CPU = torch.device("cpu")


def recipe_of(case: str = "gpt", **changes: Any) -> Recipe:
    plan = {"precision": "fp64", "mesh": {"replicate": RANKS}, "synchronise_every": EVERY, **changes.pop("plan", {})}
    optimizer = {"use": "adamw", "lr": 3e-3, "weight_decay": 0.1, "clip": 0.5}
    return recipe_for(case, **{"batch": BATCH, "steps": STEPS, "optimizer": optimizer, **changes, "plan": plan})


def written_out(recipe: Recipe) -> tuple[list[float], dict[str, Tensor]]:
    """Each replica's steps one after the other; every third, and at the end, the means of everything."""
    data = open_data(recipe, "train")
    assert data is not None
    replicas = [build_model(recipe, CPU, torch.float64) for _ in range(RANKS)]
    optimizers = [build_optimizer(replica, recipe.optimizer) for replica in replicas]
    slices = [Slices(BATCH, BATCH // RANKS, 1, rank, STEPS * BATCH) for rank in range(RANKS)]
    streams = [Loader(data, s, CPU, torch.float64, seed=recipe.seed).micro_batches(0, STEPS) for s in slices]
    losses = []
    for step in range(STEPS):
        loss_sum = count = 0.0
        for replica, optimizer, stream in zip(replicas, optimizers, streams, strict=True):
            output = replica(**next(stream).inputs)  # type: ignore[arg-type]
            (output.loss_sum / output.count).backward()
            nn.utils.clip_grad_norm_(replica.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] = recipe.optimizer.lr
            optimizer.step()
            optimizer.zero_grad()
            loss_sum, count = loss_sum + output.loss_sum.item(), count + output.count.item()
        losses.append(loss_sum / count)
        if (step + 1) % EVERY == 0 or step == STEPS - 1:
            average(replicas, optimizers)
    return losses, {name: weight.detach() for name, weight in replicas[0].state_dict().items()}


@torch.no_grad()
def average(replicas: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, parameters, strict=True)]
        for tensors in (parameters, *([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq"))):
            mean = torch.stack([tensor.detach() for tensor in tensors]).mean(0)
            for tensor in tensors:
                tensor.copy_(mean)


def assert_weights_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        scale = weight.abs().max().clamp(min=1e-30)
        assert ((found[name] - weight).abs().max() / scale).item() < 1e-9, name


@pytest.fixture(scope="module")
def local(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return run_on(pool, RANKS, tmp_path_factory.mktemp("local"), recipe_of())


def test_three_steps_alone_are_the_same_as_written_out_in_one_process(local: Trained) -> None:
    losses, weights = written_out(recipe_of())
    assert [row["loss"] for row in local.rows if "loss" in row] == pytest.approx(losses, rel=1e-9)
    assert_weights_close(local.weights, weights)


def test_replicas_that_meet_at_every_step_are_plain_replicas(pool: Pool, local: Trained, tmp_path: Path) -> None:
    plain = run_on(pool, RANKS, tmp_path, recipe_of(plan={"synchronise_every": 1}))
    alone = run_on(pool, 1, tmp_path, recipe_of(plan={"synchronise_every": 1, "mesh": {"replicate": 1}}))
    assert [row["loss"] for row in plain.rows if "loss" in row] == pytest.approx(
        [row["loss"] for row in alone.rows if "loss" in row], rel=1e-9
    )
    assert_weights_close(plain.weights, alone.weights)
    # The first step of a replica begins where all begin; what it does is its own.
    assert local.rows[0]["loss"] == pytest.approx(plain.rows[0]["loss"], rel=1e-9)
    assert local.rows[1]["loss"] != pytest.approx(plain.rows[1]["loss"], rel=1e-6)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_run_that_was_never_stopped(pool: Pool, tmp_path: Path) -> None:
    """The checkpoint of step 4 lies between two meetings: replicas meet for it, optimizers included."""
    whole = run_on(pool, RANKS, tmp_path, recipe_of(checkpoint={"every": 4}))
    run = RunDirectory.create(tmp_path, "stopped")
    for number, steps in enumerate((4, STEPS), start=1):
        results = pool.run(RANKS, trained, str(run.path), recipe_of(steps=steps, checkpoint={"every": 4}), number)
    resumed = same_weights(results)
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in resumed.items())
    assert [row["loss"] for row in read_metrics(run)] == [row["loss"] for row in whole.rows]


def test_batch_statistics_are_of_each_replica_and_averaged_with_it(pool: Pool, tmp_path: Path) -> None:
    found = run_on(pool, RANKS, tmp_path, recipe_of("resnet18", steps=2, plan={"synchronise_every": 2}))
    assert all(value.isfinite().all() for value in found.weights.values() if value.is_floating_point())
    assert {int(v) for name, v in found.weights.items() if name.endswith("num_batches_tracked")} == {2}


def test_a_rank_without_samples_would_have_no_batch_statistics(pool: Pool, tmp_path: Path) -> None:
    data = {"use": "synthetic-images", "size": 16, "samples": 200, "limit": 10}
    with pytest.raises(AssertionError, match=r"plan.synchronise_every: found 3, but the model has batch norm"):
        run_on(pool, RANKS, tmp_path, recipe_of("resnet18", data=data, epochs=1, steps=None))


def test_gradients_that_travel_in_bf16_train_nearly_alike(pool: Pool, tmp_path: Path) -> None:
    plan = {"synchronise_every": 1}
    exact = run_on(pool, RANKS, tmp_path, recipe_of(plan=plan))
    rounded = run_on(pool, RANKS, tmp_path, recipe_of(plan={**plan, "compression": "bf16"}))
    losses = [[row["loss"] for row in run.rows if "loss" in row] for run in (exact, rounded)]
    assert losses[1][0] == pytest.approx(losses[0][0], rel=1e-12), "no gradient has travelled yet"
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)
    assert losses[1][-1] != pytest.approx(losses[0][-1], rel=1e-9), "nothing was rounded"
