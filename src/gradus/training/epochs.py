"""Epochs: what the training of one pass over the dataset came to, put together from the numbers of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from gradus.training.readback import StepNumbers


@dataclass(frozen=True)
class Epoch:
    """A pass over the dataset that is over."""

    number: int  # from 1
    loss: float  # mean over the valid tokens or samples of the pass, each with the weights of its step
    samples: float
    seconds: float  # of its steps: evaluations and checkpoints do not count


@dataclass
class EpochSums:
    """What the present epoch has come to so far. It is kept in checkpoints.

    The stream of samples runs on across epochs, so a step may lie in two. It then counts in each with its share: the
    losses of single samples are not known.
    """

    loss_sum: float = 0.0
    count: float = 0.0
    samples: float = 0.0
    seconds: float = 0.0

    def add(self, positions: range, length: int, numbers: StepNumbers, seconds: float) -> Epoch | None:
        """Take in a step with these positions of the stream. The last epoch that it ends, if it ends one."""
        ended = positions.stop // length  # how many epochs are over now
        over = ended * length
        if over <= positions.start:
            self._take(len(positions), len(positions), numbers, seconds)
            return None
        # A step may hold several whole epochs of a very small dataset: of these the last one counts.
        first = max(positions.start, over - length)
        if first > positions.start:
            self._clear()
        self._take(over - first, len(positions), numbers, seconds)
        loss = self.loss_sum / self.count if self.count else float("nan")
        epoch = Epoch(ended, loss, self.samples, self.seconds)
        self._clear()
        self._take(positions.stop - over, len(positions), numbers, seconds)
        return epoch

    def _take(self, samples: int, of: int, numbers: StepNumbers, seconds: float) -> None:
        share = samples / of
        self.loss_sum += numbers.loss_sum * share
        self.count += numbers.count * share
        self.samples += samples
        self.seconds += seconds * share

    def _clear(self) -> None:
        self.loss_sum = self.count = self.samples = self.seconds = 0.0
