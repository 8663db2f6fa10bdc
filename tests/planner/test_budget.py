"""The whole run from one step: as long as training makes it, and with failures as a simulation of them has it."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from gradus.planner.budget import (
    ASSUMED_RESTART_SECONDS,
    ASSUMED_WRITE_GB_PER_SECOND,
    Length,
    budget,
    budget_basis,
    checkpoint_bytes,
    daly_interval,
    dataset_length,
    expected_goodput,
    length_of,
    young_interval,
)
from gradus.planner.published import training_days, training_flops
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


def test_a_checkpoint_holds_parameters_and_optimizer_state():
    """Adam on a model of 7 billion parameters: 84 GB."""
    assert checkpoint_bytes(7_000_000_000, 7_000_000_000, 2, Plan(precision="bf16")) == 84e9
    frozen = checkpoint_bytes(7_000_000_000, 10_000_000, 2, Plan(precision="bf16"))
    assert frozen == 28e9 + 80e6


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


def simulated_goodput(interval: float, saving: float, between: float, restart: float, segments: int) -> float:
    """Work in segments that are saved at their end; a failure loses the segment, and the restart may fail too."""
    draws = random.Random(1)
    clock, failure = 0.0, draws.expovariate(1 / between)
    for _ in range(segments):
        needed = interval + saving
        while clock + needed > failure:
            clock, failure = failure, failure + draws.expovariate(1 / between)
            needed = restart + interval + saving
        clock += needed
    return segments * interval / clock


@pytest.mark.parametrize(
    ("saving", "between", "restart"),
    [(5 * MINUTE, 6 * HOUR, 10 * MINUTE), (30.0, 2 * HOUR, 5 * MINUTE), (10 * MINUTE, 90 * MINUTE, 10 * MINUTE)],
)
def test_goodput_is_that_of_simulated_failures(saving, between, restart):
    interval = daly_interval(saving, between)
    expected = expected_goodput(interval, saving, between, restart)
    assert simulated_goodput(interval, saving, between, restart, 60_000) == pytest.approx(expected, rel=0.01)


def test_the_whole_run_by_hand():
    """128 GPUs on 16 nodes, 100,000 steps of 3 s, a failure for each node in 100 days, 10 € a GPU-hour."""
    plan = Plan(mesh=Mesh(replicate=16, tensor=8))
    cluster = site(failures_per_node_day=0.01, price_per_gpu_hour=10.0, storage=Storage(gb_per_second=2.0))
    found = budget(Length(0, 100_000), 3.0, 240e9, plan, cluster)
    assert (found.steps, found.seconds, found.checkpoint_seconds) == (100_000, 300_000, 120)
    between = DAY / 0.16
    assert found.checkpoint_every_seconds == pytest.approx(daly_interval(120, between))
    assert found.goodput == pytest.approx(1 - 120 / 11_270 - 11_270 / 2 / between - 600 / between, abs=0.001)
    assert found.seconds_with_failures == pytest.approx(300_000 / found.goodput)
    assert found.gpu_hours == pytest.approx(128 * found.seconds_with_failures / 3600)
    assert found.cost == pytest.approx(10 * found.gpu_hours)
    assert found.energy_kwh == pytest.approx(0.4 * found.gpu_hours)  # 400 W
    simulated = simulated_goodput(found.checkpoint_every_seconds, 120, between, ASSUMED_RESTART_SECONDS, 60_000)
    assert found.goodput == pytest.approx(simulated, rel=0.01)


def test_energy_is_counted_as_published_models_count_it():
    """BLOOM: 1,082,990 hours on A100s of 400 W are 433,196 kWh (Luccioni et al. 2022, table 1)."""
    hours = 1_082_990 / 384
    found = budget(Length(0, 1), hours * HOUR, 0, Plan(mesh=Mesh(replicate=384)), site(nodes=48))
    assert found.energy_kwh == pytest.approx(433_196, rel=0.0001)


def test_what_the_cluster_does_not_say_is_not_invented():
    found = budget(Length(0, 100), 1.0, 71e9, Plan(mesh=Mesh(replicate=8)), site(gpu="Something new"))
    assert found.gpu_hours == pytest.approx(800 / 3600)
    unknown = (found.cost, found.energy_kwh, found.goodput, found.seconds_with_failures, found.checkpoint_every_seconds)
    assert unknown == (None,) * 5
    assert found.checkpoint_seconds == pytest.approx(71 / ASSUMED_WRITE_GB_PER_SECOND)
    assert any("assumed" in sentence for sentence in budget_basis(site()))
    assert not any("assumed" in said for said in budget_basis(site(gpu=None, storage=Storage(gb_per_second=2.0))))


def whole_seconds(
    recipe: Recipe, dataset: int | None, tokens: int | None, step_seconds: float, cluster: Cluster
) -> float:
    length = length_of(recipe, dataset, tokens)
    assert length is not None
    return budget(length, step_seconds, 0, Plan(), cluster).seconds


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
    found = budget(Length(0, 100), 1.0, 1e9, Plan(mesh=Mesh(replicate=4)), laptop)
    assert (found.seconds, found.gpu_hours, found.cost, found.energy_kwh) == (100, 0, None, None)


def test_a_machine_that_never_fails_loses_nothing_and_one_that_always_fails_everything():
    never = budget(Length(0, 100), 1.0, 1e9, Plan(), site(failures_per_node_day=0.0))
    assert (never.goodput, never.seconds_with_failures, never.checkpoint_every_seconds) == (1.0, 100.0, None)
    always = budget(Length(0, 100), 1.0, 1e15, Plan(), site(failures_per_node_day=1e6))
    assert always.goodput == 0.0
    assert always.seconds_with_failures == math.inf


def test_ranks_that_share_a_gpu_count_it_once():
    found = budget(Length(0, 3600), 1.0, 0, Plan(mesh=Mesh(replicate=8), ranks_per_gpu=4), site())
    assert found.gpu_hours == 2
