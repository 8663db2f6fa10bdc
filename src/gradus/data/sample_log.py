"""The sample log: what a data rank really trained on, in few bytes, for an audit to check later.

Every data rank has a file of its own, `samples/<attempt>-<data rank>.jsonl`, to which it adds one line before each
checkpoint: the steps since the last one, the positions of the stream that they took, and digests of the sample numbers
that the loader delivered for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import GOLDEN, Indices, Ranges, Words, mix, noise, past_skipped
from gradus.data.position import consumed_before
from gradus.record.append_log import AppendLog
from gradus.record.durable import flush
from gradus.record.problem import OnProblem, report_on_stderr
from gradus.schema.stable_hash import stable_hash

FOLDER = "samples"
MOST_CHUNKS = 32  # digests in a line: with more steps than that, each is of several
_KEY = stable_hash("delivered sample")
_WORD = 2**64


def delivered_digest(positions: NDArray[Any], numbers: NDArray[Any]) -> int:
    """64 bits that stand for "these samples came at these positions", whatever the order in which they are counted.

    Digests of parts add up (modulo 2**64) to that of the whole.
    """
    return int(_words(positions, numbers).sum(dtype=np.uint64))


def delivered_digests(
    positions: NDArray[Any], numbers: NDArray[Any], fetched: Sequence[int], real: Sequence[int]
) -> list[int]:
    """Those of several micro-batches that lie behind each other: of `fetched` samples, the first `real` ones count."""
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(_words(positions, numbers), dtype=np.uint64)])
    starts = np.concatenate([[0], np.cumsum(fetched)])[:-1].astype(np.int64)
    digests = sums[starts + np.asarray(real, np.int64)] - sums[starts]
    return [int(digest) for digest in digests]


def _words(positions: NDArray[Any], numbers: NDArray[Any]) -> Words:
    return mix(noise(_KEY, positions) + np.asarray(numbers).astype(np.uint64) * GOLDEN)


class Runs:
    """Spans of positions in few numbers: `[first, length, stride, times]` are `times` spans of one length."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def add(self, first: int, length: int) -> None:
        if length <= 0:
            return
        if not self.rows:
            self.rows.append([first, length, 0, 1])
            return
        last = self.rows[-1]
        start, width, stride, times = last
        if times == 1 and first == start + width:
            last[1] += length
            self._fold()
        elif times > 1 and first == start + (times - 1) * stride + width:
            # It goes on where the last span ends: that one is longer than the others, and starts a row of its own.
            last[3] -= 1
            self.rows.append([start + (times - 1) * stride, width + length, 0, 1])
            self._fold()
        else:
            self.rows.append([first, length, 0, 1])
            self._fold()

    def _fold(self) -> None:
        """The last span may be the next of the row before it."""
        if len(self.rows) < 2:
            return
        (start, width, stride, times), (first, length, _, single) = self.rows[-2:]
        if single != 1 or width != length or first <= start:
            return
        if times == 1:
            self.rows[-2:] = [[start, width, first - start, 2]]
        elif first == start + times * stride:
            self.rows[-2:] = [[start, width, stride, times + 1]]


def expanded(rows: Sequence[Sequence[int]]) -> Indices:
    """All positions of `Runs`, in the order in which they were added."""
    spans = [
        (first + stride * np.arange(times, dtype=np.int64)[:, None] + np.arange(length, dtype=np.int64)).ravel()
        for first, length, stride, times in rows
    ]
    return np.concatenate(spans) if spans else np.zeros(0, np.int64)


@dataclass
class Noted:
    """What was trained on since the last line. Its size does not grow with the number of steps."""

    steps: range
    positions: Runs = field(default_factory=Runs)
    chunks: list[list[int]] = field(default_factory=list)  # steps, samples, digest
    steps_in_chunk: int = 1

    def add_step(self) -> None:
        self.steps = range(self.steps.start, self.steps.stop + 1)
        if self.chunks and self.chunks[-1][0] < self.steps_in_chunk:
            self.chunks[-1][0] += 1
            return
        self.chunks.append([1, 0, 0])
        if len(self.chunks) > MOST_CHUNKS:
            self.steps_in_chunk *= 2
            pairs = [self.chunks[at : at + 2] for at in range(0, len(self.chunks), 2)]
            self.chunks = [
                [sum(c[0] for c in pair), sum(c[1] for c in pair), sum(c[2] for c in pair) % _WORD] for pair in pairs
            ]

    def line(self) -> dict[str, Any]:
        return {
            "steps": [self.steps.start, self.steps.stop],
            "positions": self.positions.rows,
            "chunks": [[steps, samples, f"{digest:016x}"] for steps, samples, digest in self.chunks],
        }


class SampleLog:
    """The one writer of the sample log of a data rank; of ranks that share their samples, one has it.

    `begin` once the data is known, `note` for each micro-batch, `flush` before each checkpoint.
    """

    def __init__(self, run: Path, attempt: int, data_rank: int, on_problem: OnProblem = report_on_stderr) -> None:
        self.path = run / FOLDER / f"{attempt}-{data_rank}.jsonl"
        self._names = {"attempt": attempt, "data_rank": data_rank}
        self._on_problem = on_problem
        self._log = AppendLog(self.path, on_problem)
        self._skipped: Ranges = ()
        self._noted: Noted | None = None

    def begin(
        self,
        step: int,
        *,
        batch: int,
        data_ranks: int,
        total_samples: int,
        specification: str,
        skipped: Ranges = (),
        described: Mapping[str, Any] | None = None,
    ) -> None:
        """From this step on, the stream is as said here. What earlier lines say about later steps is void.

        `described` is the specification itself, which one rank's log has to hold.
        """
        self._skipped = skipped
        self._noted = None
        self._write(
            {
                "begin": step,
                **self._names,
                "data_ranks": data_ranks,
                "batch": batch,
                "total_samples": total_samples,
                "skipped": [list(span) for span in skipped],
                "specification": specification,
                **({"described": dict(described)} if described is not None else {}),
            }
        )

    def note(self, step: int, position: int, samples: int, digest: int) -> None:
        """A micro-batch was trained on: its first position, its real samples, and the digest that came with it."""
        noted = self._noted
        if noted is None or step not in (noted.steps.stop - 1, noted.steps.stop):
            self.flush()  # a step that was left out ends the line: within one, steps follow each other
            noted = self._noted = Noted(range(step, step))
        if step == noted.steps.stop:
            noted.add_step()
        chunk = noted.chunks[-1]
        chunk[1] += samples
        chunk[2] = (chunk[2] + digest) % _WORD
        if not self._skipped:
            noted.positions.add(position, samples)
            return
        first = int(consumed_before(np.array([position]), self._skipped)[0])
        for place in past_skipped(np.arange(first, first + samples), self._skipped):
            noted.positions.add(int(place), 1)

    def flush(self) -> None:
        """What was noted since the last time, as a line that is on the disk when this returns."""
        if self._noted is None:
            return
        line, self._noted = self._noted.line(), None
        self._write(line)
        try:
            flush(self.path)
        except OSError as error:  # training goes on; the audit will say what is missing
            self._on_problem(f"{self.path}: not known to be on the disk: {error.strerror or error}")

    def close(self) -> list[str]:
        """Try once more what could not be written; what is lost comes back as problems. Steps not flushed are void."""
        self._noted = None
        return self._log.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            self._on_problem(f"{self.path.parent}: cannot be made: {error.strerror or error}")
        self._log.write(line)
