"""Not a number: a run that ended because its loss or its gradients were no numbers any more."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from gradus.diagnosis.demise import Demise
from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.rules.numerics import ran_away_to_death

_SAID = re.compile(
    r"the [\w -]+ is (?:nan|-?inf) at step|was no number in|fp16 gradients overflowed|returned nan values|"
    r"loss (?:is|was|became|=)[ :]*(?:nan|-?inf)\b|\bnan loss\b|non-?finite loss|not finite",
    re.IGNORECASE,
)
_AT_STEP = re.compile(r"at step (\d+)|up to step (\d+)")
_SHOWN_SCALES = 8


def not_a_number(demise: Demise) -> Finding | None:
    if not _SAID.search(demise.said):
        return None
    evidence_of = demise.evidence
    precision = evidence_of.plan.precision if evidence_of.plan is not None else None
    found = _AT_STEP.search(demise.message)
    step = demise.error.get("step") or (int(found[1] or found[2]) if found else None)
    untrained = _before_any_update(evidence_of, step)
    if not untrained and precision != "fp16" and (on_its_way := ran_away_to_death(evidence_of)) is not None:
        return replace(on_its_way, evidence={**demise.facts, **on_its_way.evidence})
    evidence: dict[str, Any] = {**demise.facts, "step": step, "precision": precision}
    for name in ("last_good_step", "checkpoint_step", "sample_indices", "scale"):
        if demise.error.get(name) is not None:
            evidence[name] = demise.error[name]
    skipped = [event for event in evidence_of.last_events if event.get("event") == "skipped-step"]
    scales = [event["scale_before"] for event in skipped if event.get("scale_before") is not None]
    if scales:
        evidence |= {"skipped_steps": len(skipped), "loss_scales": scales[-_SHOWN_SCALES:]}
    verdict = demise.first_line.partition(". Samples of")[0]
    changes = []
    if precision == "fp16":
        changes.append("--set plan.precision=bf16: it has the range of fp32, and no loss scale")
        verdict += "; fp16 reaches no further than 65,504"
    if untrained:
        verdict += "; it was so before any update of the weights, so it is not the learning rate"
        changes += _against_bad_forward(demise)
    else:
        changes += _against_bad_updates(demise)
    return Finding("nan", verdict, evidence, "; or ".join(changes), None, "high", "fatal")


def _before_any_update(evidence: Evidence, step: int | None) -> bool:
    """Whether the weights are still those that the run began with. Of a script, nobody knows how it counts steps."""
    if step is None or evidence.recipe is None:
        return False
    skipped = {event.get("step") for event in evidence.last_events if event.get("event") == "skipped-step"}
    return skipped.issuperset(range(1, step))


def _against_bad_forward(demise: Demise) -> list[str]:
    samples = "the samples of that step" if demise.error.get("sample_indices") else "the data"
    return [
        "--set anomaly=true: names the operation whose gradient is no number",
        f"look at {samples} (is there an inf or a nan in them?) and at the forward and the loss: a log of 0, "
        "a division by 0",
    ]


def _against_bad_updates(demise: Demise) -> list[str]:
    recipe = demise.evidence.recipe
    if recipe is None:
        half = ["torch.bfloat16 in place of torch.float16"]
        usual = ["a tenth of the learning rate", "a warm-up", "torch.nn.utils.clip_grad_norm_(..., 1.0)"]
        return [*half, *usual] if "float16" in demise.log or "autocast" in demise.said else usual
    changes, optimizer = [], recipe.optimizer
    if "lr" in optimizer.model_fields_set:
        changes.append(f"--set optimizer.lr={optimizer.lr / 10:g} (it was {optimizer.lr:g})")
    if not optimizer.warmup:
        changes.append(f"--set optimizer.warmup={max(10, (recipe.steps or 1000) // 20)}")
    if optimizer.clip is None:
        changes.append("--set optimizer.clip=1.0")
    if demise.error.get("sample_indices"):
        changes.append("look at the samples of that step; --set on_nan=skip goes on without them")
    return changes
