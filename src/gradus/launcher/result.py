"""Result: how a run ended, and what it left behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics


@dataclass(frozen=True)
class Result:
    """How a run ended. `exit_code` is what `gradus train` leaves with."""

    run: RunDirectory
    state: str
    exit_code: int
    step: int
    loss: float | None
    reason: str | None = None
    error: dict[str, Any] | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row for each logged step."""
        return read_metrics(self.run)

    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "run": str(self.run.path),
            "state": self.state,
            "exit_code": self.exit_code,
            "step": self.step,
            "loss": self.loss,
            "reason": self.reason,
        }
        if self.error:
            document["error"] = self.error
        if self.problems:
            document["problems"] = self.problems
        return document
