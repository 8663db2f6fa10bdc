"""The largest micro-batch that fits, found by trying: twice as much while it fits, then halving the gap.

All ranks try together. If one of them runs out of memory, that trial is over on all of them, and the next one begins
in fresh processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gradus.bench.tried import Ranks, Trial, Tried
from gradus.schema.plan import Plan

_STEPS = 3  # the optimizer's state is there from the second on


@dataclass(frozen=True)
class LargestMicroBatch:
    """What was found, and what was tried on the way."""

    micro_batch: int | None  # None: not even the smallest fits
    tried: dict[int, Tried] = field(default_factory=dict)
    too_large: int | None = None  # the smallest that does not fit; None: it is as large as a rank's share of the batch

    @property
    def why(self) -> str:
        if self.micro_batch is None:
            smallest = min(self.tried)
            return f"not even {smallest} fits: {self.tried[smallest].why}"
        if self.too_large is None:
            return f"{self.micro_batch} is all of a rank's share of the batch"
        return f"{self.micro_batch} fits, {self.too_large} does not ({self.tried[self.too_large].state})"


def sizes_of(batch: int, plan: Plan) -> list[int]:
    """The micro-batches that divide a rank's share of the batch evenly."""
    share = batch // plan.mesh.data_ranks
    return [size for size in range(1, share + 1) if share % size == 0]


def split(plan: Plan, batch: int, micro_batch: int) -> Plan:
    """The same batch in micro-batches of that size."""
    share = batch // plan.mesh.data_ranks
    return plan.model_copy(update={"micro_batch": micro_batch, "accumulate": share // micro_batch})


def largest_that_fits(sizes: Sequence[int], start: int, fits: Callable[[int], bool]) -> tuple[int | None, int | None]:
    """Of sizes that grow: the largest that fits, and the next one, which does not. Each is tried at most once.

    Memory grows with the size, so what is below one that fits is not tried.
    """
    low, high = -1, len(sizes)  # fits up to `low`, does not from `high` on
    place = max(index for index, size in enumerate(sizes) if size <= max(start, sizes[0]))
    while high - low > 1:
        if fits(sizes[place]):
            low = place
            doubled = next((i for i, size in enumerate(sizes) if size >= 2 * sizes[place]), len(sizes) - 1)
            place = doubled if high == len(sizes) else (low + high) // 2
        else:
            high = place
            halved = max((i for i, size in enumerate(sizes) if 2 * size <= sizes[place]), default=0)
            place = halved if low == -1 else (low + high) // 2
        place = min(max(place, low + 1), high - 1)
    return (sizes[low] if low >= 0 else None), (sizes[high] if high < len(sizes) else None)


def largest_micro_batch(
    ranks: Ranks, trial: Trial, say: Callable[[str], None], *, refused: Callable[[Plan], str | None] = lambda plan: None
) -> LargestMicroBatch:
    """Starts from the plan's own micro-batch. `refused` says why a plan cannot be, where that is known before."""
    batch, tried = trial.recipe.batch, dict[int, Tried]()
    sizes = [size for size in sizes_of(batch, trial.plan) if refused(split(trial.plan, batch, size)) is None]
    if not sizes:
        sizes = [trial.plan.micro_batch]

    def fits(size: int) -> bool:
        tried[size] = ranks.try_out(_short(trial, size))
        say(f"micro-batch {size}: {'fits' if tried[size].measured else f'{tried[size].state}: {tried[size].why}'}")
        return tried[size].measured

    largest, too_large = largest_that_fits(sizes, trial.plan.micro_batch, fits)
    return LargestMicroBatch(largest, tried, too_large)


def _short(trial: Trial, size: int) -> Trial:
    """A few steps of two micro-batches: the second finds the gradients of the first in its way, a third no more."""
    whole = split(trial.plan, trial.recipe.batch, size)
    accumulate = min(2, whole.accumulate) if whole.mesh.pipeline == 1 else whole.accumulate
    recipe = trial.recipe.model_copy(update={"batch": size * accumulate * whole.mesh.data_ranks})
    return trial.changed(
        recipe=recipe,
        plan=whole.model_copy(update={"accumulate": accumulate}),
        steps=_STEPS - 1,
        warm_up=1,
        whole=True,
    )
