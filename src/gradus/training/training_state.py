"""TrainingState: what a checkpoint holds besides tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from gradus.faults.spikes import SpikeWatch
from gradus.training.epochs import EpochSums
from gradus.training.evaluation import Progress


@dataclass
class TrainingState:
    """How far a run is. Its place in the stream of samples follows from `step` and what was skipped."""

    step: int = 0
    skipped_steps: list[int] = field(default_factory=list)  # that changed no weights; the schedule does not count them
    not_finite_steps: list[int] = field(default_factory=list)  # of those, the ones that `on_nan: skip` skipped
    rollbacks: int = 0  # so far; the run's folder counts them too, since this goes back with the rest
    skipped_positions: tuple[tuple[int, int], ...] = ()  # of the stream of samples: they are never trained on
    evaluation: Progress = field(default_factory=Progress)
    epoch: EpochSums = field(default_factory=EpochSums)
    spikes: SpikeWatch = field(default_factory=SpikeWatch)

    def schedule_position(self) -> int:
        """Optimizer steps done, as far as is known when the next step starts: an overflow shows one step late."""
        return self.step - sum(skipped <= self.step - 2 for skipped in self.skipped_steps)

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> TrainingState:
        evaluation, epoch = Progress(**document["evaluation"]), EpochSums(**document["epoch"])
        skipped = tuple((first, end) for first, end in document["skipped_positions"])
        nested = {"evaluation": evaluation, "epoch": epoch, "spikes": SpikeWatch(**document.get("spikes", {}))}
        return cls(**{**document, **nested, "skipped_positions": skipped})
