"""Finding: one thing that is wrong with a run, with the numbers that say so and the exact change that would help."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["fatal", "slow", "waste", "quality"]
Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class Finding:
    """A verdict with its evidence. `gain_at_most` is a ceiling, computed from what was measured."""

    id: str
    verdict: str  # one sentence
    evidence: dict[str, Any]  # numbers with their units in the keys
    change: str  # a recipe key with its value, a flag, or a line of the user's file
    gain_at_most: float | None  # of the step time, 0 to 1; None where it is not about speed
    confidence: Confidence
    severity: Severity = "slow"
    not_measured: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """What is not known is no evidence."""
        object.__setattr__(self, "evidence", {key: value for key, value in self.evidence.items() if value is not None})

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "verdict": self.verdict,
            "evidence": self.evidence,
            "change": self.change,
            "gain_at_most": None if self.gain_at_most is None else round(self.gain_at_most, 4),
            "confidence": self.confidence,
            "not_measured": list(self.not_measured),
            "severity": self.severity,
        }


def ranked(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Why it died first, then what makes the result worthless, then what costs time, the most to gain first.

    What is only a guess comes after what is sure.
    """
    order = {"fatal": 0, "quality": 1, "slow": 2, "waste": 2}
    return tuple(
        sorted(
            findings,
            key=lambda one: (
                order[one.severity] if one.confidence != "low" or one.severity == "fatal" else 3,
                -(one.gain_at_most or 0.0),
                {"high": 0, "medium": 1, "low": 2}[one.confidence],
            ),
        )
    )
