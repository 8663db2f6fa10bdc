"""How many GPUs: the fewest that fit, the fewest in time, the most for the money; and what cannot be."""

from __future__ import annotations

import pytest
from planner_cases import Formula, recipe, site, space

from gradus.planner.choice.gpu_count import Limits, check_can_be_kept, counts, fewest, kept, limits_of, missed, within
from gradus.schema.errors import EXIT_NO_PLAN, InputError, NoPlanFits
from gradus.schema.prediction import BudgetPrediction

SITE = site(nodes=16, price_per_gpu_hour=2.0)
CHOICES = [8, 16, 32, 64, 128]


def test_the_numbers_are_shares_of_a_node_and_whole_nodes() -> None:
    assert counts(site(nodes=6)) == [1, 2, 4, 8, 16, 24, 32, 48]
    assert counts(site(nodes=1, gpus=4)) == [1, 2, 4]
    assert counts(site(nodes=100, gpus=1))[-1] == 100


@pytest.mark.parametrize(
    ("state", "gpus"), [(10, 1), (100, 2), (300, 4), (600, 8), (700, 16), (1300, 24), (9999, None)]
)
def test_the_fewest_that_fit(state: float, gpus: int | None) -> None:
    """The state is shared by all ranks that there are; nothing waits on the host just to need fewer GPUs."""
    where = site(nodes=4)
    assert fewest(lambda n: space(recipe(192), n, where), Formula(state, sample=0.1), counts(where)) == gpus


def run_on(gpus: int) -> BudgetPrediction:
    """100 days on one GPU; each doubling costs a tenth more GPU-hours."""
    hours = 2400 * 1.1 ** (gpus.bit_length() - 1)
    return BudgetPrediction(steps=10, seconds=hours * 3600 / gpus, gpu_hours=hours, cost=2 * hours)


