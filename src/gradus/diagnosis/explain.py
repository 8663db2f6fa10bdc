"""Explain: what is wrong with a run, ranked, from the evidence that it left."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gradus.diagnosis.evidence import ENOUGH_STEPS, Evidence
from gradus.diagnosis.finding import Finding, ranked
from gradus.diagnosis.rules import (
    beside,
    communication,
    cores,
    data,
    dead,
    devices,
    host_sync,
    kernels,
    memory,
    numerics,
    pipeline,
    script,
    stalls,
    stragglers,
)
from gradus.diagnosis.versus_plan import Deviation, versus_plan
from gradus.diagnosis.wording import in_an_own_loop

Rule = Callable[[Evidence], "Finding | Iterable[Finding] | None"]

RULES: tuple[Rule, ...] = (
    *dead.RULES,
    *data.RULES,
    *communication.RULES,
    *stragglers.RULES,
    *pipeline.RULES,
    *kernels.RULES,
    *memory.RULES,
    *stalls.RULES,
    *beside.RULES,
    *devices.RULES,
    *cores.RULES,
    *numerics.RULES,
    *host_sync.RULES,
    *script.RULES,
)


@dataclass(frozen=True)
class Explanation:
    """All that there is to say about a run."""

    findings: tuple[Finding, ...]
    plan_against_measured: tuple[Deviation, ...]
    not_measured: tuple[str, ...]
    if_nothing_found: str  # why there is no finding, in words

    def document(self) -> dict[str, Any]:
        return {
            "findings": [finding.document() for finding in self.findings],
            "plan_against_measured": [deviation.document() for deviation in self.plan_against_measured],
            "not_measured": list(self.not_measured),
        }


def explain(evidence: Evidence) -> Explanation:
    """Every rule asked, and what they found in the order in which it matters."""
    found: list[Finding] = []
    for rule in RULES:
        answer = rule(evidence)
        found += [] if answer is None else [answer] if isinstance(answer, Finding) else list(answer)
    if evidence.is_own_loop:
        found = [replace(one, change=in_an_own_loop(one.change)) for one in found]
    return Explanation(
        ranked(found), tuple(versus_plan(evidence)), tuple(_not_measured(evidence)), _if_nothing_found(evidence)
    )


def _if_nothing_found(evidence: Evidence) -> str:
    if evidence.script is None or evidence.timings or evidence.traces:
        return "nothing that was measured stands out"
    return f"nothing was measured of the steps of this script; `{evidence.profiling('steps=5')}` does that"


def _not_measured(evidence: Evidence) -> list[str]:
    """What a reader may expect to be judged and was not, and how it would be."""
    cut_off = any(trace.truncated for trace in evidence.traces)
    missing = ["the end of a trace: its file is cut off, and what could be read was used"] if cut_off else []
    if evidence.run is None:
        return [*missing, "anything but the traced steps: no metrics, no devices, no plan"]
    if not evidence.timings:
        missing.append("time by kind: the run has no timings (it is of an older version, of a foreign script, or died)")
    elif evidence.judged_step_seconds is None:
        missing.append(f"speed: only {evidence.steps_measured} steps after the warm-up, too few to judge it by")
    elif evidence.steps_measured < ENOUGH_STEPS:
        missing.append(f"only {evidence.steps_measured} steps after the warm-up: little can be told from them")
    if evidence.trace_paths and len(evidence.traces) == 0:
        missing.append(f"{evidence.trace_paths[0].name}: cannot be read as a trace")
    elif not evidence.trace_paths:
        missing.append(f"single kernels and synchronisations: no trace ({evidence.profiling('steps=5')})")
    if not evidence.device_samples:
        missing.append("GPU and host load: no samples of the devices")
    elif all(sample.gpus is None for sample in evidence.device_samples):
        missing.append("GPUs: there is no NVIDIA driver on the nodes of this run")
    return missing
