"""A trial measures, and whatever goes wrong in it costs that trial alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tried_models
from tried_models import recipe_document

from gradus.bench.tried import Ranks, Repeated, Trial, Tried, interleaved, noise_between, repeated
from gradus.planner.resolve import resolved
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

HERE = Path(tried_models.__file__).parent


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(1) as ranks:
        yield ranks


def trial(batch: int = 8, ranks: int = 1, steps: int = 6, limit: float = 120.0, **model: Any) -> Trial:
    recipe = resolved(Recipe.from_document(recipe_document(batch, **model), folder=HERE))
    plan = Plan(mesh=Mesh(replicate=ranks), micro_batch=batch // ranks, workers=0)
    return Trial(recipe, plan, steps=steps, seconds=0.2, limit_seconds=limit)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_trial_measures_speed_memory_and_loss_and_leaves_nothing(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = ranks.try_out(trial(steps=40))
    assert found.measured, found.why
    assert found.device == "cpu"
    assert len(found.step_seconds) >= 3
    assert min(found.step_seconds) > 0
    assert found.samples_per_second == pytest.approx(8 / found.seconds_per_step)
    assert found.memory_bytes is not None
    assert all(0 < loss < 2 for loss in found.losses)
    assert list(tmp_path.iterdir()) == []


def test_the_same_trial_again_has_the_same_losses(ranks: Ranks) -> None:
    first, second = (ranks.try_out(trial(steps=6).changed(whole=True)) for _ in range(2))
    assert first.losses == second.losses
    assert len(first.losses) == 9  # the warm-up's and those of the timed steps


def test_running_out_of_memory_costs_a_trial_and_not_the_process(ranks: Ranks) -> None:
    assert ranks.try_out(trial()).measured
    before = ranks.process_ids
    found = ranks.try_out(trial(hungry=64).changed(host_memory_bytes=200 << 20))
    assert found.state == "out-of-memory"
    assert "allocate" in found.why
    assert ranks.try_out(trial()).measured
    assert ranks.process_ids == before


def test_what_a_model_keeps_for_backward_is_in_its_memory(ranks: Ranks) -> None:
    small, large = (ranks.try_out(trial(hungry=mib)) for mib in (0, 8))
    assert small.memory_bytes is not None
    assert large.memory_bytes is not None
    kept = 8 * 8 << 20  # MiB for each of 8 samples
    assert large.memory_bytes - small.memory_bytes > kept


def test_an_error_of_the_users_code_is_told_and_the_next_trial_works(ranks: Ranks) -> None:
    found = ranks.try_out(trial(fails="the moon is full"))
    assert found.state == "failed"
    assert "the moon is full" in found.why
    assert ranks.try_out(trial()).measured


def test_what_the_device_cannot_do_is_refused_with_the_reason(ranks: Ranks) -> None:
    found = ranks.try_out(trial().with_plan(precision="tf32"))
    assert found.state == "refused"
    assert "TF32 is a mode of NVIDIA tensor cores" in found.why


@pytest.mark.slow
@pytest.mark.long
def test_a_trial_that_hangs_is_ended_and_the_next_has_a_fresh_process(ranks: Ranks) -> None:
    assert ranks.try_out(trial()).measured
    (before,) = ranks.process_ids
    found = ranks.try_out(trial(stalls=True, limit=3.0))
    assert found.state == "too-slow"
    assert "3 s" in found.why
    assert gone(before)
    assert ranks.try_out(trial()).measured


def test_loading_that_comes_in_bursts_is_timed_over_whole_bursts(ranks: Ranks) -> None:
    """With workers, several batches are there at once and then none: single steps would look far too fast."""
    slow = trial(batch=4, data={"seconds": 0.01}).changed(steps=24).with_plan(workers=2)
    found = ranks.try_out(slow)
    assert found.measured, found.why
    assert found.samples_per_second is not None
    assert found.samples_per_second < 2 / 0.01 * 1.3  # two workers, each a row in 10 ms
    assert found.data_share is not None
    assert found.data_share > 0.5


@pytest.mark.slow
@pytest.mark.long
def test_memory_that_ends_on_one_of_two_ranks_ends_the_trial_on_both() -> None:
    with Ranks(2) as two:
        assert two.try_out(trial(ranks=2)).measured
        before = two.process_ids
        began = time.monotonic()
        found = two.try_out(trial(ranks=2, hungry=64, hungry_rank=1).changed(host_memory_bytes=200 << 20))
        assert found.state == "out-of-memory"
        assert found.why.startswith("rank 1: ")
        assert time.monotonic() - began < 100, "nobody waits for a collective that cannot end"
        assert all(gone(pid) for pid in before)
        again = two.try_out(trial(ranks=2))
        assert again.measured
        assert not any(gone(pid) for pid in two.process_ids)
        last = two.process_ids
    assert all(gone(pid) for pid in last)


def tried(rate: float, memory: int = 1) -> Tried:
    return Tried("measured", batch=1, step_seconds=(1 / rate,), memory_bytes=memory)


def test_repeats_count_by_their_median_and_their_range() -> None:
    one, other = (Repeated(tuple(map(tried, rates))) for rates in ((90, 100, 130), (99, 100, 101)))
    assert one.samples_per_second == pytest.approx(100)
    assert one.spread == pytest.approx(0.2)
    assert noise_between(one, other) == pytest.approx(0.21)
    assert noise_between(other, other) == pytest.approx(0.02)


class Counting(Ranks):
    """Notes what it is asked to try, and fails at what it is told to."""

    def __init__(self, failing: str) -> None:
        super().__init__(1)
        self.asked: list[str] = []
        self.failing = failing

    def try_out(self, trial: Trial) -> Tried:
        self.asked.append(trial.recipe.name)
        return Tried("failed", "as planned") if trial.recipe.name == self.failing else tried(1.0)


def test_trials_take_turns_and_one_that_fails_is_left_out() -> None:
    plain = trial()
    trials = {name: plain.changed(recipe=plain.recipe.model_copy(update={"name": name})) for name in "abc"}
    ranks = Counting(failing="b")
    found = repeated(list(interleaved(ranks, trials, 3)))
    assert "".join(ranks.asked) == "abc" + "ca" + "ac"
    assert found["a"].measured
    assert found["b"].failure is not None
    assert len(found["c"].tries) == 3
