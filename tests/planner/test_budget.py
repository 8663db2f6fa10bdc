"""The whole run from one step: as long as training makes it, and with failures as a simulation of them has it."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from gradus.planner.budget import (
    ASSUMED_RESTART_SECONDS,
    ASSUMED_WRITE_GB_PER_SECOND,
    Length,
    between_failures,
    budget,
    budget_basis,
    daly_interval,
    dataset_length,
    expected_goodput,
    length_of,
    stopped_seconds,
    young_interval,
)
from gradus.planner.published import training_days, training_flops
from gradus.planner.speed.host_copy import HostCopy
from gradus.schema.cluster import Cluster, Storage
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

MINUTE, HOUR, DAY = 60, 3600, 86400
IMAGENET = 1_281_167  # images of ILSVRC 2012


def recipe(**changes: Any) -> Recipe:
    document = {
        "name": "tiny",
        "model": {"use": "gpt"},
        "data": {"use": "synthetic-tokens", "context": 128, "vocabulary": 64},
        "batch": 32,
        "optimizer": {"lr": 0.1},
    }
    return Recipe.from_document({**document, **changes})


def site(**changes: Any) -> Cluster:
    known: dict[str, Any] = {"nodes": 16, "gpus_per_node": 8, "gpu": "A100-SXM4-80GB", "cpu_cores": 64}
    return Cluster(name="site", memory_gib=512, **{**known, **changes})


def test_steps_epochs_and_tokens_come_to_steps():
    assert length_of(recipe(steps=10), None, None) == Length(320, 10)
    assert length_of(recipe(epochs=1.5), 100, None) == Length(150, 5)
    assert length_of(recipe(tokens=32 * 128 * 7 + 1), None, 128) == Length(8 * 32, 8)
    assert length_of(recipe(epochs=2), None, 128) is None, "nobody knows how many samples there are"
    with pytest.raises(InputError, match="no tokens to count"):
        length_of(recipe(tokens=1000), 100, None)


def test_a_dataset_is_counted_where_it_can_be_opened_on_the_spot():
    opened = dataset_length(recipe(epochs=1, data={"use": "synthetic-tokens", "samples": 1000, "context": 8}))
    assert opened == 900, "without the tenth that is held out"
    assert dataset_length(recipe(epochs=1, data={"use": "own.py:Data"})) is None


def test_the_length_of_a_mixture_is_known_where_that_of_each_source_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("of cats and dogs " * 50)
    sources = {
        name: {"use": "synthetic-tokens", "samples": count, "context": 8, "weight": 1}
        for name, count in (("a", 1000), ("b", 500))
    }
    assert dataset_length(recipe(epochs=1, data={"use": "mixture", "sources": sources})) == 1350, "a tenth is held out"
    sources["text"] = {"use": "text", "path": str(tmp_path / "a.txt"), "context": 8, "weight": 1}
    assert dataset_length(recipe(epochs=1, data={"use": "mixture", "sources": sources})) is None


@pytest.mark.parametrize(("between", "best"), [(24 * HOUR, 117), (6 * HOUR, 57), (15 * MINUTE, 9.1)])
def test_the_interval_is_that_of_dalys_figures(between, best):
    """Figures 3, 4 and 5 of Daly 2006: δ = 5 min."""
    assert daly_interval(5 * MINUTE, between) / MINUTE == pytest.approx(best, rel=0.006)


def test_young_is_the_first_order_of_it():
    assert young_interval(2 * MINUTE, 12 * HOUR) == pytest.approx(math.sqrt(2 * 120 * 43200))
    assert daly_interval(1.0, 30 * DAY) == pytest.approx(young_interval(1.0, 30 * DAY), rel=0.001)
    assert daly_interval(3 * HOUR, HOUR) == HOUR, "beyond what the series is good for"


@pytest.mark.parametrize("between", [40 * MINUTE, 3 * HOUR, 2 * DAY])
def test_no_other_interval_has_a_better_goodput(between):
    best = daly_interval(4 * MINUTE, between)
    at_best = expected_goodput(best, 4 * MINUTE, between, 600)
    for factor in (0.3, 0.5, 0.8, 1.25, 2, 4):
        assert expected_goodput(best * factor, 4 * MINUTE, between, 600) < at_best * 1.002


def simulated_goodput(
    interval: float, stall: float, between: float, restart: float, writing: float = 0.0, segments: int = 60_000
) -> float:
    """Work in segments, of which a copy is made at the end and written beside the next one; one is written at a time.

    A failure loses everything since the newest copy that was written by then, and the restart may fail too.
    """
    draws = random.Random(1)
    clock, failure = 0.0, draws.expovariate(1 / between)
    safe = made = 0  # segments that are written, and that there is a copy of
    writes_until = 0.0
    while safe < segments:
        copied = max(clock + interval, writes_until) + stall  # the copy waits until the one before is written
        if failure < copied:
            if made > safe and writes_until <= failure:
                safe = made
            made = safe
            clock = failure
            failure += draws.expovariate(1 / between)
            while clock + restart > failure:
                clock, failure = failure, failure + draws.expovariate(1 / between)
            clock += restart
            writes_until = clock
        else:
            safe, made = made, made + 1
            clock, writes_until = copied, copied + writing
    return safe * interval / clock


@pytest.mark.parametrize(
    ("stall", "between", "restart", "writing"),
    [
        (5 * MINUTE, 6 * HOUR, 10 * MINUTE, 0),
        (30.0, 2 * HOUR, 5 * MINUTE, 0),
        (10 * MINUTE, 90 * MINUTE, 10 * MINUTE, 0),
        (1.0, 2 * HOUR, 5 * MINUTE, 90.0),
        (5.0, 12 * HOUR, 10 * MINUTE, 8 * MINUTE),
    ],
)
def test_goodput_is_that_of_simulated_failures(stall, between, restart, writing):
    interval = max(daly_interval(stall, between), writing)
    expected = expected_goodput(interval, stall, between, restart, writing)
    assert simulated_goodput(interval, stall, between, restart, writing) == pytest.approx(expected, rel=0.01)


def test_saving_more_often_than_writing_takes_makes_training_wait():
    """Every minute, where writing takes two: after each minute of work, another one of waiting."""
    assert stopped_seconds(60.0, 1.0, 120.0) == 61.0
    assert stopped_seconds(180.0, 1.0, 120.0) == 1.0
    often, simulated = expected_goodput(60.0, 1.0, DAY, 600, 120.0), simulated_goodput(60.0, 1.0, DAY, 600, 120.0)
    assert often == pytest.approx(simulated, rel=0.01) == pytest.approx(0.49, abs=0.01)


def test_the_whole_run_by_hand():
    """128 GPUs on 16 nodes, 100,000 steps of 3 s, a failure for each node in 100 days, 10 € a GPU-hour."""
    plan = Plan(mesh=Mesh(replicate=16, tensor=8), checkpoint_every="auto")
    cluster = site(failures_per_node_day=0.01, price_per_gpu_hour=10.0, storage=Storage(gb_per_second=2.0))
    found = budget(Length(0, 100_000), 3.0, 240e9, 1.5, plan, cluster)
    assert (found.steps, found.seconds) == (100_000, 300_000)
    assert (found.checkpoint_stall_seconds, found.checkpoint_seconds) == (1.5, 7.5), "all 16 nodes write"
    between = DAY / 0.16
    best = found.checkpoint_every_seconds
    assert best == pytest.approx(daly_interval(1.5, between)) == pytest.approx(1272, abs=1)
    assert found.goodput == pytest.approx(1 - 1.5 / best - best / 2 / between - 607.5 / between, abs=0.001)
    assert found.seconds_with_failures == pytest.approx(300_000 / found.goodput)
    often = expected_goodput(best, 1.5, between, ASSUMED_RESTART_SECONDS, 7.5)
    assert found.seconds_with_failures == pytest.approx(300_000 / often + 7.5, rel=1e-9), "the last one is waited for"
    assert found.gpu_hours == pytest.approx(128 * found.seconds_with_failures / 3600)
    assert found.cost == pytest.approx(10 * found.gpu_hours)
    assert found.energy_kwh == pytest.approx(0.4 * found.gpu_hours)  # 400 W
    simulated = simulated_goodput(best, 1.5, between, ASSUMED_RESTART_SECONDS, 7.5)
    assert found.goodput == pytest.approx(simulated, rel=0.01)


def test_goodput_is_that_of_the_plans_own_interval():
    cluster = site(failures_per_node_day=0.5, storage=Storage(gb_per_second=2.0))

    def goodput(every: int | str) -> float:
        plan = Plan(mesh=Mesh(replicate=16, tensor=8), checkpoint_every=every)
        found = budget(Length(0, 100_000), 3.0, 240e9, 5.0, plan, cluster).goodput
        assert found is not None
        return found

    assert goodput(200) == goodput("10m"), "200 steps of 3 s"
    assert goodput("auto") > goodput("10m") > goodput("1h")


def test_the_best_interval_is_never_below_the_time_to_write():
    slow = site(failures_per_node_day=0.5, storage=Storage(gb_per_second=0.01))
    found = budget(Length(0, 1_000_000), 3.0, 240e9, 1.5, Plan(mesh=Mesh(replicate=16, tensor=8)), slow)
    assert found.checkpoint_every_seconds == found.checkpoint_seconds == pytest.approx(1500)
    assert daly_interval(1.5, DAY / 8) < 1500


def test_energy_is_counted_as_published_models_count_it():
    """BLOOM: 1,082,990 hours on A100s of 400 W are 433,196 kWh (Luccioni et al. 2022, table 1)."""
    hours = 1_082_990 / 384
    found = budget(Length(0, 1), hours * HOUR, 0, 0, Plan(mesh=Mesh(replicate=384)), site(nodes=48))
    assert found.energy_kwh == pytest.approx(433_196, rel=0.0001)


def test_what_the_cluster_does_not_say_is_not_invented():
    found = budget(Length(0, 100), 1.0, 71e9, 1.0, Plan(mesh=Mesh(replicate=16)), site(gpu="Something new"))
    assert found.gpu_hours == pytest.approx(1600 / 3600)
    unknown = (found.cost, found.energy_kwh, found.goodput, found.seconds_with_failures, found.checkpoint_every_seconds)
    assert unknown == (None,) * 5
    assert found.checkpoint_seconds == pytest.approx(71 / (2 * ASSUMED_WRITE_GB_PER_SECOND)), "two nodes"
    copying = HostCopy(55e9, "as measured")
    assert any("assumed" in sentence for sentence in budget_basis(site(), Plan(), copying))
    known = site(gpu=None, storage=Storage(gb_per_second=2.0))
    assert not any("assumed" in said for said in budget_basis(known, Plan(), copying))


def test_auto_expects_the_failures_of_published_runs_where_the_cluster_does_not_say():
    plan = Plan(mesh=Mesh(replicate=128), checkpoint_every="auto")
    found = budget(Length(0, 1_000_000), 1.0, 240e9, 2.0, plan, site())
    assert found.checkpoint_every_seconds == pytest.approx(daly_interval(2.0, between_failures(plan, site())))
    assert found.goodput is None, "which would be invented"
    assert any("Llama 3" in said for said in budget_basis(site(), plan, HostCopy(55e9, "as measured")))
    # 419 in 54 days of 2,048 nodes.
    assert between_failures(Plan(mesh=Mesh(replicate=16384)), site(nodes=2048)) == pytest.approx(54 * DAY / 419)
    never = site(failures_per_node_day=0.0)
    assert between_failures(plan, never) == math.inf == daly_interval(0.0, math.inf)
    assert between_failures(plan, None) == 16 * between_failures(plan, site())


def whole_seconds(
    recipe: Recipe, dataset: int | None, tokens: int | None, step_seconds: float, cluster: Cluster
) -> float:
    length = length_of(recipe, dataset, tokens)
    assert length is not None
    return budget(length, step_seconds, 0, 0, Plan(), cluster).seconds


def test_gpt3_takes_34_days_on_1024_a100():
    """Narayanan et al. 2021, section 5.1: 175 billion parameters, 300 billion tokens, 140 TFLOP/s on each GPU."""
    step_seconds = training_flops(175e9, 1536 * 2048, 8) / (1024 * 140e12)
    found = whole_seconds(recipe(tokens=300 * 10**9, batch=1536), None, 2048, step_seconds, site())
    assert round(found / DAY) == 34 == round(training_days(175e9, 300e9, 1024, 140e12))


def test_gpt3_takes_355_years_on_one_v100():
    """Lambda's estimate of 2020, at 28 TFLOP/s; without recomputation. 174.6 billion parameters: GPT-3, table D.1."""
    step_seconds = training_flops(174.6e9, 1536 * 2048) / 28e12
    found = whole_seconds(recipe(tokens=300 * 10**9, batch=1536), None, 2048, step_seconds, site())
    assert found / (365 * DAY) == pytest.approx(355, rel=0.005)


