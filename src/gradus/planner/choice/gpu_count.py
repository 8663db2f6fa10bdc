"""GPU count: how many GPUs of a cluster to plan for when nobody says: the fewest that fit, or what a limit allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradus.planner.choice.candidates import Space, meshes
from gradus.planner.choice.search import Foresight, something_fits
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError, NoPlanFits
from gradus.schema.intervals import seconds_of
from gradus.schema.prediction import BudgetPrediction

DAY = 86400.0


@dataclass(frozen=True)
class Limits:
    """What a run may take at most, in time, money or GPU-hours. None: no such limit."""

    seconds: float | None = None
    cost: float | None = None
    gpu_hours: float | None = None

    @property
    def given(self) -> bool:
        return (self.seconds, self.cost, self.gpu_hours) != (None, None, None)


NO_LIMITS = Limits()


def limits_of(cluster: Cluster, deadline: str | None, cost: float | None, gpu_hours: float | None) -> Limits:
    """As typed: `7d`, an amount of money, a number of GPU-hours."""
    seconds = None
    if deadline is not None:
        try:
            seconds = seconds_of(deadline)
        except ValueError as problem:
            raise _not_a_limit("--deadline", deadline, str(problem)) from None
        if seconds <= 0:
            raise _not_a_limit("--deadline", deadline, "a time above 0")
    for option, value in (("--budget", cost), ("--gpu-hours", gpu_hours)):
        if value is not None and not value > 0:
            raise _not_a_limit(option, value, "a number above 0")
    if cost is not None and cluster.price_per_gpu_hour is None:
        raise InputError(
            f"--budget: {cluster.name} has no price_per_gpu_hour, so nothing costs anything",
            hint="give the price in the cluster file, or a limit in --gpu-hours",
            field="--budget",
            found=cost,
            allowed="only with a price",
        )
    return Limits(seconds, cost, gpu_hours)


def _not_a_limit(option: str, found: object, allowed: str) -> InputError:
    return InputError(f"{option}: found {found}, allowed: {allowed}", field=option, found=found, allowed=allowed)


def counts(cluster: Cluster) -> list[int]:
    """Numbers of GPUs worth a thought: on one node its halves and quarters, then whole nodes, 2, 3, 4, 6, 8, 12, ..."""
    per_node = cluster.gpus_per_node
    inside = [n for n in range(1, per_node + 1) if per_node % n == 0]
    nodes, numbers = 1, []
    while nodes <= cluster.nodes:
        numbers += [nodes, nodes * 3 // 2] if nodes > 1 and nodes % 2 == 0 else [nodes]
        nodes *= 2
    numbers.append(cluster.nodes)
    return sorted({*inside, *(n * per_node for n in numbers if n <= cluster.nodes)})


def fewest(space_for: Callable[[int], Space], foresight: Foresight, choices: Sequence[int]) -> int | None:
    """The smallest number on which something fits; None: on none of them."""
    for gpus in choices:
        space = space_for(gpus)
        if meshes(space) and something_fits(space, foresight) is not None:
            return gpus
    return None


def within(
    limits: Limits, choices: Sequence[int], budget_on: Callable[[int], BudgetPrediction | None], cluster: Cluster
) -> int:
    """The best number under the limits.

    With a deadline, the fewest that meet it: they cost least. With a limit of money or GPU-hours alone, the most that
    it allows: they are done first. More GPUs take less time and more GPU-hours, so either is found by halving; only
    where most of a step is waiting, all numbers are looked at.
    """
    known: dict[int, BudgetPrediction] = {}

    def at(index: int) -> BudgetPrediction:
        gpus = choices[index]
        if gpus not in known:
            budget = budget_on(gpus)
            if budget is None:
                raise NoPlanFits(
                    f"how long a step takes on {cluster.name} is not known, so no deadline or budget can be kept",
                    hint="name a GPU of the catalogue in the cluster file, or calibrate with gradus plan --measure",
                )
            known[gpus] = budget
        return known[gpus]

    last = len(choices) - 1
    if limits.seconds is not None:
        seconds = limits.seconds
        if time_of(at(last)) <= seconds:
            index = _first(last, lambda i: time_of(at(i)) <= seconds)
        else:
            in_time = (i for i in range(last) if time_of(at(i)) <= seconds)
            index = next(in_time, -1)
        if index < 0:
            fastest = min(choices, key=lambda gpus: time_of(known[gpus]))
            raise NoPlanFits(
                f"--deadline: the run takes {days(time_of(known[fastest]))} on {fastest} GPUs, the fastest of what was "
                f"looked at; {days(seconds)} are allowed",
                hint="allow more time, shorten the budget of the recipe, or plan for a larger or faster cluster",
                field="--deadline",
                found=seconds,
                binds="time",
                needs_seconds=time_of(known[fastest]),
                gpus=fastest,
            )
        _check_cost(limits, at(index), choices[index], cheapest=False)
        return choices[index]
    _check_cost(limits, at(0), choices[0], cheapest=True)
    too_dear = _first(last + 1, lambda i: i > last or not _affordable(limits, at(i)))
    return choices[too_dear - 1]


def time_of(budget: BudgetPrediction) -> float:
    return budget.seconds_with_failures if budget.seconds_with_failures is not None else budget.seconds


def days(seconds: float) -> str:
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:.1f} days"
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"


def _affordable(limits: Limits, budget: BudgetPrediction) -> bool:
    if limits.cost is not None and (budget.cost is None or budget.cost > limits.cost):
        return False
    return limits.gpu_hours is None or budget.gpu_hours <= limits.gpu_hours


def _check_cost(limits: Limits, budget: BudgetPrediction, gpus: int, *, cheapest: bool) -> None:
    if _affordable(limits, budget):
        return
    option = "--budget" if limits.cost is not None else "--gpu-hours"
    allowed = f"{limits.cost:,.0f}" if limits.cost is not None else f"{limits.gpu_hours:,.0f} GPU-hours"
    needs = (
        f"{budget.cost:,.0f}"
        if limits.cost is not None and budget.cost is not None
        else (f"{budget.gpu_hours:,.0f} GPU-hours")
    )
    why = "the fewest on which it fits" if cheapest else "the fewest that meet the deadline"
    raise NoPlanFits(
        f"{option}: the run takes {needs} on {gpus} GPUs, {why}; {allowed} are allowed",
        hint="allow more, or shorten the budget of the recipe (steps, epochs, tokens)",
        field=option,
        binds="gpu-hours",
        needs_gpu_hours=budget.gpu_hours,
        needs_cost=budget.cost,
        gpus=gpus,
    )


def _first(last: int, holds: Callable[[int], bool]) -> int:
    """The smallest index up to `last` for which it holds; it holds for `last`, and for all after the first."""
    low, high = 0, last
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
