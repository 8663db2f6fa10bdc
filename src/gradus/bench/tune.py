"""Tune: from the planner's plan to a faster one, by measuring. One knob after the other; what helps beyond noise stays.

Each gain is measured against the plan before it. In the end the factors are multiplied, and the last plan is measured
against the first, in turns: the two numbers need not be the same, and both are told.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gradus.bench.largest_micro_batch import LargestMicroBatch, largest_micro_batch, split
from gradus.bench.result import BenchResult, bench_environment
from gradus.bench.tried import Ranks, Repeated, Trial, Tried, host_memory_for, interleaved, noise_between, repeated
from gradus.bench.tried_recipe import why_not
from gradus.bench.tune_knobs import (
    KNOBS,
    Candidates,
    Standing,
    candidates,
    change_text,
    fields_of,
    knob_is_fixed,
    ordered,
)
from gradus.planner.defaults import Choice
from gradus.planner.shown import recompute_words
from gradus.record.chart import Bars
from gradus.record.format import bytes_text, rate_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

_LOSS_GAP = 0.02  # that a change of precision may make
_CHANGES_NUMBERS = {"precision", "narrow_weights"}
_LOOKED_AT_STEPS = 25  # of the run whose findings decide what is tried first
_TRIALS_FOR_FINDINGS = 3  # about so many trials' time does that run take
_NOT_WORTH = 0.98  # of the speed: what is slower than that in one trial is not tried again


@dataclass(frozen=True)
class Step:
    """One knob: what was tried of it, and what came of it."""

    knob: str
    change: str = ""  # the best of what was tried, for people
    fields: dict[str, Any] = field(default_factory=dict)
    factor: float | None = None  # of the speed, over the plan before
    noise: float | None = None
    kept: bool = False
    why: str = ""
    loss_gap: float | None = None
    memory_bytes: int | None = None
    tried: tuple[str, ...] = ()  # everything, with its speed


@dataclass(frozen=True)
class Tuned:
    """The plan that was found, and how."""

    recipe: Recipe
    planned: Plan  # by the planner
    start: Plan  # the same, or if it did not fit, the same in smaller pieces: what the first trial measured
    plan: Plan
    steps: tuple[Step, ...]
    reasons: dict[str, str]
    start_rate: float | None  # samples per second, of the last comparison where there was one
    rate: float | None
    measured: float | None  # the last plan over the first, in turns
    noise: float | None
    largest: LargestMicroBatch | None
    findings: tuple[str, ...]
    interrupted: bool
    notes: tuple[str, ...]
    seconds: float

    @property
    def composed(self) -> float:
        """The factors that were kept, multiplied."""
        return math.prod(step.factor for step in self.steps if step.kept and step.factor is not None)

    @property
    def changes(self) -> dict[str, Any]:
        """What is other than in the planner's plan."""
        before = self.planned.model_dump()
        return {name: value for name, value in self.plan.model_dump().items() if value != before[name]}

    def document(self) -> dict[str, Any]:
        return {
            "plan": self.plan.model_dump(mode="json"),
            "changes": self.changes,
            "start": self.start.model_dump(mode="json"),
            "steps": [asdict(step) for step in self.steps],
            "composed": self.composed,
            "measured": self.measured,
            "noise": self.noise,
            "samples_per_second": {"start": self.start_rate, "end": self.rate},
            "largest_micro_batch": self.largest.micro_batch if self.largest else None,
            "findings": list(self.findings),
            "interrupted": self.interrupted,
            "notes": list(self.notes),
            "seconds": self.seconds,
            "provenance": "measured",
        }

    def result(self) -> BenchResult:
        """The same as what a page shows."""
        rows = [{key: value for key, value in asdict(step).items() if key != "fields"} for step in self.steps]
        kept = [step for step in self.steps if step.kept and step.factor is not None]
        factors = [(step.change, step.factor) for step in kept] + [("composed", self.composed)]
        factors += [("measured end to end", self.measured)] if self.measured is not None else []
        return BenchResult(
            kind="tune",
            title=f"Tuning of {self.recipe.name}",
            settings={"recipe": self.recipe.name, "batch": self.recipe.batch, "ranks": self.plan.mesh.world_size},
            rows=rows,
            summary={
                "composed": self.composed,
                "measured": self.measured,
                "samples_per_second_start": self.start_rate,
                "samples_per_second_end": self.rate,
                "changes": self.changes,
            },
            charts=(Bars("Speed over the plan before", "×", tuple((name, (("×", f or 1.0),)) for name, f in factors)),),
            environment=bench_environment(),
            notes=self.notes,
        )