def test_a_deadline_is_met_by_the_fewest() -> None:
    gpus = within(limits_of(SITE, "7d", None, None), CHOICES, run_on)
    assert run_on(gpus).seconds <= 7 * 86400 < run_on(gpus // 2).seconds


def test_a_number_between_those_that_are_too_slow_is_found() -> None:
    """On 16 it is done in time; fewer compute too long, more wait too long for each other."""
    times = {8: 300.0, 16: 100.0, 32: 200.0, 64: 250.0, 128: 400.0}

    def on(gpus: int) -> BudgetPrediction:
        return BudgetPrediction(steps=1, seconds=times[gpus], gpu_hours=gpus * times[gpus] / 3600)

    assert within(Limits(seconds=150), CHOICES, on) == 16
    with pytest.raises(NoPlanFits, match="on 16 GPUs, the fastest"):
        within(Limits(seconds=50), CHOICES, on)


def test_money_and_gpu_hours_buy_the_most() -> None:
    for limits in (limits_of(SITE, None, 8000, None), limits_of(SITE, None, None, 4000)):
        gpus = within(limits, CHOICES, run_on)
        assert run_on(gpus).gpu_hours <= 4000 < run_on(gpus * 2).gpu_hours
    assert within(Limits(gpu_hours=1e9), CHOICES, run_on) == 128


def test_a_deadline_and_money_together() -> None:
    assert within(Limits(seconds=7 * 86400, cost=1e6), CHOICES, run_on) == 32
    with pytest.raises(NoPlanFits, match="the fewest that meet the deadline") as caught:
        within(Limits(seconds=7 * 86400, gpu_hours=100), CHOICES, run_on)
    assert caught.value.details["field"] == "--gpu-hours"


def test_what_no_number_meets_is_refused_with_the_numbers() -> None:
    with pytest.raises(NoPlanFits, match=r"takes 1\.5 days on 128 GPUs|takes 36\.. hours on 128 GPUs") as caught:
        within(Limits(seconds=86400), CHOICES, run_on)
    assert caught.value.exit_code == EXIT_NO_PLAN
    assert caught.value.details["binds"] == "time"
    with pytest.raises(NoPlanFits, match="the fewest on which it fits; 10 are allowed") as caught:
        within(Limits(cost=10), CHOICES, run_on)
    assert caught.value.details["field"] == "--budget"


def test_numbers_on_which_nothing_fits_are_passed_over() -> None:
    """As where the largest does not divide the batch."""

    def on(gpus: int) -> BudgetPrediction | None:
        return run_on(gpus) if gpus in (16, 64) else None

    assert within(Limits(seconds=7 * 86400), CHOICES, on) == 64
    assert within(Limits(gpu_hours=3600), CHOICES, on) == 16
    assert within(Limits(gpu_hours=1e9), [16, 32, 64], on) in (16, 64)
    for limits in (Limits(seconds=1), Limits(gpu_hours=1)):
        with pytest.raises(NoPlanFits, match="no plan fits on any of 8, 16, 32, 64, 128 GPUs"):
            within(limits, CHOICES, lambda gpus: None)


def test_a_number_that_was_asked_for_keeps_the_limits_or_says_which_it_misses() -> None:
    found = run_on(8)
    assert kept(Limits(seconds=1e9, cost=1e9, gpu_hours=1e9), found)
    for limits, field in (
        (Limits(seconds=1, cost=1), "--deadline"),
        (Limits(cost=1, gpu_hours=1e9), "--budget"),
        (Limits(cost=1e9, gpu_hours=1), "--gpu-hours"),
    ):
        assert not kept(limits, found)
        assert missed(limits, found, 8).details["field"] == field
    assert "takes 3,194 GPU-hours on 8 GPUs; 1 GPU-hours are allowed" in missed(Limits(gpu_hours=1), found, 8).message


def test_why_a_limit_cannot_be_kept_is_told_apart() -> None:
    limits = Limits(seconds=1)
    check_can_be_kept(limits, recipe(), SITE, length_known=True, speed_known=True)
    epochs = recipe().model_copy(update={"steps": None, "epochs": 2.0})
    with pytest.raises(InputError, match="how many samples synthetic-tokens has is not known"):
        check_can_be_kept(limits, epochs, SITE, length_known=False, speed_known=True)
    with pytest.raises(NoPlanFits, match="how fast NVIDIA H100 80GB HBM3 of site is, is not known"):
        check_can_be_kept(limits, recipe(), SITE, length_known=True, speed_known=False)


@pytest.mark.parametrize(
    ("deadline", "cost", "hours", "field"),
    [
        ("soon", None, None, "--deadline"),
        ("0s", None, None, "--deadline"),
        (None, -1.0, None, "--budget"),
        (None, float("nan"), None, "--budget"),
        (None, None, 0.0, "--gpu-hours"),
    ],
)
def test_a_limit_that_is_none_is_bad_input(deadline, cost, hours, field) -> None:
    with pytest.raises(InputError) as caught:
        limits_of(SITE, deadline, cost, hours)
    assert caught.value.details["field"] == field


def test_without_a_price_there_is_no_budget_of_money() -> None:
    with pytest.raises(InputError, match="no price_per_gpu_hour"):
        limits_of(site(), None, 100.0, None)


def test_more_gpus_may_be_cheaper_than_the_fewest() -> None:
    """Where memory is short, the fewest compute much twice."""

    def on(gpus: int) -> BudgetPrediction:
        hours = {8: 600.0, 16: 225.0, 32: 220.0, 64: 260.0, 128: 500.0}[gpus]
        return BudgetPrediction(steps=10, seconds=hours * 3600 / gpus, gpu_hours=hours, cost=2 * hours)

    assert within(limits_of(SITE, None, 1000.0, None), CHOICES, on) == 128
    assert within(limits_of(SITE, None, 500.0, None), CHOICES, on) == 32
    with pytest.raises(NoPlanFits, match="on 8 GPUs, the fewest on which it fits; 400 are allowed"):
        within(limits_of(SITE, None, 400.0, None), CHOICES, on)
