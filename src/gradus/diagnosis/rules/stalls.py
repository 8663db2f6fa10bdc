"""Stalls: what stops training every now and then: checkpoints and evaluations."""

from __future__ import annotations

import math
from statistics import mean

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding

CHECKPOINT_SHARE = 0.1  # of training time; a usual interval of minutes costs a fraction of a percent
EVALUATION_SHARE = 0.2  # an evaluation after each epoch, on a tenth of the data, takes less than a tenth
# A short run that saves once at its end is not badly set up: it takes a few of them, and more than a blink in all.
LEAST_TIMES = 3
LEAST_SECONDS = 0.5
GOOD_CHECKPOINT_SHARE = 0.02
GOOD_EVALUATION_SHARE = 0.05


def checkpoint_stall(evidence: Evidence) -> Finding | None:
    saved = [event for event in evidence.last_events if event.get("event") == "checkpoint"]
    stalled = _total(evidence, "checkpoint")
    if len(saved) < LEAST_TIMES or stalled < LEAST_SECONDS or evidence.share("checkpoint") < CHECKPOINT_SHARE:
        return None
    assert evidence.step_seconds is not None
    told = [event["stall_seconds"] for event in saved if isinstance(event.get("stall_seconds"), float)]
    each = mean(told) if told else stalled / len(saved)
    seconds = math.ceil(each / GOOD_CHECKPOINT_SHARE)
    change = f"--set checkpoint.every={_interval(seconds)}"
    if evidence.recipe is not None and not evidence.recipe.checkpoint.background:
        change = f"--set checkpoint.background=true (written beside training); and {change}"
    facts = {
        "checkpoint_seconds": evidence.seconds["checkpoint"],
        "step_seconds": evidence.step_seconds,
        "share": evidence.share("checkpoint"),
        "checkpoints": len(saved),
        "stall_of_each_seconds": each,
        "written_bytes": saved[-1].get("bytes"),
        "every": str(evidence.plan.checkpoint_every) if evidence.plan else None,
    }
    return Finding(
        "checkpoint-stall",
        f"training stands still for {each:.2g} s at each of {len(saved)} checkpoints, "
        f"{evidence.share('checkpoint'):.0%} of its time",
        facts,
        change,
        evidence.share("checkpoint"),
        evidence.confidence,
    )


def evaluation_share(evidence: Evidence) -> Finding | None:
    of_attempt = [row for row in evidence.rows if row.get("attempt", evidence.attempt) == evidence.attempt]
    times = [row["evaluation_seconds"] for row in of_attempt if row.get("evaluation_seconds") is not None]
    spent, share = _total(evidence, "evaluation"), evidence.share("evaluation")
    if len(times) < LEAST_TIMES or spent < LEAST_SECONDS or share < EVALUATION_SHARE:
        return None
    assert evidence.step_seconds is not None
    training = evidence.step_seconds - evidence.seconds["evaluation"]
    each = sum(times) / len(times)
    every = max(2, _round_number(each / (GOOD_EVALUATION_SHARE * max(training, 1e-6))))
    block = evidence.recipe.evaluate if evidence.recipe else None
    fewer = "" if block is None or block.batches is not None else ", or --set evaluate.batches=N for a part of the data"
    facts = {
        "evaluation_seconds": evidence.seconds["evaluation"],
        "step_seconds": evidence.step_seconds,
        "share": share,
        "evaluations": len(times),
        "one_evaluation_seconds": each,
        "every_steps": block.every if block else None,
    }
    return Finding(
        "evaluation-share",
        f"{share:.0%} of the time goes into {len(times)} evaluations of {each:.2g} s each",
        facts,
        f"--set evaluate.every={every}{fewer}",
        share,
        evidence.confidence,
    )


def _total(evidence: Evidence, kind: str) -> float:
    """Seconds of the steady steps that one rank spent on a kind."""
    return evidence.seconds.get(kind, 0.0) * evidence.steps_measured


def _interval(seconds: int) -> str:
    return f"{seconds}s" if seconds < 60 else f"{math.ceil(seconds / 60)}m"


def _round_number(value: float) -> int:
    """Up, to one that people would choose: 1, 2 or 5 times a power of ten."""
    if value <= 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return next(int(step * power) for step in (1, 2, 5, 10) if step * power >= value)


RULES = (checkpoint_stall, evaluation_share)
