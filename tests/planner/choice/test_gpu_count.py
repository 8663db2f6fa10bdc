"""How many GPUs: the fewest that fit, the fewest in time, the most for the money; and what cannot be."""

from __future__ import annotations

import pytest
from planner_cases import Formula, recipe, site, space

from gradus.planner.choice.gpu_count import Limits, counts, fewest, limits_of, within
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
    gpus = within(limits_of(SITE, "7d", None, None), CHOICES, run_on, SITE)
    assert run_on(gpus).seconds <= 7 * 86400 < run_on(gpus // 2).seconds


def test_a_number_between_those_that_are_too_slow_is_found() -> None:
    """On 16 it is done in time; fewer compute too long, more wait too long for each other."""
    times = {8: 300.0, 16: 100.0, 32: 200.0, 64: 250.0, 128: 400.0}

    def on(gpus: int) -> BudgetPrediction:
        return BudgetPrediction(steps=1, seconds=times[gpus], gpu_hours=gpus * times[gpus] / 3600)

    assert within(Limits(seconds=150), CHOICES, on, SITE) == 16
    with pytest.raises(NoPlanFits, match="on 16 GPUs, the fastest"):
        within(Limits(seconds=50), CHOICES, on, SITE)


def test_money_and_gpu_hours_buy_the_most() -> None:
    for limits in (limits_of(SITE, None, 8000, None), limits_of(SITE, None, None, 4000)):
        gpus = within(limits, CHOICES, run_on, SITE)
        assert run_on(gpus).gpu_hours <= 4000 < run_on(gpus * 2).gpu_hours
    assert within(Limits(gpu_hours=1e9), CHOICES, run_on, SITE) == 128


def test_a_deadline_and_money_together() -> None:
    assert within(Limits(seconds=7 * 86400, cost=1e6), CHOICES, run_on, SITE) == 32
    with pytest.raises(NoPlanFits, match="the fewest that meet the deadline") as caught:
        within(Limits(seconds=7 * 86400, gpu_hours=100), CHOICES, run_on, SITE)
    assert caught.value.details["field"] == "--gpu-hours"


def test_what_no_number_meets_is_refused_with_the_numbers() -> None:
    with pytest.raises(NoPlanFits, match=r"takes 1\.5 days on 128 GPUs|takes 36\.. hours on 128 GPUs") as caught:
        within(Limits(seconds=86400), CHOICES, run_on, SITE)
    assert caught.value.exit_code == EXIT_NO_PLAN
    assert caught.value.details["binds"] == "time"
    with pytest.raises(NoPlanFits, match="the fewest on which it fits; 10 are allowed") as caught:
        within(Limits(cost=10), CHOICES, run_on, SITE)
    assert caught.value.details["field"] == "--budget"
    with pytest.raises(NoPlanFits, match="is not known"):
        within(Limits(seconds=1), CHOICES, lambda gpus: None, SITE)


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