class Tuner:
    """A search under way. `plan` is the best so far at any moment, so that an interrupt loses nothing."""

    def __init__(
        self,
        recipe: Recipe,
        choice: Choice,
        cluster: Cluster,
        ranks: Ranks,
        *,
        say: Callable[[str], None],
        minutes: float,
        repeats: int = 3,
        seconds: float = 3.0,
        trial_seconds: float = 300.0,
        memory_bytes: int | None = None,
    ) -> None:
        self.recipe, self.cluster, self.ranks, self.say = recipe, cluster, ranks, say
        self.repeats, self._seconds, self._trial_seconds = repeats, seconds, trial_seconds
        self._began = time.monotonic()
        self._until = self._began + minutes * 60
        limit = memory_bytes if memory_bytes is not None else host_memory_for(ranks.count)
        self._memory = None if cluster.gpus_per_node else limit
        self.plan = self.start = self.planned = choice.plan
        self.reasons = dict(choice.reasons)
        self.steps: list[Step] = []
        self.notes: list[str] = []
        self.largest: LargestMicroBatch | None = None
        self.last: Tried | None = None
        self._took: list[float] = []  # seconds of trials

    def tuned(self, knobs: Sequence[str] | None = None, *, look: bool = True) -> Tuned:
        """Try what there is time for. Ctrl-C ends the search and keeps the best so far."""
        findings: tuple[str, ...] = ()
        ends: dict[str, Repeated] = {}
        interrupted = False
        try:
            self._begin()
            findings = self._findings() if look else ()
            order = ordered(findings, knobs or KNOBS)
            for at, knob in enumerate(order):
                self._turn(knob, order[at + 1 :], asked_for=knobs is not None)
            if self.plan != self.start and not self._over(2 * self.repeats):
                self.say("the last plan against the first, in turns")
                trials = {"start": self._trial(self.start), "end": self._trial(self.plan)}
                ends = self._measured(trials, self.repeats)
                self._keep_only_what_is_faster(ends)
        except KeyboardInterrupt:
            if self.last is None:  # nothing was measured yet
                raise
            interrupted = True
            self.notes.append("interrupted: this is the best so far")
        return self._result(findings, ends, interrupted)

    def _begin(self) -> None:
        """The planner's plan, or if it does not fit, the same in smaller pieces."""
        self.say(f"starts from: {_shape(self.plan)}")
        tried = self.ranks.try_out(self._trial(self.plan))
        if tried.state == "out-of-memory":
            self.say(f"{tried.state}: {tried.why}")
            found = self._search_largest()
            if found.micro_batch is not None and not knob_is_fixed("micro_batch", self.recipe):
                change = split(self.plan, self.recipe.batch, found.micro_batch)
                why = f"the planner's plan ran out of memory; {found.why}"
                fields = {"micro_batch": change.micro_batch, "accumulate": change.accumulate}
                self.steps.append(Step("micro_batch", change_text(self.plan, fields), fields, kept=True, why=why))
                self.plan = self.start = change
                self.reasons |= dict.fromkeys(fields, f"measured: {found.why}")
                tried = self.ranks.try_out(self._trial(self.plan))
        if not tried.measured:
            raise GradusError(
                f"the plan that tuning starts from cannot be measured ({tried.state}): {tried.why}",
                hint="gradus train --dry-run shows the whole error",
            )
        self.last = tried
        self._took.append(tried.seconds)
        self.say(f"  {_told(tried)}")

    def _findings(self) -> tuple[str, ...]:
        """What `gradus explain` says of a short run: that decides what is tried first."""
        from gradus.diagnosis.evidence import Evidence
        from gradus.diagnosis.explain import explain
        from gradus.launcher.launching import train

        if self._over(_TRIALS_FOR_FINDINGS):
            return ()
        short = self._trial(self.plan).changed(steps=_LOOKED_AT_STEPS).shortened
        ranks = self.ranks.count
        self.ranks.close()  # two sets of processes would share one device
        try:
            with tempfile.TemporaryDirectory(prefix="gradus-tune-") as folder:
                result = train(short, ranks, cluster=self.cluster, runs=folder, quiet=True)
                if result.state == "stopped":
                    raise KeyboardInterrupt
                found = explain(Evidence.of_run(result.run)).findings
        except Exception as error:  # findings decide what is tried first, and nothing else
            self.notes.append(f"no findings to go by: {type(error).__name__}: {error}")
            return ()
        for finding in found:
            self.say(f"finding: {finding.verdict}")
        return tuple(finding.id for finding in found)

    def _turn(self, knob: str, later: Sequence[str], *, asked_for: bool) -> None:
        if self._over(2):
            self.steps.append(Step(knob, why="not tried: the time was over"))
            return
        assert self.last is not None
        if (
            knob in ("micro_batch", "recompute")
            and self.largest is None
            and not knob_is_fixed("micro_batch", self.recipe)
        ):
            self.say("the largest micro-batch that fits")
            self._search_largest()
        standing = Standing(self.recipe, self.cluster, self.plan, self.last, self.largest, asked_for)
        found = candidates(knob, standing)
        if not found.changes:
            self.steps.append(Step(knob, why=found.why_none))
            self.say(f"{knob}: {found.why_none}")
            return
        most = self._changes_in_time(found, 1 + sum(self._may_be_tried(other, standing) for other in later))
        step = self._best_of(knob, Candidates(found.changes[:most]))
        if left_out := found.changes[most:]:
            names = (f"{change_text(standing.plan, change)}: left out, for other knobs" for change in left_out)
            step = replace(step, tried=(*step.tried, *names))
        self.steps.append(step)
        self.say(f"{knob}: {step_text(step)}")

    def _may_be_tried(self, knob: str, now: Standing) -> bool:
        if knob in ("micro_batch", "recompute") and now.largest is None:  # only a search tells what there is to try
            return not knob_is_fixed(knob, self.recipe)
        return bool(candidates(knob, now).changes)

    def _changes_in_time(self, found: Candidates, knobs: int) -> int:
        """How many changes of a knob its share of the time is enough for: one at least.

        Each is tried once, beside the present plan, and the best of them again in turns.
        """
        each = statistics.median(self._took)
        share = (self._until - time.monotonic()) / knobs
        return max(1, int(share / each) - 1 - 2 * self.repeats) if each else len(found.changes)

    def _best_of(self, knob: str, found: Candidates) -> Step:
        """All once; then the best of them against the present plan, in turns.

        What made one the best of several may have been luck: then only what is measured afterwards counts.
        """
        plans: dict[str, tuple[Plan, dict[str, Any]]] = {}
        told = []
        for change in found.changes:
            label, plan = change_text(self.plan, change), self.plan.model_copy(update=change)
            reason = why_not(self.recipe, self.cluster, plan)
            if reason is None:
                plans[label] = plan, change
            else:
                told.append(f"{label}: refused: {reason}")
        trials = {"": self._trial(self.plan)} | {label: self._trial(plan) for label, (plan, _) in plans.items()}
        first = self._measured(trials, 1) if plans else {}
        base = first.pop("", None)
        told += [f"{label}: {_told(each.tries[0])}" for label, each in first.items()]
        rates = {label: each.samples_per_second for label, each in first.items() if each.samples_per_second}
        if not rates or base is None or base.samples_per_second is None:
            why = (
                "none of them could be measured"
                if plans
                else f"nothing else can be: {told[0].partition(': refused: ')[2]}"
            )
            return Step(knob, why=why, tried=tuple(told))
        label = max(rates, key=lambda name: rates[name])
        plan, change = plans[label]
        mine, theirs = base, first[label]
        if rates[label] > _NOT_WORTH * base.samples_per_second and self.repeats > 1:
            chosen = len(rates) > 1
            more = self._measured({"": trials[""], label: trials[label]}, self.repeats - (not chosen))
            if label in more and "" in more:
                before = ((), ()) if chosen else (base.tries, theirs.tries)
                mine = Repeated(before[0] + more[""].tries)
                theirs = Repeated(before[1] + more[label].tries)
        step = self._judged(knob, label, change, mine, theirs)
        if step.kept:
            self.plan, self.last = plan, theirs.tries[-1]
            self.reasons |= dict.fromkeys(change, f"measured: {step.factor:.2f}× over {_before(label)}")
        else:
            values = ", ".join(_after(name) for name in plans)
            why = step.why if step.factor is not None and step.factor > 1 else f"not faster with {values}"
            self.reasons |= dict.fromkeys(fields_of(knob), f"measured: {why}")
        return replace(step, tried=tuple(told))

    def _keep_only_what_is_faster(self, ends: dict[str, Repeated]) -> None:
        """Gains of one knob each need not add up: what is not faster than the first plan in the end is given up."""
        factor = _factor(ends)
        if factor is None or factor > 1:
            return
        changed = [name for name, value in self.plan.model_dump().items() if value != getattr(self.start, name)]
        self.reasons |= dict.fromkeys(changed, f"measured: all that was kept, together, is {factor:.2f}× as fast")
        self.notes.append(f"all changes together are {factor:.2f}× as fast: the first plan stays")
        self.plan = self.start

    def _judged(self, knob: str, label: str, change: dict[str, Any], mine: Repeated, theirs: Repeated) -> Step:
        here, there = theirs.samples_per_second, mine.samples_per_second
        if here is None or there is None:
            failure = theirs.failure or mine.failure
            return Step(knob, label, change, why=failure.why if failure else "not measured")
        factor, noise = here / there, noise_between(mine, theirs)
        kept, why = factor > 1 + noise, "" if factor > 1 + noise else "no gain beyond noise"
        gap = _loss_gap(mine, theirs) if _CHANGES_NUMBERS & change.keys() else None
        if gap is not None and not abs(gap) <= _LOSS_GAP:  # nor where it is no number
            kept, why = False, f"the loss differs by {gap:+.1%} after as many steps"
        return Step(knob, label, change, factor, noise, kept, why, gap, theirs.memory_bytes)

    def _search_largest(self) -> LargestMicroBatch:
        self.largest = largest_micro_batch(
            self.ranks,
            self._trial(self.plan),
            lambda text: self.say(f"  {text}"),
            refused=lambda plan: why_not(self.recipe, self.cluster, plan),
        )
        return self.largest

    def _trial(self, plan: Plan) -> Trial:
        return Trial(
            self.recipe,
            plan,
            seconds=self._seconds,
            limit_seconds=self._trial_seconds,
            host_memory_bytes=self._memory,
        )

    def _measured(self, trials: dict[str, Trial], repeats: int) -> dict[str, Repeated]:
        found = []
        for label, tried in interleaved(self.ranks, trials, repeats):
            self._took.append(tried.seconds)
            self.say(f"  {label or 'as it is'}: {_told(tried)}")
            found.append((label, tried))
        return repeated(found)

    def _over(self, trials: int) -> bool:
        """Whether so many more trials would end after the time is over. Few of them start processes or compile."""
        each = min(self._took, default=0.0)
        return time.monotonic() + trials * each > self._until

    def _result(self, findings: tuple[str, ...], ends: dict[str, Repeated], interrupted: bool) -> Tuned:
        measured, noise = _factor(ends), None
        start_rate = rate = self.last.samples_per_second if self.last else None
        if measured is not None:
            first, last = ends["start"], ends["end"]
            start_rate, rate = first.samples_per_second, last.samples_per_second
            noise = noise_between(first, last)
        elif self.plan != self.start:
            start_rate = None
            self.notes.append("the last plan was not measured against the first: composed factors only")
        return Tuned(
            self.recipe,
            self.planned,
            self.start,
            self.plan,
            tuple(self.steps),
            self.reasons,
            start_rate,
            rate,
            measured,
            noise,
            self.largest,
            findings,
            interrupted,
            tuple(self.notes),
            time.monotonic() - self._began,
        )


