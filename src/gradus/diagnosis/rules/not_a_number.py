"""Not a number: a run that ended because its loss or its gradients were no numbers any more."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from gradus.diagnosis.demise import Demise
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
    plan, recipe = evidence_of.plan, evidence_of.recipe
    precision = plan.precision if plan is not None else None
    if precision != "fp16" and (on_its_way := ran_away_to_death(evidence_of)) is not None:
        return replace(on_its_way, evidence={**demise.facts, **on_its_way.evidence})
    found = _AT_STEP.search(demise.message)
    step = demise.error.get("step") or (int(found[1] or found[2]) if found else None)
    evidence: dict[str, Any] = {**demise.facts, "step": step, "precision": precision}
    for name in ("last_good_step", "checkpoint_step", "sample_indices", "scale"):
        if demise.error.get(name) is not None:
            evidence[name] = demise.error[name]
    skipped = [event for event in evidence_of.last_events if event.get("event") == "skipped-step"]
    scales = [event["scale_before"] for event in skipped if event.get("scale_before") is not None]
    if scales:
        evidence |= {"skipped_steps": len(skipped), "loss_scales": scales[-_SHOWN_SCALES:]}
    changes = []
    why = ""
    if precision == "fp16":
        changes.append("--set plan.precision=bf16: it has the range of fp32, and no loss scale")
        why = "; fp16 reaches no further than 65,504"
    if recipe is not None:
        optimizer = recipe.optimizer
        if "lr" in optimizer.model_fields_set:
            changes.append(f"--set optimizer.lr={optimizer.lr / 10:g} (it was {optimizer.lr:g})")
        warmup = optimizer.warmup or max(10, (recipe.steps or 1000) // 20)
        if not optimizer.warmup:
            changes.append(f"--set optimizer.warmup={warmup}")
        if optimizer.clip is None:
            changes.append("--set optimizer.clip=1.0")
        if demise.error.get("sample_indices"):
            changes.append("look at the samples of that step; --set on_nan=skip goes on without them")
    else:
        changes += ["a tenth of the learning rate", "a warm-up", "torch.nn.utils.clip_grad_norm_(..., 1.0)"]
        if "float16" in demise.log or "autocast" in demise.said:
            changes.insert(0, "torch.bfloat16 in place of torch.float16")
    verdict = f"{demise.first_line.partition('. Samples of')[0]}{why}"
    return Finding("nan", verdict, evidence, "; or ".join(changes), None, "high", "fatal")
