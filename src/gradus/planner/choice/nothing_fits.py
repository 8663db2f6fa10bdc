"""Nothing fits: which kind of memory binds, and the smallest changes that would fit, each of them predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gradus.planner.choice.candidates import Space, meshes, waits_on_host
from gradus.planner.choice.gpu_count import counts
from gradus.planner.choice.reasons import gib, title
from gradus.planner.choice.search import Foresight, Found, something_fits
from gradus.planner.choice.typed import options
from gradus.record.format import count_text
from gradus.schema.errors import NoPlanFits
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

# What the recipe may fix and the planner would choose otherwise, the smallest change first.
LOOSENED = (
    *("micro_batch", "accumulate", "recompute_blocks", "recompute", "activation_offload", "zero", "offload"),
    *("precision", "mesh"),
)
MOST_DOUBLINGS = 10  # of the GPUs, to find how many it takes
LARGEST = 3  # of those numbers: what fits on none of them is not looked for on fewer
SHORTEST_CONTEXT = 256
LOOKED_AT_CLOSELY = 40  # plans, of those that cannot fit, to find the one that comes nearest

Ask = Callable[[Recipe, int], tuple[Space, Foresight]]  # the same question for another recipe or number of GPUs


@dataclass(frozen=True)
class Change:
    """Something to set, after which this plan fits."""

    keys: dict[str, object]
    plan: Plan
    peak_bytes: int
    why: str

    @property
    def options(self) -> str:
        """As they are typed."""
        words = [f"--gpus {self.keys['gpus']}"] if "gpus" in self.keys else []
        return " ".join([*words, options({key: value for key, value in self.keys.items() if key != "gpus"})])

    def document(self) -> dict[str, Any]:
        gpus = {"gpus": self.keys["gpus"]} if "gpus" in self.keys else {}
        keys = {key: value for key, value in self.keys.items() if key != "gpus"}
        return {"set": keys, **gpus, "plan": title(self.plan), "peak_bytes": self.peak_bytes, "why": self.why}


def nothing_fits(space: Space, found: Found, foresight: Foresight, ask: Ask) -> NoPlanFits:
    """The refusal. `ask` poses the question anew, for a changed recipe or other GPUs."""
    nearest, on_host = _nearest(found, foresight)
    memory, limit = foresight.memory(nearest), foresight.limit_bytes
    assert limit is not None, "without a limit everything fits"
    kinds = {name: getattr(memory, name) for name in type(memory).model_fields}
    binds = max(kinds, key=lambda name: kinds[name])
    gpus = space.ranks // space.recipe.plan.ranks_per_gpu
    changes = list(changes_that_fit(space, foresight, ask))
    hint = "; or ".join(f"{change.options} ({change.why})" for change in changes[:3])
    return NoPlanFits(
        f"no plan fits: of {count_text(gpus, 'GPU')} with {gib(limit)} a rank needs at least "
        f"{gib(memory.peak)} ({title(nearest)}), and {binds.replace('_', ' ')} binds with {gib(kinds[binds])}"
        + (f"; {on_host}" if on_host else ""),
        hint=hint or _last_resort(space, memory.peak),
        binds=binds,
        needs_bytes=memory.peak,
        limit_bytes=limit,
        memory=kinds,
        plan=title(nearest),
        start_anyway=said_in_full(nearest, space.recipe),
        changes=[change.document() for change in changes],
    )


def _last_resort(space: Space, needed: int) -> str:
    if "mesh" in space.fixed:
        return f"use GPUs with at least {gib(needed)}, or a smaller model"
    tried = _larger_numbers(space)
    return (
        f"none of {len(tried)} numbers of GPUs of this kind from {tried[0]:,} to {tried[-1]:,} would do: use GPUs with "
        "more memory, or a smaller model"
    )


def said_in_full(plan: Plan, recipe: Recipe) -> dict[str, object]:
    """What to set so that this plan is started whatever is predicted of it. What the recipe fixes stays as it is."""
    names = ["mesh", "zero", "recompute", "micro_batch"]
    if {"micro_batch", "accumulate"} & recipe.plan.fixed:
        names.remove("micro_batch")
    plain = Plan()
    names += [
        name
        for name in ("pipeline_schedule", "stages_per_rank", "offload", "activation_offload")
        if getattr(plan, name) != getattr(plain, name)
    ]
    values = {name: getattr(plan, name) for name in names if name not in recipe.plan.fixed}
    return {f"plan.{name}": value.flow() if name == "mesh" else value for name, value in values.items()}


def changes_that_fit(space: Space, foresight: Foresight, ask: Ask) -> Iterator[Change]:
    yield from _loosened(space, ask)
    yield from _more_gpus(space, ask)
    yield from _shorter_context(space, ask)


def _loosened(space: Space, ask: Ask) -> Iterator[Change]:
    """What the recipe fixes, left to the planner: one field after another."""
    fixed = space.fixed
    for field in LOOSENED:
        if field in fixed:
            kept = {name: value for name, value in fixed.items() if name != field}
            recipe = space.recipe.model_copy(update={"plan": Plan(**kept)})
            plan, peak = _fitting(ask(recipe, space.ranks))
            if plan is not None and getattr(plan, field) != fixed[field]:
                value = getattr(plan, field)
                shown = value.flow() if field == "mesh" else value
                yield Change({f"plan.{field}": shown}, plan, peak, f"instead of {fixed[field]}")


def _more_gpus(space: Space, ask: Ask) -> Iterator[Change]:
    """The next number that fits, on this cluster or on one like it that is larger."""
    if "mesh" in space.fixed:
        return
    per_gpu = space.recipe.plan.ranks_per_gpu
    has = space.cluster.nodes * space.cluster.gpus_per_node
    questions = {gpus: ask(space.recipe, gpus * per_gpu) for gpus in _larger_numbers(space)}
    questions = {gpus: question for gpus, question in questions.items() if meshes(question[0])}
    # What waits on the host is slow, and better than nothing.
    found = _on_fewest(questions, offload=False) or _on_fewest(questions, offload=True)
    if found is not None:
        gpus, plan, peak = found
        beyond = f", and {space.cluster.name} has {has}" if gpus > has else ""
        yield Change({"gpus": gpus}, plan, peak, f"{title(plan)}{beyond}")


def _on_fewest(questions: Mapping[int, tuple[Space, Foresight]], *, offload: bool) -> tuple[int, Plan, int] | None:
    """The smallest number on which something fits, the plan, and its peak.

    It is found in ever larger strides and then by halving, since what fits on fewer mostly fits on more: not every
    number divides the batch well, so the largest few are all looked at before giving up.
    """
    numbers = list(questions)
    known: dict[int, tuple[Plan | None, int]] = {}

    def fits(at: int) -> bool:
        if at not in known:
            known[at] = _fitting(questions[numbers[at]], offload=offload)
        return known[at][0] is not None

    last = len(numbers) - 1
    strides = [at for at in (2**power - 1 for power in range(MOST_DOUBLINGS)) if at < last]
    at = next((at for at in [*strides, *range(last, max(-1, last - LARGEST), -1)] if fits(at)), None)
    if at is None:
        return None
    below = max((one for one in known if one < at), default=-1)  # does not fit, nor does any before it
    while at - below > 1:
        middle = (below + at) // 2
        below, at = (below, middle) if fits(middle) else (middle, at)
    plan, peak = known[at]
    assert plan is not None
    return numbers[at], plan, peak


def _larger_numbers(space: Space) -> list[int]:
    """Numbers of GPUs that are worth a try, as `counts` has them, and whole nodes over which the batch divides.

    With a batch of 1,536, 1,024 ranks cannot share it, but 768 and 1,536 can.
    """
    gpus, per_node = space.ranks // space.recipe.plan.ranks_per_gpu, space.cluster.gpus_per_node
    most, batch = gpus * 2**MOST_DOUBLINGS, space.recipe.batch
    larger = space.cluster.model_copy(update={"nodes": max(1, most // per_node)})
    divisors = [ways for ways in range(1, min(batch, most) + 1) if batch % ways == 0]
    shared = {ways * split for ways in divisors for split in range(1, per_node + 1) if per_node % split == 0}
    shared = {number for number in shared if number % per_node == 0}
    return sorted(number for number in {*counts(larger), *shared} if gpus < number <= most)


def _shorter_context(space: Space, ask: Ask) -> Iterator[Change]:
    """Half the tokens of a sample, or a quarter: for data whose samples are cut to a length."""
    recipe, length = space.recipe, space.case.model.sequence
    if space.case.model.kind != "reference" or length is None or "context" not in recipe.data.options:
        return
    for shorter in (length // 2, length // 4):
        if shorter >= SHORTEST_CONTEXT:
            data = type(recipe.data)(**{**recipe.data.model_dump(exclude_unset=True), "context": shorter})
            plan, peak = _fitting(ask(recipe.model_copy(update={"data": data}), space.ranks))
            if plan is not None:
                yield Change({"data.context": shorter}, plan, peak, f"{title(plan)}, samples of {shorter} tokens")
                return


def _fitting(question: tuple[Space, Foresight], *, offload: bool = True) -> tuple[Plan | None, int]:
    space, foresight = question
    plan = something_fits(space, foresight, offload=offload)
    return plan, foresight.memory(plan).peak if plan is not None else 0


def _nearest(found: Found, foresight: Foresight) -> tuple[Plan, str]:
    """The plan that needs least of what there is too little of; and what host memory has to do with it."""
    plans = [outcome.plan for outcome in sorted(found.considered, key=lambda outcome: outcome.least_bytes)]
    on_device = [plan for plan in plans if not waits_on_host(plan)][:LOOKED_AT_CLOSELY]
    waiting = [plan for plan in plans if waits_on_host(plan)][:LOOKED_AT_CLOSELY]
    nearest = min(on_device or waiting, key=lambda plan: foresight.memory(plan).peak)
    limit = foresight.limit_bytes
    short = [foresight.host_bytes(plan) for plan in waiting if limit is None or foresight.memory(plan).peak <= limit]
    if not short:
        return nearest, ""
    needs, has = min(short)
    return nearest, f"what could wait in host memory needs {gib(needs)} there, and a node has {gib(has)}"
