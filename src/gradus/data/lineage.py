"""Lineage: which steps of which attempts a run consists of, read from its own records.

An attempt that goes on from the checkpoint of step k makes void what earlier ones did after it, also that they were
finished. So what the last attempt came to is followed back: from which step that one began, who wrote the checkpoint
it began from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradus.data.order import MAX_LENGTH
from gradus.record.append_log import read_lines
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events

Rows = tuple[tuple[int, int, int, int], ...]  # of positions: first, length, stride, times

# A line that lists more samples than its steps could take so many times is no log; to count them would take for ever.
MOST_REPEATED = 16
_NAME = re.compile(r"(\d+)-(\d+)\.jsonl")


@dataclass(frozen=True)
class Chunk:
    """Some steps of a line, and the digest of what came in them."""

    steps: range
    samples: int
    digest: int


@dataclass(frozen=True)
class Line:
    """What a rank says that it trained on in some steps."""

    number: int  # in its file, from 1
    steps: range
    positions: Rows
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Beginning:
    """What a log says at its head: from which step on, and on which stream."""

    step: int
    data_ranks: int
    batch: int
    total_samples: int
    skipped: tuple[tuple[int, int], ...]
    specification: str


@dataclass
class Stretch:
    """The steps that an attempt took one after the other, with the lines of each data rank."""

    attempt: int
    beginning: Beginning
    lines: dict[int, list[Line]] = field(default_factory=dict)

    @property
    def flushed(self) -> set[int]:
        """The steps before which some rank wrote its log: those of its checkpoints."""
        return {line.steps.stop for lines in self.lines.values() for line in lines}

    @property
    def last(self) -> int:
        return max(self.flushed, default=self.beginning.step)


@dataclass(frozen=True)
class Counted:
    """Steps of a stretch that count."""

    stretch: Stretch
    steps: range


@dataclass
class Records:
    """All that a run has written down about its samples."""

    stretches: list[Stretch] = field(default_factory=list)  # in the order in which they began
    described: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # specifications by their hashes
    problems: list[str] = field(default_factory=list)  # what cannot be read, or contradicts itself
    saved: dict[int, list[int]] = field(default_factory=dict)  # step of a checkpoint → attempts that wrote one
    began: dict[int, set[int]] = field(default_factory=dict)  # attempt → steps at which it began, by its events
    metrics: list[tuple[int, int, int]] = field(default_factory=list)  # attempt, steps done, samples consumed
    finished: tuple[int, int] | None = None  # the step at which the run was finished, and by which attempt


def read_records(run: RunDirectory) -> Records:
    records = Records()
    files = [(file, match) for file in sorted(run.samples.glob("*")) if (match := _NAME.fullmatch(file.name))]
    by_attempt: dict[int, list[Stretch]] = {}
    for file, match in sorted(files, key=lambda found: (int(found[1][1]), int(found[1][2]))):
        attempt, rank = int(match[1]), int(match[2])
        lines = read_lines(file)
        if lines.broken:
            records.problems.append(f"{file.name}: {lines.broken} lines cannot be read")
        _take_log(records, by_attempt.setdefault(attempt, []), file.name, attempt, rank, lines.records)
    records.stretches = [stretch for _, stretches in sorted(by_attempt.items()) for stretch in stretches]
    for event in read_events(run):
        step, number = event.get("step"), event.get("attempt")
        if not isinstance(step, int) or not isinstance(number, int):
            continue
        if event.get("event") == "checkpoint":
            records.saved.setdefault(step, []).append(number)
        elif event.get("event") == "start":
            records.began.setdefault(number, set()).add(step)
        elif event.get("event") == "rollback" and isinstance(event.get("to_step"), int):
            records.began.setdefault(number, set()).add(event["to_step"])  # once more, within the attempt
        elif event.get("event") == "finish":
            records.finished = (step, number)
    for row in read_lines(run.metrics_path).records:
        numbers = tuple(row.get(key) for key in ("attempt", "step", "samples"))
        if all(isinstance(number, int) for number in numbers):
            records.metrics.append(numbers)  # type: ignore[arg-type]
    return records


def _take_log(
    records: Records, stretches: list[Stretch], name: str, attempt: int, rank: int, lines: Iterable[Mapping[str, Any]]
) -> None:
    """Sort the lines of one rank into the stretches of its attempt; all its ranks begin the same ones, in one order."""
    at = -1
    for number, record in enumerate(lines, 1):
        try:
            if "begin" in record:
                at += 1
                beginning = _beginning(record)
                if (record["attempt"], record["data_rank"]) != (attempt, rank):
                    records.problems.append(f"{name}: line {number} is of another log: {dict(record)}")
                if at == len(stretches):
                    stretches.append(Stretch(attempt, beginning))
                elif stretches[at].beginning != beginning:
                    records.problems.append(
                        f"{name}: line {number} begins with {beginning}, another rank with {stretches[at].beginning}"
                    )
                stretches[at].lines.setdefault(rank, [])
                if "described" in record:
                    records.described[beginning.specification] = record["described"]
            elif at < 0:
                records.problems.append(f"{name}: line {number} comes before the log begins")
            else:
                stretches[at].lines[rank].append(_line(number, record, stretches[at].beginning.batch))
        except (KeyError, TypeError, ValueError) as error:
            records.problems.append(f"{name}: line {number} is not as a sample log has it: {error}")


def _beginning(record: Mapping[str, Any]) -> Beginning:
    step, ranks, batch, total = (int(record[key]) for key in ("begin", "data_ranks", "batch", "total_samples"))
    if step < 0 or min(ranks, batch, total) < 1:
        raise ValueError(f"step {step}, {ranks} ranks, batch {batch}, {total} samples")
    skipped = tuple((int(first), int(stop)) for first, stop in record["skipped"])
    return Beginning(step, ranks, batch, total, skipped, str(record["specification"]))


def _line(number: int, record: Mapping[str, Any], batch: int) -> Line:
    first, stop = (int(step) for step in record["steps"])
    rows = tuple((int(at), int(length), int(stride), int(times)) for at, length, stride, times in record["positions"])
    if first < 0 or stop <= first or any(min(row) < 0 or max(row) >= MAX_LENGTH for row in rows):
        raise ValueError(f"steps {record['steps']}, positions {record['positions']}")
    chunks, at = [], first
    for steps, samples, digest in record["chunks"]:
        if int(steps) < 1 or int(samples) < 0:
            raise ValueError(f"chunk of {steps} steps and {samples} samples")
        chunks.append(Chunk(range(at, at + int(steps)), int(samples), int(digest, 16)))
        at += int(steps)
    told, listed = sum(chunk.samples for chunk in chunks), sum(length * times for _, length, _, times in rows)
    if at != stop or told != listed:
        raise ValueError(f"its chunks are about {at - first} steps and {told} samples, not {stop - first} and {listed}")
    if told > MOST_REPEATED * (stop - first) * batch:
        raise ValueError(f"{told} samples in {stop - first} steps of {batch}")
    return Line(number, range(first, stop), rows, tuple(chunks))


def end_of(records: Records, newest_checkpoint: int | None) -> tuple[int | None, list[str]]:
    """The step up to which the run counts, and notes on what does not. None: nothing of it was ever kept.

    A checkpoint that lies beyond where the last attempt began, and is not of it, was passed over: it was damaged.
    """
    last = max([stretch.attempt for stretch in records.stretches] + list(records.began), default=None)
    stretch = next((one for one in reversed(records.stretches) if one.attempt == last), None)
    found = [step for step in (newest_checkpoint, records.finished and records.finished[0]) if step is not None]
    if last is None:
        return max(found, default=None), []
    began = stretch.beginning.step if stretch is not None else min(records.began[last])

    def counts(step: int, by: int | None = None) -> bool:
        reached = last in records.saved.get(step, ()) or by == last or (stretch is not None and step in stretch.flushed)
        return step <= began or reached

    ends, notes = [], []
    if newest_checkpoint is not None:
        if counts(newest_checkpoint):
            ends.append(newest_checkpoint)
        else:
            kept = [step for step, attempts in records.saved.items() if last in attempts and step > began]
            ends.append(max(kept, default=began))
            notes.append(_passed_over(f"the checkpoint of step {newest_checkpoint}", last, began))
    if records.finished is not None:
        step, by = records.finished
        if counts(step, by):
            ends.append(step)
        else:
            notes.append(_passed_over(f"that attempt {by} was finished at step {step}", last, began))
            ends.append(began)
    return max(ends, default=None), notes


def _passed_over(what: str, attempt: int, step: int) -> str:
    return f"{what} does not count: attempt {attempt} began again after it, at step {step}"


def lineage(records: Records, end: int) -> tuple[list[Counted], int]:
    """Which steps below `end` were trained in which stretch, ascending; and up to which step nobody is known."""
    counted: list[Counted] = []
    wanted, before = end, len(records.stretches)
    while wanted > 0:
        found = _who_reached(records, records.stretches[:before], wanted)
        if found is None:
            break
        stretch = records.stretches[found]
        counted.append(Counted(stretch, range(stretch.beginning.step, wanted)))
        wanted, before = stretch.beginning.step, found
    return counted[::-1], wanted


def _who_reached(records: Records, stretches: Sequence[Stretch], step: int) -> int | None:
    """The last that began before a step and came to it: it wrote a checkpoint, or at least its log before one.

    Where all records of it are gone, the last that can have been it.
    """
    able = [number for number, stretch in enumerate(stretches) if stretch.beginning.step < step]
    for signs in (
        lambda stretch: stretch.attempt in records.saved.get(step, ()) and step in stretch.flushed,
        lambda stretch: step in stretch.flushed,
        lambda stretch: stretch.attempt in records.saved.get(step, ()) or stretch.last >= step,
        lambda stretch: True,
    ):
        reached = [number for number in able if signs(stretches[number])]
        if reached:
            return reached[-1]
    return None