@pytest.mark.parametrize(
    ("batch", "images_per_second", "minutes"),
    [
        # Summit: 1,536 V100 pass over ImageNet in 3 s (Panda et al., tutorial on high-performance deep learning).
        (1536 * 32, IMAGENET / 3, 4.5),
        # Frontera: 2,048 nodes (Jain et al. 2019, Deep Learning on Supercomputers workshop).
        (2048 * 16, 260_000, 7.4),
    ],
)
def test_ninety_epochs_of_imagenet_take_minutes_on_summit_and_frontera(batch, images_per_second, minutes):
    found = whole_seconds(recipe(epochs=90, batch=batch), IMAGENET, None, batch / images_per_second, site())
    assert found / MINUTE == pytest.approx(minutes, rel=0.003)


def test_a_cpu_has_no_gpu_hours():
    laptop = Cluster(name="laptop", cpu_cores=8, memory_gib=16, price_per_gpu_hour=1.0)
    found = budget(Length(0, 100), 1.0, 1e9, 1.0, Plan(mesh=Mesh(replicate=4)), laptop)
    assert (found.seconds, found.gpu_hours, found.cost, found.energy_kwh) == (100, 0, None, None)


def test_a_machine_that_never_fails_loses_nothing_and_one_that_always_fails_everything():
    never = budget(Length(0, 100), 1.0, 1e9, 1.0, Plan(), site(failures_per_node_day=0.0))
    assert (never.goodput, never.seconds_with_failures, never.checkpoint_every_seconds) == (1.0, 100.0, None)
    always = budget(Length(0, 100), 1.0, 1e15, 1e4, Plan(), site(failures_per_node_day=1e6))
    assert always.goodput == 0.0
    assert always.seconds_with_failures == math.inf


@pytest.mark.parametrize("every", ["auto", 1000])
def test_a_run_shorter_than_the_writing_of_its_checkpoint_waits_for_that_alone(every):
    """A minute of work and two of writing: no checkpoint before it is waited for, and the run ends when it is there."""
    cluster = site(failures_per_node_day=0.01, storage=Storage(gb_per_second=1.0))
    found = budget(Length(0, 60), 1.0, 120e9, 1.0, Plan(checkpoint_every=every), cluster)
    assert found.checkpoint_seconds == 120
    assert found.seconds_with_failures == pytest.approx(60 + 1 + 120, abs=0.1)
    assert found.goodput == pytest.approx(60 / found.seconds_with_failures)


def test_ranks_that_share_a_gpu_count_it_once():
    found = budget(Length(0, 3600), 1.0, 0, 0, Plan(mesh=Mesh(replicate=8), ranks_per_gpu=4), site())
    assert found.gpu_hours == 2
