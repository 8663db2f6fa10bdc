"""Nothing fits: which kind of memory binds, and the smallest changes that would fit, each of them predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradus.planner.choice.candidates import Space, waits_on_host
from gradus.planner.choice.reasons import gib, title
from gradus.planner.choice.search import Foresight, Found, something_fits
from gradus.schema.errors import NoPlanFits
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

# What the recipe may fix and the planner would choose otherwise, the smallest change first.
LOOSENED = ("micro_batch", "accumulate", "recompute", "activation_offload", "zero", "offload", "precision", "mesh")
MOST_DOUBLINGS = 10  # of the GPUs, to find how many it takes
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
        return " ".join(words + [f"--set {key}={value}" for key, value in self.keys.items() if key != "gpus"])

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
        f"no plan fits: of {gpus} GPU{'s' if gpus > 1 else ''} with {gib(limit)} a rank needs at least "
        f"{gib(memory.peak)} ({title(nearest)}), and {binds.replace('_', ' ')} binds with {gib(kinds[binds])}"
        + (f"; {on_host}" if on_host else ""),
        hint=hint or _last_resort(space, memory.peak),
        binds=binds,
        needs_bytes=memory.peak,
        limit_bytes=limit,
        memory=kinds,
        plan=title(nearest),
        changes=[change.document() for change in changes],
    )


def _last_resort(space: Space, needed: int) -> str:
    if "mesh" in space.fixed:
        return f"use GPUs with at least {gib(needed)}, or a smaller model"
    most = space.ranks // space.recipe.plan.ranks_per_gpu * 2**MOST_DOUBLINGS
    return f"up to {most:,} GPUs of this kind would not do: use GPUs with more memory, or a smaller model"


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
    most = space.cluster.nodes * space.cluster.gpus_per_node
    gpus = space.ranks // per_gpu
    for _ in range(MOST_DOUBLINGS):
        gpus *= 2
        plan, peak = _fitting(ask(space.recipe, gpus * per_gpu), offload=False)
        if plan is not None:
            beyond = f", and {space.cluster.name} has {most}" if gpus > most else ""
            yield Change({"gpus": gpus}, plan, peak, f"{title(plan)}{beyond}")
            return


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