def _factor(ends: dict[str, Repeated]) -> float | None:
    """The last plan over the first, if both were measured."""
    first, last = ends.get("start"), ends.get("end")
    if not first or not last or not first.samples_per_second or not last.samples_per_second:
        return None
    return last.samples_per_second / first.samples_per_second


def step_text(step: Step) -> str:
    """A step for people."""
    if step.factor is None:
        return f"{step.change + ': ' if step.change else ''}{step.why}"
    gap = f", loss {step.loss_gap:+.2%}" if step.loss_gap is not None else ""
    verdict = "kept" if step.kept else f"not kept: {step.why}"
    return f"{step.change}: {step.factor:.2f}× ±{step.noise or 0.0:.0%}{gap}, {verdict}"


def _loss_gap(mine: Repeated, theirs: Repeated) -> float | None:
    """Relative, over the last steps that both have made."""
    made = min(len(mine.losses), len(theirs.losses))
    few = max(1, made // 5)
    if not made:
        return None
    here, there = (statistics.fmean(each.losses[made - few : made]) for each in (theirs, mine))
    return here / there - 1 if there else None


def _told(tried: Tried) -> str:
    rate = tried.samples_per_second
    if rate is None:
        return f"{tried.state}: {tried.why}"
    memory = f", {bytes_text(tried.memory_bytes)}" if tried.memory_bytes is not None else ""
    return f"{rate_text(rate, 'samples')}{memory}"


def _shape(plan: Plan) -> str:
    on = [name for name in ("compile", "channels_last") if getattr(plan, name)]
    parts = [str(plan.mesh), f"micro-batch {plan.micro_batch} × {plan.accumulate}", plan.precision]
    return ", ".join([*parts, f"recompute {recompute_words(plan)}", f"workers {plan.workers}", *on])


def _before(label: str) -> str:
    return ", ".join(part.partition(" → ")[0] for part in label.split(", "))


def _after(label: str) -> str:
    return " + ".join(part.partition(" → ")[2] for part in label.split(", "))
