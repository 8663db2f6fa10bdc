"""Report: what became of a save, as its writer tells it. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["written", "retrying", "failed", "copied", "committed", "pruned", "prune-failed", "note"]


@dataclass(frozen=True)
class Report:
    """`written`: the memory is free again. `note`: what a user should know, and nothing has to be done about."""

    kind: Kind
    step: int
    message: str
    seconds: float = 0.0  # since the save began; of a retry, until it
    bytes: int = 0
