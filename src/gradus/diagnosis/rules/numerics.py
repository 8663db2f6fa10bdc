"""Numerics: what a run learns. Overfitting, a loss that runs away, steps that fp16 could not use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Confidence, Finding
from gradus.record.format import count_text
from gradus.record.metrics import Evaluation, evaluations
from gradus.schema.recipe import OWN, Recipe

# Fewer evaluations are no curve; and one that is worse than the best may be chance.
_FEWEST_EVALUATIONS, _FEWEST_AFTER_BEST = 4, 2
_RISE = 0.05  # of the validation loss above its best: less is noise of what is measured
_NOISE = 2.0  # times by which it went up now and then before
_FALL = 0.02  # of the training loss meanwhile
_BY_HEART, _SMALL_RISE = 0.5, 0.02  # where it has fallen below half, a smaller rise says the same
_FEWEST_STEPS = 10
_FEWEST_FOR_A_RISE = 20
_WINDOW = 0.1  # of the logged steps, at the beginning and at the end, that are averaged
_AWAY = 1.25  # times the loss of the beginning: it was not trained, it was ruined
_BACK = 0.5  # of what had been gained, lost again for good
_BURST, _NOTHING_LEARNED = 3.0, 0.95  # times the first loss, at its highest and in the end
_LAST = 3  # losses before death that are looked at
_WARMUP = 0.05  # of the steps: what is usual
_SETTLING_STEPS = 25  # in which a loss scale comes down from 65,536 to where gradients fit
_SKIPS, _SKIPPED_SHARE = 3, 0.02  # after that, so many and so large a share are no accident
_SKIPPED_MOSTLY = 0.25  # and of all steps, the settling included


def overfitting(evidence: Evidence) -> Finding | None:
    """The validation loss rises while the training loss falls."""
    points = [one for one in evaluations(evidence.rows, "loss") if math.isfinite(one.value)]
    if len(points) < _FEWEST_EVALUATIONS:
        return None
    best = min(points, key=lambda one: one.value)
    after = [one for one in points if one.step > best.step]
    if len(after) < _FEWEST_AFTER_BEST or _keeps_the_best(evidence.recipe):
        return None
    late = [one.value for one in after[-max(_FEWEST_AFTER_BEST, len(after) // 2) :]]
    rise = median(late) - best.value
    then, now = _training_loss(evidence, best.step), _training_loss(evidence, points[-1].step)
    if then is None or now is None or now > then - _FALL * abs(then):
        return None
    enough = _RISE if now > _BY_HEART * then else _SMALL_RISE
    if rise < enough * abs(best.value) or rise < _NOISE * _usual_change(points, best):
        return None
    found = {
        "best_step": best.step,
        "best_validation_loss": best.value,
        "last_step": points[-1].step,
        "last_validation_loss": points[-1].value,
        "training_loss_then": then,
        "training_loss_now": now,
        "steps_after_best": points[-1].step - best.step,
    }
    verdict = (
        f"it overfits: the validation loss was best at step {best.step} ({best.value:.4g}) and has risen to "
        f"{points[-1].value:.4g}, while the training loss fell from {then:.4g} to {now:.4g}"
    )
    return Finding("overfitting", verdict, found, _against_overfitting(evidence), None, "high", "quality")


def _against_overfitting(evidence: Evidence) -> str:
    recipe = evidence.recipe
    steps = ["--set evaluate.stop_after=3 --set checkpoint.best=true: stop there, and keep that checkpoint"]
    if recipe is not None and recipe.optimizer.use != OWN:
        steps.append(f"--set optimizer.weight_decay={max(0.1, 2 * recipe.optimizer.weight_decay):g}")
    steps.append("more data, augmentation or dropout, or a smaller model")
    return "; or ".join(steps)


def _keeps_the_best(recipe: Recipe | None) -> bool:
    """Whether the run stops by itself when it gets no better, and keeps what was best."""
    return recipe is not None and recipe.evaluate.stop_after is not None and recipe.checkpoint.best


def _usual_change(points: Sequence[Evaluation], best: Evaluation) -> float:
    """By how much evaluations went up now and then, on their way down to the best."""
    before = [one.value for one in points if one.step <= best.step]
    ups = [second - first for first, second in pairwise(before) if second > first]
    return fmean(ups) if ups else 0.0


def _training_loss(evidence: Evidence, step: int) -> float | None:
    """Around a step: the mean of the last few logged until then."""
    losses = [
        (row["step"], row["loss"]) for row in evidence.rows if _is_number(row.get("loss")) and row["step"] <= step
    ]
    width = max(3, round(len(evidence.rows) * _WINDOW))
    return fmean(loss for _, loss in losses[-width:]) if losses else None


def diverged(evidence: Evidence) -> Finding | None:
    """The loss ends above where it began, or has lost again most of what it had gained, or is no number."""
    rows = [row for row in evidence.rows if isinstance(row.get("loss"), float | int)]
    finite = [row for row in rows if math.isfinite(row["loss"])]
    if len(rows) < _FEWEST_STEPS or not finite or evidence.state == "failed":
        return None  # of what died of it, `not_a_number` tells
    if not math.isfinite(rows[-1]["loss"]):
        since = next(row["step"] for row in rows if row["step"] > finite[-1]["step"])
        verdict = f"the loss is no number from step {since} on"
        return _diverged(evidence, verdict, {"since_step": since, "last_good_step": finite[-1]["step"]}, "high")
    losses = [float(row["loss"]) for row in finite]
    width = max(3, round(len(losses) * _WINDOW))
    smooth = [median(losses[max(0, at - width + 1) : at + 1]) for at in range(len(losses))]
    first, end = median(losses[:width]), smooth[-1]
    lowest = min(range(width - 1, len(smooth)), key=lambda at: smooth[at])
    best, best_step = min((smooth[lowest], finite[lowest]["step"]), (first, finite[0]["step"]))
    noise = median(abs(after - before) for before, after in pairwise(losses))
    at_first, at_last = _median_of(finite[:width]), _median_of(finite[-width:])
    highest_step = finite[losses.index(max(losses))]["step"]
    found = {
        "first_loss": first,
        "first_loss_from": at_first,
        "best_loss": best,
        "best_step": best_step,
        "last_loss": end,
        "last_loss_from": at_last,
        "highest_loss": max(losses),
        "highest_step": highest_step,
    }
    if end > first + max((_AWAY - 1) * abs(first), 3 * noise):
        since = next(row["step"] for row in finite if row["loss"] > first + (_AWAY - 1) * abs(first))
        verdict = f"the loss ran away from step {since} on: {first:.4g} ({at_first}), now {end:.4g} ({at_last})"
        return _diverged(evidence, verdict, {**found, "since_step": since}, "high")
    gained, lost = first - best, end - best
    # The best is the lowest of many, and lower by chance the more there are.
    surely = len(losses) >= _FEWEST_FOR_A_RISE and lost > 5 * noise
    if surely and gained > 0 and lost > _BACK * gained and lost > 0.1 * abs(first):
        verdict = f"the loss came down to {best:.4g} at step {best_step}, and went up again to {end:.4g} for good"
        return _diverged(evidence, verdict, {**found, "since_step": best_step}, "medium")
    # The burst may be among the first ones, whose median then says nothing of the beginning.
    first, at_first = losses[0], f"step {finite[0]['step']}"
    if max(losses) > _BURST * abs(first) and end > _NOTHING_LEARNED * first:
        verdict = (
            f"the loss burst to {max(losses):.4g} at step {highest_step}, and has learned nothing: "
            f"{first:.4g} ({at_first}), now {end:.4g} ({at_last})"
        )
        found |= {"first_loss": first, "first_loss_from": at_first, "since_step": highest_step}
        if first < best:
            found |= {"best_loss": first, "best_step": finite[0]["step"]}
        return _diverged(evidence, verdict, found, "medium")
    return None


def _median_of(rows: Sequence[dict[str, Any]]) -> str:
    return f"median of steps {rows[0]['step']} to {rows[-1]['step']}"


def ran_away_to_death(evidence: Evidence) -> Finding | None:
    """Of a run whose loss became no number: whether it had been on its way there, step by step."""
    losses = [(row["step"], float(row["loss"])) for row in evidence.rows if _is_number(row.get("loss"))]
    if len(losses) < 2:
        return None
    (began, first), (step, last) = losses[0], losses[-1]
    late = [loss for _, loss in losses[1:]][-_LAST:]
    grows = (
        len(late) == _LAST and all(later > earlier for earlier, later in pairwise(late)) and last > _AWAY * abs(first)
    )
    if not grows and max(late) <= max(_BURST * abs(first), first):
        return None
    since = next((at for at, loss in losses if loss > first + (_AWAY - 1) * abs(first)), step)
    verdict = f"the loss ran away until it was no number: {first:.4g} at step {began}, {last:.4g} at step {step}"
    found = {
        "first_loss": first,
        "first_loss_from": f"step {began}",
        "last_loss": last,
        "since_step": since,
        "last_good_step": step,
    }
    return replace(_diverged(evidence, verdict, found, "high"), severity="fatal")


def _diverged(evidence: Evidence, verdict: str, found: dict[str, Any], confidence: Confidence) -> Finding:
    recipe = evidence.recipe
    rates = [row["lr"] for row in evidence.rows if _is_number(row.get("lr"))]
    if recipe is None or recipe.optimizer.use == OWN:
        lower = (
            f"lr={max(rates) / 10:.3g} in your optimizer (it was {max(rates):g})" if rates else "a lower learning rate"
        )
        change = f"{lower}, a warm-up, gradients clipped to 1.0"
        return Finding("diverged", verdict, found, change, None, confidence, "quality")
    optimizer = recipe.optimizer
    highest = max(rates, default=optimizer.lr)
    found |= {"batch": recipe.batch, "highest_lr": highest, "warmup_steps": optimizer.warmup, "clip": optimizer.clip}
    changes = []
    steps = recipe.steps or (evidence.status.steps_total if evidence.status is not None else None) or len(evidence.rows)
    usual = max(10, round(_WARMUP * steps))
    if optimizer.lr_batch is not None:
        found |= {"lr_batch": optimizer.lr_batch, "lr_scaling": optimizer.lr_scaling}
        verdict += (
            f"; the batch is {recipe.batch / optimizer.lr_batch:g} times the {optimizer.lr_batch} that lr was for, "
            f"and the learning rate was scaled by {optimizer.lr_scaling} to {highest:.3g}"
        )
        if optimizer.lr_scaling == "linear":
            changes.append("--set optimizer.lr_scaling=sqrt")
    if optimizer.warmup < usual:
        verdict += f"; there are {optimizer.warmup} steps of warm-up" if optimizer.warmup else "; there is no warm-up"
        changes.append(f"--set optimizer.warmup={usual}")
    if "lr" in optimizer.model_fields_set:
        changes.append(f"--set optimizer.lr={optimizer.lr / 10:.3g} (it is {optimizer.lr:g})")
    if optimizer.clip is None:
        changes.append("--set optimizer.clip=1.0")
    return Finding("diverged", verdict, found, "; and ".join(changes), None, confidence, "quality")


def loss_scale_skips(evidence: Evidence) -> Finding | None:
    """Steps of fp16 whose gradients overflowed: they were computed, and thrown away."""
    skipped = sorted(
        int(event["step"])
        for event in evidence.events
        if event.get("event") == "skipped-step" and event.get("scale_before") is not None and "step" in event
    )
    steps = evidence.status.step if evidence.status is not None else 0
    if not skipped or steps < 1:
        return None
    later = [step for step in skipped if step > _SETTLING_STEPS]
    late_share = len(later) / max(1, steps - _SETTLING_STEPS)
    share = len(skipped) / max(steps, skipped[-1])
    if not (len(later) >= _SKIPS and late_share >= _SKIPPED_SHARE) and not (
        len(skipped) > 2 * _SKIPS and share >= _SKIPPED_MOSTLY
    ):
        return None
    scales = [event.get("scale_after") for event in evidence.events if event.get("event") == "skipped-step"]
    found = {
        "skipped_steps": len(skipped),
        "steps": steps,
        "share": share,
        "skipped_after_settling": len(later),
        "loss_scale": next((scale for scale in reversed(scales) if scale is not None), None),
    }
    verdict = f"{len(skipped)} of {steps} steps ({share:.0%}) were thrown away: their gradients overflowed in fp16"
    change = (
        "--set plan.precision=bf16: it has the range of fp32, and needs no loss scale; where the GPU has none, fp32"
    )
    return Finding("loss-scale-skips", verdict, found, change, share, "high", "slow")


def rolled_back(evidence: Evidence) -> Finding | None:
    """The run went back before a fault, and goes on without the samples of that step: nobody may have noticed."""
    times = [event for event in evidence.events if event.get("event") == "rollback"]
    if not times:
        return None
    again = sum(event["from_step"] - event["to_step"] for event in times)
    steps = evidence.status.step if evidence.status is not None else times[-1]["from_step"]
    last = times[-1]
    found = {
        "rollbacks": len(times),
        "steps_done_again": again,
        "from_steps": [event["from_step"] for event in times],
        "last_sample_indices": last.get("sample_indices"),
    }
    back = f"from step {last['from_step']} to step {last['to_step']}"
    verdict = f"the run went back {count_text(len(times), 'time')}, the last time {back}: {last['why']}"
    change = (
        "look at the samples that it goes on without (gradus data show, and the run's events): what is bad goes into "
        "data.skip of the recipe; where each time it is others, a lower optimizer.lr, or optimizer.clip"
    )
    return Finding("rolled-back", verdict, found, change, again / max(1, steps + again), "high", "waste")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


RULES = (overfitting, diverged, loss_scale_skips, rolled_back)
