"""Runs that only write down what they trained on: the real slices and logs, with made-up ranks and no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.data.loader import Slices
from gradus.data.order import Order, Shuffled
from gradus.data.position import probe, specification_hash
from gradus.data.sample_log import SampleLog, delivered_digest
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter

BATCH = 12


def described(seed: int, length: int) -> dict[str, Any]:
    """The specification of a plain dataset."""
    return {"seed": seed, "samples": length, "batch": BATCH, "order": probe(Shuffled(seed, length))}


class SampledRun:
    def __init__(self, root: Path, total_steps: int = 20, length: int = 60) -> None:
        self.run = RunDirectory.create(root, "sampled")
        self.total = total_steps * BATCH
        self.length = length
        self.attempts = 0
        self.committed: list[int] = []

    def attempt(
        self,
        begin: int,
        end: int,
        ranks: int = 1,
        every: int = 4,
        accumulate: int = 1,
        *,
        seed: int = 1,
        skipped: tuple[tuple[int, int], ...] = (),
        specification: Mapping[str, Any] | None = None,
        order: Order | None = None,  # by which the loader delivers
        slices_of: Callable[[Slices], Slices] = lambda slices: slices,
        steps: Sequence[int] | None = None,
        commits: bool = True,
    ) -> None:
        """Steps from `begin` to `end`, with a checkpoint after every few; dies after the last step."""
        self.attempts += 1
        order = order or Shuffled(seed, self.length)
        specification = specification or described(seed, self.length)
        events = EventWriter(self.run, f"rank-{self.attempts}")
        events.write("start", attempt=self.attempts, step=begin)
        for rank in range(ranks):
            log = SampleLog(self.run.path, self.attempts, rank)
            log.begin(
                begin,
                batch=BATCH,
                data_ranks=ranks,
                total_samples=self.total,
                skipped=skipped,
                specification=specification_hash(specification),
                described=specification if rank == 0 else None,
            )
            slices = slices_of(Slices(BATCH, BATCH // ranks // accumulate, accumulate, rank, self.total, skipped))
            for step in steps or range(begin, end):
                for number, samples in slices.of_step(step):
                    positions = slices.positions((number, samples))[:samples]
                    first = int(slices.positions((number, 1))[0])
                    log.note(step, first, samples, delivered_digest(positions, order.at(positions)))
                if (step + 1) % every == 0:
                    log.flush()
            log.close()
        for step in range(begin + 1, end + 1):
            if step % every == 0 and commits:
                self.committed.append(step)
                events.write("checkpoint", attempt=self.attempts, step=step)
        events.close()

    def log(self, attempt: int = 1, rank: int = 0) -> Path:
        return self.run.samples / f"{attempt}-{rank}.jsonl"
