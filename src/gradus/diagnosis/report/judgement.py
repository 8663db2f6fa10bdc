"""Judgement: what `gradus explain` says of a run, as parts of its report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gradus.diagnosis.explain import Explanation
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.versus_plan import Deviation
from gradus.diagnosis.wording import amount_text, evidence_text, words
from gradus.record.chart import Bars
from gradus.record.chart_html import render_chart
from gradus.record.page_html import missing, paragraph, table_html


def findings_html(found: Explanation, *, over: bool) -> str:
    """The findings in their order, and below them what nobody measured."""
    if found.findings:
        body = "".join(map(_finding, found.findings))
    else:
        so_far = "" if over else " so far"
        body = paragraph(f"No finding{so_far}: {found.if_nothing_found}.")
    if not found.not_measured:
        return body
    lines = "".join(f"<li>{escape(line)}</li>" for line in found.not_measured)
    return f"{body}<h3>Not measured</h3>\n<ul>{lines}</ul>\n"


def _finding(finding: Finding) -> str:
    gain = f"gain at most {finding.gain_at_most:.0%} of the step time · " if finding.gain_at_most is not None else ""
    numbers = "; ".join(evidence_text(key, value) for key, value in finding.evidence.items() if value is not None)
    lacking = "".join(f'<p class="meta">Not measured: {escape(line)}</p>' for line in finding.not_measured)
    return (
        f'<article class="finding {finding.severity}"><h3>{escape(finding.verdict)}</h3>\n'
        f'<p class="do">Change: <code>{escape(finding.change)}</code></p>\n'
        f"<p>{escape(_capital(numbers))}</p>\n{lacking}"
        f'<p class="meta">{escape(gain)}confidence {finding.confidence} · <code>{escape(finding.id)}</code></p>'
        "</article>\n"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def versus_plan_html(deviations: Sequence[Deviation], *, predicted: bool) -> str:
    """Every kind beside its prediction."""
    if not deviations:
        return missing("Nothing to compare: the run has no timings, or has made no steps.")
    rows = [
        (
            words(one.kind),
            amount_text(one.predicted, one.unit) if one.predicted is not None else None,
            amount_text(one.measured, one.unit) if one.measured is not None else "not measured",
            f"{one.ratio:.2f} ×" if one.ratio is not None else None,
            one.why,
        )
        for one in deviations
    ]
    times = [one for one in deviations if one.unit == "seconds" and one.kind != "total"]
    bars = ""
    if predicted and any(one.predicted for one in times):
        parts = (
            ("predicted", [(one.kind, one.predicted) for one in times]),
            ("measured", [(one.kind, one.measured) for one in times]),
        )
        bars = render_chart(
            Bars(
                "A step, predicted and measured",
                "s",
                tuple((label, tuple((words(kind), value) for kind, value in found if value)) for label, found in parts),
            )
        )
    said = "" if predicted else paragraph("Nothing was predicted of this run: the speed of its device is not known.")
    return said + bars + table_html(("kind", "predicted", "measured", "ratio", "why"), rows, numbers=3)
