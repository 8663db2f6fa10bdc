"""`gradus explain`: what is wrong with a run or a trace, the evidence, and the exact change."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradus.cli.output import print_json, shown
from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import Explanation, explain
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.versus_plan import Deviation
from gradus.diagnosis.wording import amount_text, evidence_text
from gradus.record.directory import RunDirectory
from gradus.record.format import count_text, number_text
from gradus.schema.errors import EXIT_FINISHED

_DEVIATIONS = 8  # rows of plan against measured that fit beside the findings; --json has all


def explain_command(target: str, runs: str, as_json: bool = False) -> int:
    evidence = evidence_of(target, Path(runs))
    found = explain(evidence)
    if as_json:
        print_json({**_subject(evidence), **found.document()})
    else:
        print(as_text(evidence, found))
    return EXIT_FINISHED


def evidence_of(target: str, runs: Path) -> Evidence:
    """Of a trace if the path is a file, else of a run: a path, an id or a name."""
    path = Path(target)
    return Evidence.of_trace(path) if path.is_file() else Evidence.of_run(RunDirectory.open(target, runs))


def _subject(evidence: Evidence) -> dict[str, Any]:
    if evidence.run is None:
        return {"run": None, "trace": str(evidence.trace_paths[0])}
    return {"run": str(evidence.run.path), "state": evidence.state}


def as_text(evidence: Evidence, found: Explanation) -> str:
    """For people: the findings in their order, then plan against measured, then what nobody measured."""
    blocks = [_headline(evidence, found)]
    blocks += [finding_text(number, finding) for number, finding in enumerate(found.findings, 1)]
    if any(one.predicted is not None for one in found.plan_against_measured):
        blocks.append(deviations_text(found.plan_against_measured))
    if found.not_measured:
        blocks.append("\n".join(["not measured", *(f"  {line}" for line in found.not_measured)]))
    return "\n\n".join(blocks)


def _headline(evidence: Evidence, found: Explanation) -> str:
    count = len(found.findings)
    said = count_text(count, "finding") if count else f"no finding: {found.if_nothing_found}"
    if evidence.run is None:
        return f"{evidence.trace_paths[0]}: {said}"
    steps = ""
    if evidence.step_seconds is not None:
        steps = f", {evidence.steps_measured} steps of {number_text(evidence.step_seconds)} s after the warm-up"
    return f"{shown(evidence.run.path)}: {evidence.state}{steps}; {said}"


def finding_text(number: int, finding: Finding) -> str:
    rows = [("evidence", "; ".join(evidence_text(key, value) for key, value in finding.evidence.items()))]
    rows.append(("change", finding.change))
    if finding.gain_at_most is not None:
        rows.append(("gain", f"at most {finding.gain_at_most:.0%} of the step time"))
    rows.append(("confidence", finding.confidence))
    rows += [("not measured", line) for line in finding.not_measured]
    lines = [f"{number}. {finding.id}: {finding.verdict}"]
    return "\n".join([*lines, *(f"   {label:<12}  {text}" for label, text in rows if text)])


def deviations_text(deviations: Sequence[Deviation]) -> str:
    """Plan against measured, the largest deviations first."""
    rows = [("plan against measured", "predicted", "measured", "ratio", "")]
    for one in deviations[:_DEVIATIONS]:
        ratio = f"{one.ratio:.2f}" if one.ratio is not None else ""
        rows.append(
            (f"  {one.kind}", amount_text(one.predicted, one.unit), amount_text(one.measured, one.unit), ratio, one.why)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(text.rjust(width) for text, width in zip(row[1:4], widths[1:], strict=True)),
        ]
        lines.append("  ".join([*cells, row[4]]).rstrip())
    if len(deviations) > _DEVIATIONS:
        lines.append(f"  and {len(deviations) - _DEVIATIONS} more: --json")
    return "\n".join(lines)
