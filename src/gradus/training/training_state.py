"""TrainingState: what a checkpoint holds besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradus.training.epochs import EpochSums
from gradus.training.evaluation import Progress


@dataclass
class TrainingState:
    """How far a run is. The data position is `step` itself: the order needs no state."""

    step: int = 0
    skipped_steps: list[int] = field(default_factory=list)  # fp16 overflows; the schedule does not count them
    evaluation: Progress = field(default_factory=Progress)
    epoch: EpochSums = field(default_factory=EpochSums)

    def schedule_position(self) -> int:
        """Optimizer steps done, as far as is known when the next step starts: an overflow shows one step late."""
        return self.step - sum(skipped <= self.step - 2 for skipped in self.skipped_steps)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> TrainingState:
        evaluation, epoch = Progress(**document["evaluation"]), EpochSums(**document.get("epoch", {}))
        return cls(**{**document, "evaluation": evaluation, "epoch": epoch})
