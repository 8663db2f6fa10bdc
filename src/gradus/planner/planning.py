"""Planning: the plans for a recipe on a cluster, best first, each with its prediction and its reasons."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from gradus.planner.budget import gpus_of
from gradus.planner.choice.candidates import Space, meshes, space_of
from gradus.planner.choice.gpu_count import (
    NO_LIMITS,
    Limits,
    check_can_be_kept,
    counts,
    fewest,
    kept,
    limits_of,
    missed,
    time_of,
    within,
)
from gradus.planner.choice.levers import Settled, more_parts_than_tokens, settled
from gradus.planner.choice.nothing_fits import nothing_fits
from gradus.planner.choice.reasons import gib, reasons, refused
from gradus.planner.choice.search import MOST_CHOICES, Found, Outcome, search
from gradus.planner.choice.typed import options
from gradus.planner.defaults import Choice, check_ranks, default_plan, default_world_size, room_for, why_not_all
from gradus.planner.prediction import Predictor
from gradus.planner.resolve import resolved
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError, NoPlanFits
from gradus.schema.intervals import seconds_of
from gradus.schema.prediction import BudgetPrediction
from gradus.schema.recipe import OWN, Recipe


@dataclass(frozen=True)
class Planned:
    """What `gradus plan` shows."""

    choices: list[Choice]
    refused: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan(
    recipe: Recipe | str | Path,
    cluster: Cluster | str | Path | None = None,
    gpus: int | str | None = None,
    *,
    deadline: str | None = None,
    budget: float | None = None,
    gpu_hours: float | None = None,
) -> list[Choice]:
    """Ranked choices, each with `.plan`, `.prediction` and `.reasons`. Nothing is written or started.

    `cluster` is this machine unless it is given, as a Cluster, a name or a path; it need not be at hand. `gpus` is how
    many of its GPUs to plan for (ranks, where it has none), or `"4x8"`: 4 nodes of 8. Without it, on this machine that
    is all that can share the batch, on a cluster that is named the fewest on which the recipe fits, or the best number
    under a `deadline` such as `"7d"`, a `budget` of money, or `gpu_hours`.
    """
    recipe = resolved(recipe if isinstance(recipe, Recipe) else Recipe.load(recipe))
    site, count = site_for(cluster, gpus)
    limits = limits_of(site, deadline, budget, gpu_hours)
    return planned(recipe, site, count, at_hand=cluster is None, limits=limits).choices


def planned(
    recipe: Recipe,
    site: Cluster,
    gpus: int | None,
    *,
    at_hand: bool = True,
    limits: Limits = NO_LIMITS,
    most: int = MOST_CHOICES,
) -> Planned:
    """The choices for a resolved recipe on so many GPUs of a site (ranks, where it has none), or as many as suit."""
    question = Question(recipe, Predictor(recipe, site))
    if limits.given and (not site.gpus_per_node or recipe.model.use == OWN):
        raise _no_limits(limits, recipe, site)
    per_gpu = recipe.plan.ranks_per_gpu if site.gpus_per_node else 1
    ranks = gpus * per_gpu if gpus else None
    if "mesh" in recipe.plan.fixed or not question.searchable:
        default_plan(recipe, site, ranks)  # what cannot be is refused before anything is traced
    if recipe.model.use == OWN:
        return Planned([default_plan(recipe, site, ranks)])
    try:
        question.predictor.trace()
    except InputError:
        raise
    except GradusError as problem:
        if limits.given:
            raise NoPlanFits(f"{limits.options[0]} cannot be kept: {problem.message}", hint=problem.hint) from None
        return Planned([default_plan(recipe, site, ranks)], notes=[_untraced(problem)])
    question.predictor.check_recomputed_blocks(recipe.plan)
    if limits.given:
        question.check_can_be_kept(limits)
    if not question.searchable:
        only = Planned([question.plain(ranks)])
        return question.kept(limits, only, most) if limits.given else only
    if limits.given:
        if ranks is None and "mesh" not in recipe.plan.fixed:
            ranks = question.ranks_within(limits)
        return question.kept(limits, question.answer(ranks, max(most, MOST_CHOICES)), most)
    if ranks is None and "mesh" not in recipe.plan.fixed and not (at_hand and site.scheduler.kind == "local"):
        ranks = question.fewest_ranks()  # of a cluster that others use, too
    return question.answer(ranks, most)


def plan_to_train(recipe: Recipe, cluster: Cluster, nproc: int | None) -> tuple[Choice, list[str]]:
    """The plan of a run that is about to start here, and what there is to say about it.

    Without GPUs nothing is traced: the plain defaults. A model that cannot be traced gets them too.
    """
    question = Question(recipe, Predictor(recipe, cluster))
    if "mesh" in recipe.plan.fixed or not question.searchable:
        plain = default_plan(recipe, cluster, nproc)
        if not question.searchable:
            return plain, []
    try:
        question.predictor.trace()
    except GradusError as problem:
        return default_plan(recipe, cluster, nproc), [_untraced(problem)]
    question.predictor.check_recomputed_blocks(recipe.plan)
    try:
        found = question.answer(nproc, 1)
    except NoPlanFits as problem:
        told = {"mesh", "recompute"} <= recipe.plan.fixed and {"micro_batch", "accumulate"} & recipe.plan.fixed
        if not told:
            raise _with_a_way_to_start(problem) from None
        # Who says all of this means it, and a prediction does not forbid it.
        return default_plan(recipe, cluster, nproc), [f"started as the recipe says, although {problem.message}"]
    return found.choices[0], found.notes


def fewest_nodes(recipe: Recipe, cluster: Cluster) -> int:
    """The fewest whole nodes on which a plan for a resolved recipe fits; one, where nobody can tell."""
    per_node = cluster.gpus_per_node * recipe.plan.ranks_per_gpu
    if "mesh" in recipe.plan.fixed:
        return -(-recipe.plan.mesh.world_size // per_node)
    question = Question(recipe, Predictor(recipe, cluster))
    if not question.searchable:
        return 1
    try:
        question.predictor.trace()
    except InputError:
        raise
    except GradusError:  # a model that cannot be traced
        return 1
    return -(-question.fewest_ranks() // per_node)


@dataclass(frozen=True)
class Question:
    """Which plans are best for a recipe on a cluster, for this or that number of ranks."""

    recipe: Recipe
    predictor: Predictor

    @property
    def cluster(self) -> Cluster:
        return self.predictor.cluster

    @property
    def searchable(self) -> bool:
        """Whether there is something to choose by: GPUs with a known memory, and a model that is named."""
        known = self.cluster.gpus_per_node > 0 and self.predictor.limit_bytes is not None
        return known and self.recipe.model.use != OWN

    def space(self, ranks: int) -> Space:
        return _space(self.recipe, self.cluster, ranks, self.predictor)

    def plain(self, ranks: int | None) -> Choice:
        """The plain default, if the model takes it."""
        choice = default_plan(self.recipe, self.cluster, ranks)
        self.predictor.check_weights(choice.plan)
        return replace(choice, prediction=self.predictor.prediction(choice.plan))

    def answer(self, asked: int | None, most: int) -> Planned:
        """The best plans for so many ranks; for None, for as many as can share the batch."""
        ranks = asked or default_world_size(self.recipe, self.cluster)
        with self.recipe.blamed():
            check_ranks(self.recipe, self.cluster, ranks, asked)
        found = self.found(ranks, most)
        room = room_for(self.recipe, self.cluster)
        if asked is None and ranks < room and found.considered and not found.ranked:
            ranks, found = room, self.found(room, most)  # too many to share the batch, but they can share the model
        if not found.considered:
            return Planned([self.plain(ranks)])  # which mostly says what is wrong
        space = self.space(ranks)
        if not found.ranked:
            raise nothing_fits(space, found, self.predictor, self.asked_anew)
        plans = settled([outcome.plan for outcome in found.ranked], space, self.predictor)
        choices = [self._choice(*one, found, space) for one in zip(found.ranked, plans, strict=True)]
        if asked is None and "mesh" not in self.recipe.plan.fixed and ranks < room:
            why = why_not_all(self.recipe, room, ranks)
            choices = [replace(c, reasons=c.reasons | {"mesh": f"{why}; {c.reasons['mesh']}"}) for c in choices]
        return Planned(choices, refused(found, space, self.predictor), self._notes(choices[0]))

    def _choice(self, outcome: Outcome, settled: Settled, found: Found, space: Space) -> Choice:
        plan, why = settled
        why = reasons(outcome, found, space, self.predictor, plan) | why
        return self._with_interval(Choice(plan, why, self.predictor.prediction(plan)))

    def _notes(self, best: Choice) -> list[str]:
        notes, foreseen, plan = list(self.predictor.trace().notes), best.prediction, best.plan
        tokens = round(self.predictor.profile(plan).loss_tokens * plan.micro_batch / plan.mesh.context)
        if (needless := more_parts_than_tokens(plan, tokens)) is not None:
            notes.append(needless)
        if foreseen is None or foreseen.verdict != "tight" or foreseen.limit_bytes is None:
            return notes
        # A model that was not traced is never said to fit; that it was not is a note of its own.
        if foreseen.memory.peak * (1 + foreseen.memory_error) > foreseen.limit_bytes:
            needs, has = gib(foreseen.memory.peak), gib(foreseen.limit_bytes)
            notes.append(f"memory is tight: {needs} of {has} predicted, give or take {foreseen.memory_error:.0%}")
        return notes

    def _with_interval(self, choice: Choice) -> Choice:
        """Unless the recipe says it, the default; but one checkpoint is written before the next begins."""
        budget = choice.prediction.budget if choice.prediction else None
        said = "checkpoint_every" in self.recipe.plan.fixed or self.recipe.checkpoint.every is not None
        if said or budget is None or budget.checkpoint_seconds is None:
            return choice
        writing = budget.checkpoint_seconds
        if writing <= seconds_of(str(choice.plan.checkpoint_every)):  # the default: a time
            return choice
        plan = choice.plan.model_copy(update={"checkpoint_every": f"{math.ceil(writing)}s"})
        why = f"no more often: a checkpoint takes {writing:.0f} s to write"
        reasons = choice.reasons | {"checkpoint_every": why}
        return replace(choice, plan=plan, reasons=reasons, prediction=self.predictor.prediction(plan))

    def found(self, ranks: int, most: int = MOST_CHOICES) -> Found:
        return search(self.space(ranks), self.predictor, most)

    def asked_anew(self, recipe: Recipe, ranks: int) -> tuple[Space, Predictor]:
        """The same for another recipe, or for other ranks, if need be on a larger cluster of the same kind."""
        per_node = self.cluster.gpus_per_node * recipe.plan.ranks_per_gpu
        nodes = max(self.cluster.nodes, -(-ranks // per_node))
        cluster = self.cluster.model_copy(update={"nodes": nodes})
        predictor = Predictor(recipe, cluster)
        return _space(recipe, cluster, ranks, predictor), predictor

    # --- how many

    @property
    def _counts(self) -> list[int]:
        return counts(self.cluster)

    def _ranks(self, gpus: int) -> int:
        return gpus * self.recipe.plan.ranks_per_gpu

    def fewest_ranks(self) -> int:
        """The fewest on which something fits; where nothing does, all of them, which is then refused."""
        gpus = self._fewest()
        return self._ranks(gpus if gpus is not None else self._counts[-1])

    def _fewest(self) -> int | None:
        return fewest(lambda n: self.space(self._ranks(n)), self.predictor, self._counts)

    def ranks_within(self, limits: Limits) -> int:
        """The best number under the limits; where nothing fits on any, all of them, which is then refused."""
        least = self._fewest()
        if least is None:
            return self._ranks(self._counts[-1])
        choices = [n for n in self._counts if n >= least and meshes(self.space(self._ranks(n)))]
        return self._ranks(within(limits, choices, self._budget))

    def check_can_be_kept(self, limits: Limits) -> None:
        length, speed, profile = self.predictor.length, self.predictor.device, self.predictor.trace()
        if not profile.traced:
            option = limits.options[0]
            raise NoPlanFits(
                f"{option} cannot be kept: {profile.notes[-1]}",
                hint=f"plan without {option}",
                field=option,
                binds="speed",
            )
        check_can_be_kept(
            limits, self.recipe, self.cluster, length_known=length is not None, speed_known=speed is not None
        )

    def kept(self, limits: Limits, found: Planned, most: int) -> Planned:
        """The choices that keep the limits; refused if none does."""
        budgets = [choice.prediction.budget if choice.prediction else None for choice in found.choices]
        good = [c for c, budget in zip(found.choices, budgets, strict=True) if budget and kept(limits, budget)]
        if good:
            return replace(found, choices=good[:most])
        known = [(budget, choice) for choice, budget in zip(found.choices, budgets, strict=True) if budget]
        budget, choice = min(known, key=lambda one: time_of(one[0]))
        raise missed(limits, budget, gpus_of(choice.plan, self.cluster))

    def _budget(self, gpus: int) -> BudgetPrediction | None:
        ranks = self._ranks(gpus)
        # As they are answered then: with their levers, which change how long a step takes.
        plans = settled([outcome.plan for outcome in self.found(ranks).ranked], self.space(ranks), self.predictor)
        budgets = [budget for plan, _ in plans if (budget := self.predictor.prediction(plan).budget) is not None]
        return min(budgets, key=time_of, default=None)


def _space(recipe: Recipe, cluster: Cluster, ranks: int, predictor: Predictor) -> Space:
    profile = predictor.trace()  # which finds out the rest
    return space_of(
        recipe,
        cluster,
        ranks,
        profile,
        takes_narrow=predictor.takes_narrow,
        narrow_failure=predictor.narrow_failure,
    )


def _with_a_way_to_start(problem: NoPlanFits) -> NoPlanFits:
    """A prediction may be wrong: who knows better can start the run all the same, as the plan that comes nearest."""
    if "start_anyway" not in problem.details:
        return problem
    anyway = f"to start it all the same: {options(problem.details['start_anyway'])}"
    hint = f"{problem.hint}; or, {anyway}" if problem.hint else anyway
    return NoPlanFits(problem.message, hint=hint, **problem.details)


def _no_limits(limits: Limits, recipe: Recipe, site: Cluster) -> InputError:
    option = limits.options[0]
    if not site.gpus_per_node:
        why = f"{site.name} has no GPUs, and how fast its processors are is not predicted"
    else:
        why = f"what model.use {recipe.model.use} does is not known before it runs"
    return InputError(f"{option}: {why}, so no limit can be kept", hint=f"plan without {option}", field=option)


def _untraced(problem: GradusError) -> str:
    return f"the plan is the plain default, and nothing is predicted: {problem.message}"


def site_for(cluster: Cluster | str | Path | None, gpus: int | str | None) -> tuple[Cluster, int | None]:
    """The cluster to plan for, and how many of its GPUs; None where nobody said."""
    at_hand = cluster is None
    site = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster) if cluster else Cluster.detect()
    if gpus is None:
        return site, None
    shape = re.fullmatch(r"(?:([1-9]\d*) *[x×] *)?([1-9]\d*)", str(gpus).strip())
    if shape is None:
        raise InputError(
            f"--gpus: found {gpus}, allowed: a number of GPUs such as 32, or nodes and GPUs on each such as 4x8",
            field="--gpus",
            found=gpus,
            allowed="32 or 4x8",
        )
    count = int(shape[2])
    if shape[1] is None:
        if site.gpus_per_node and count > site.nodes * site.gpus_per_node:
            raise _too_many(site, gpus, at_hand)
        return site, count
    nodes = int(shape[1])
    if not at_hand and (nodes > site.nodes or count > site.gpus_per_node):
        raise _too_many(site, gpus, at_hand)
    # Of a cluster that is neither here nor has a file, only the shape is known.
    return site.model_copy(update={"nodes": nodes, "gpus_per_node": count}), nodes * count


def _too_many(site: Cluster, gpus: int | str, at_hand: bool) -> InputError:
    if not site.gpus_per_node:
        return InputError(
            f"--gpus: found {gpus}, but {site.name} has no GPUs",
            hint="for so many ranks on its processors, say their number alone: --gpus 4",
            field="--gpus",
            found=gpus,
            allowed="a number of ranks",
        )
    has = f"{count_text(site.nodes, 'node')} of {site.gpus_per_node}"
    return InputError(
        f"--gpus: found {gpus}, but {site.name} has {has} GPUs",
        hint="for GPUs that are not here, say nodes and GPUs on each: --gpus 4x8" if at_hand else "see --cluster",
        field="--gpus",
        found=gpus,
        allowed=f"at most {site.nodes}x{site.gpus_per_node}",
    )
