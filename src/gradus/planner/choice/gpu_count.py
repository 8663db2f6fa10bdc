"""GPU count: how many GPUs of a cluster to plan for when nobody says: the fewest that fit, or what a limit allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradus.planner.choice.candidates import Space, meshes
from gradus.planner.choice.search import Foresight, something_fits
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError, NoPlanFits
from gradus.schema.intervals import seconds_of
from gradus.schema.prediction import BudgetPrediction
from gradus.schema.recipe import Recipe

DAY = 86400.0


@dataclass(frozen=True)
class Limits:
    """What a run may take at most, in time, money or GPU-hours. None: no such limit."""

    seconds: float | None = None
    cost: float | None = None
    gpu_hours: float | None = None

    @property
    def given(self) -> bool:
        return bool(self.options)

    @property
    def options(self) -> list[str]:
        """Which of them were typed."""
        typed = {"--deadline": self.seconds, "--budget": self.cost, "--gpu-hours": self.gpu_hours}
        return [option for option, value in typed.items() if value is not None]


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


def check_can_be_kept(
    limits: Limits, recipe: Recipe, cluster: Cluster, *, length_known: bool, speed_known: bool
) -> None:
    """Refuse limits where nobody can say what a run takes, and say what is missing."""
    option = limits.options[0]
    if not length_known:
        raise InputError(
            f"{option}: how many samples {recipe.data.use} has is not known here, so neither is how long "
            f"{recipe.epochs:g} epochs of it take",
            hint="give the length of the run in steps or tokens instead of epochs",
            field=option,
            found=f"epochs: {recipe.epochs:g}",
            allowed="steps or tokens, or epochs of a dataset that can be opened here",
        )
    if not speed_known:
        raise NoPlanFits(
            f"{option}: how fast {cluster.gpu_name or 'the GPU'} of {cluster.name} is, is not known, so neither is "
            "what a run takes",
            hint="name a GPU of the catalogue in the cluster file, or give its peak_tflops and memory_bandwidth there",
            field=option,
            binds="speed",
        )


def within(limits: Limits, choices: Sequence[int], budget_on: Callable[[int], BudgetPrediction | None]) -> int:
    """The best number under the limits. `budget_on` is None for numbers on which nothing fits.

    With a deadline, the fewest that meet it: they cost least. With a limit of money or GPU-hours alone, the most that
    it allows: they are done first. More GPUs take less time and more GPU-hours, so either is found by halving; only
    where most of a step is waiting, all numbers are looked at.
    """
    known: dict[int, BudgetPrediction | None] = {}

    def at(index: int) -> BudgetPrediction | None:
        gpus = choices[index]
        if gpus not in known:
            known[gpus] = budget_on(gpus)
        return known[gpus]

    def in_time(index: int) -> bool:
        budget = at(index)
        return budget is not None and _in_time(limits, budget)

    last = len(choices) - 1
    if limits.seconds is not None:
        index = _first(last, in_time) if in_time(last) else next((i for i in range(last) if in_time(i)), -1)
        if index < 0:
            budgets = {gpus: budget for gpus, budget in known.items() if budget is not None}
            if not budgets:
                raise _nothing_fits_on(choices)
            fastest = min(budgets, key=lambda gpus: time_of(budgets[gpus]))
            raise too_slow(limits, budgets[fastest], fastest, ", the fastest of what was looked at")
    else:
        index = next((i for i in range(last + 1) if at(i) is not None), -1)
        if index < 0:
            raise _nothing_fits_on(choices)
    chosen = at(index)
    assert chosen is not None
    if not _affordable(limits, chosen):
        # More GPUs may even cost less: on the fewest, memory forces plans that compute or send much twice.
        more = [(i, budget) for i in range(index + 1, last + 1) if (budget := at(i)) and kept(limits, budget)]
        if more:
            return choices[more[0][0] if limits.seconds is not None else min(more, key=lambda one: time_of(one[1]))[0]]
        why = "that meet the deadline" if limits.seconds is not None else "on which it fits"
        raise too_dear(limits, chosen, choices[index], f", the fewest {why}")
    if limits.seconds is not None:
        return choices[index]

    def beyond(i: int) -> bool:
        budget = at(i) if i <= last else None
        return budget is None or not _affordable(limits, budget)

    return choices[max(index, _first(last + 1, lambda i: i > index and beyond(i)) - 1)]


def kept(limits: Limits, budget: BudgetPrediction) -> bool:
    return _in_time(limits, budget) and _affordable(limits, budget)


def missed(limits: Limits, budget: BudgetPrediction, gpus: int) -> NoPlanFits:
    """The refusal of a number of GPUs that was asked for."""
    return (too_dear if _in_time(limits, budget) else too_slow)(limits, budget, gpus)


def too_slow(limits: Limits, budget: BudgetPrediction, gpus: int, remark: str = "") -> NoPlanFits:
    assert limits.seconds is not None
    needs = time_of(budget)
    return NoPlanFits(
        f"--deadline: the run takes {days(needs)} on {_gpus(gpus)}{remark}; {days(limits.seconds)} are allowed",
        hint="allow more time, shorten the budget of the recipe, or plan for a larger or faster cluster",
        field="--deadline",
        found=limits.seconds,
        binds="time",
        needs_seconds=needs,
        gpus=gpus,
    )


def _in_time(limits: Limits, budget: BudgetPrediction) -> bool:
    return limits.seconds is None or time_of(budget) <= limits.seconds


def _nothing_fits_on(choices: Sequence[int]) -> NoPlanFits:
    return NoPlanFits(f"no plan fits on any of {', '.join(map(str, choices))} GPUs, so no limit can be kept")


def _gpus(count: int) -> str:
    return count_text(count, "GPU")


def time_of(budget: BudgetPrediction) -> float:
    return budget.seconds_with_failures if budget.seconds_with_failures is not None else budget.seconds


def days(seconds: float) -> str:
    if seconds == float("inf"):
        return "for ever"
    if seconds >= 2 * DAY:
        return f"{seconds / DAY:.1f} days"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.3g} seconds"


def _affordable(limits: Limits, budget: BudgetPrediction) -> bool:
    if limits.cost is not None and (budget.cost is None or budget.cost > limits.cost):
        return False
    return limits.gpu_hours is None or budget.gpu_hours <= limits.gpu_hours


def too_dear(limits: Limits, budget: BudgetPrediction, gpus: int, remark: str = "") -> NoPlanFits:
    option: str
    needs: float | None
    allowed: float | None
    if limits.cost is not None and not _affordable(Limits(cost=limits.cost), budget):
        option, unit, needs, allowed = "--budget", "", budget.cost, limits.cost
    else:
        option, unit, needs, allowed = "--gpu-hours", " GPU-hours", budget.gpu_hours, limits.gpu_hours
    return NoPlanFits(
        f"{option}: the run takes {_amount(needs)}{unit} on {_gpus(gpus)}{remark}; "
        f"{_amount(allowed)}{unit} are allowed",
        hint="allow more, or shorten the budget of the recipe (steps, epochs, tokens)",
        field=option,
        binds="gpu-hours",
        needs_gpu_hours=budget.gpu_hours,
        needs_cost=budget.cost,
        gpus=gpus,
    )


def _amount(number: float | None) -> str:
    if number is None or number == float("inf"):
        return "for ever"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


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
