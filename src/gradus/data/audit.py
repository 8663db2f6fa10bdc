"""Audit: whether a run trained on every sample as often as it should have, from what its ranks wrote down.

The specification says which sample is at which position. The sample logs say which positions each rank took in which
steps, with digests of what its loader delivered. All of it is compared: every position below the end once, by one rank,
in its step, with the sample that belongs there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from gradus.data.lineage import Counted, Line, Records, end_of, lineage
from gradus.data.order import AsLaid, Order, Shuffled, past_skipped
from gradus.data.position import consumed_before, probe, specification_hash
from gradus.data.progress import Progress
from gradus.data.sample_counts import AT_ONCE, Counter, Parts, Seen, between, pieces, spans_where, times_taken
from gradus.data.sample_log import delivered_digest

MOST_FINDINGS = 1000
# Kinds of findings that say that something is not known, rather than that it is wrong.
UNKNOWN = frozenset({"no-log", "no-specification"})


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be, or cannot be known."""

    kind: str
    message: str
    attempt: int | None = None
    rank: int | None = None
    steps: tuple[int, int] | None = None  # the first, and one past the last
    positions: tuple[int, int] | None = None


@dataclass(frozen=True)
class Stream:
    """What a specification stands for."""

    order: Order
    parts: Parts


StreamOf = Callable[[int, Mapping[str, Any]], Stream | None]


@dataclass
class Audit:
    """What was looked at, and what came out."""

    steps: int = 0
    samples: int = 0
    attempts: list[tuple[int, int, int]] = field(default_factory=list)  # each with the steps of it that count
    ranks: int = 0  # the most that trained together
    findings: list[Finding] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def differences(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind not in UNKNOWN]

    @property
    def unproven(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.kind in UNKNOWN]

    def add(self, kind: str, message: str, **where: Any) -> None:
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(Finding(kind, message, **where))

    def document(self) -> dict[str, Any]:
        document = asdict(self)
        document.pop("findings")
        return {
            "proven": not self.findings,
            **document,
            "differences": [asdict(finding) for finding in self.differences],
            "unproven": [asdict(finding) for finding in self.unproven],
        }


def plain_stream(described: Mapping[str, Any]) -> Stream | None:
    """The stream of a specification that needs no look at its data: one dataset, shuffled or as it lies."""
    seed, length = described.get("seed"), described.get("samples")
    if not isinstance(seed, int) or not isinstance(length, int) or length < 1:
        return None
    for order in (Shuffled(seed, length), AsLaid(length)):
        if probe(order) == described.get("order"):
            return Stream(order, {"data": (0, length)})
    return None


def audit(records: Records, newest_checkpoint: int | None, stream_of: StreamOf) -> Audit:
    """Everything up to the newest checkpoint. `stream_of` gives the stream of an attempt with its specification."""
    found = Audit()
    for problem in records.problems:
        found.add("unreadable", problem)
    end, passed_over = end_of(records, newest_checkpoint)
    found.notes += passed_over
    if end is None:
        end = records.stretches[-1].last if records.stretches else 0
        found.notes.append("the run has no checkpoint: looked at is what its sample logs have")
    counted, unknown_up_to = lineage(records, end)
    if unknown_up_to > 0:
        steps = (0, unknown_up_to)
        found.add("no-log", f"no sample log says who trained steps {_span(steps)}", steps=steps)
    found.steps = end
    found.attempts = [(one.stretch.attempt, one.steps.start, one.steps.stop) for one in counted]
    counters: dict[tuple[Any, ...], Counter] = {}
    streams: list[tuple[Counted, Stream, Counter]] = []
    for one in counted:
        _check_against_the_rest(found, records, one)
        stream = _stream(found, records, one, stream_of)
        counter = counters.setdefault(tuple(stream.parts.items()), Counter(stream.parts)) if stream else None
        _audit_stretch(found, one, stream, counter)
        if stream is not None and counter is not None:
            streams.append((one, stream, counter))
    if found.findings:
        for one, stream, counter in streams:
            _expect(one, stream, counter)
    found.seen = [seen for counter in counters.values() for seen in counter.seen(as_expected=not found.findings)]
    _check_turns(found, counted, len(counters))
    return found


def _stream(found: Audit, records: Records, one: Counted, stream_of: StreamOf) -> Stream | None:
    attempt, specification = one.stretch.attempt, one.stretch.beginning.specification
    described = records.described.get(specification)
    stream = None
    # A description that was changed afterwards is no longer what the hash says.
    if described is not None and specification_hash(described) == specification:
        stream = stream_of(attempt, described)
    if stream is None:
        message = (
            f"attempt {attempt}: what its specification {specification} stands for cannot be rebuilt now: which "
            "positions were taken can be checked, but not which samples those were"
        )
        found.add("no-specification", message, attempt=attempt, steps=(one.steps.start, one.steps.stop))
    return stream


def _samples(one: Counted) -> range:
    """Those that the steps take of all that the run trains on."""
    beginning = one.stretch.beginning
    first, end = (min(step * beginning.batch, beginning.total_samples) for step in (one.steps.start, one.steps.stop))
    return range(first, end)


def _expect(one: Counted, stream: Stream, counter: Counter) -> None:
    samples = _samples(one)
    for start in range(samples.start, samples.stop, AT_ONCE):
        numbers = np.arange(start, min(start + AT_ONCE, samples.stop))
        counter.expect(stream.order.at(past_skipped(numbers, one.stretch.beginning.skipped)))


def _check_against_the_rest(found: Audit, records: Records, one: Counted) -> None:
    """The logs against what the run wrote down elsewhere: where attempts began, and how many samples steps took."""
    attempt, beginning = one.stretch.attempt, one.stretch.beginning
    by_events = records.began.get(attempt)
    if by_events and beginning.step not in by_events:
        said = ", ".join(map(str, sorted(by_events)))
        message = f"attempt {attempt} began at step {said} by its events, at {beginning.step} by its sample logs"
        found.add("other-beginning", message, attempt=attempt)
    for number, done, samples in records.metrics:
        expected = min(done * beginning.batch, beginning.total_samples)
        if number == attempt and one.steps.start < done <= one.steps.stop and samples != expected:
            message = f"attempt {attempt}: by its metrics {samples} samples after {done} steps, expected {expected}"
            found.add("other-count", message, attempt=attempt, steps=(done - 1, done))
            break


def _audit_stretch(found: Audit, one: Counted, stream: Stream | None, counter: Counter | None) -> None:
    attempt, beginning = one.stretch.attempt, one.stretch.beginning
    found.ranks = max(found.ranks, beginning.data_ranks)
    samples = _samples(one)
    found.samples += len(samples)
    progress = Progress(f"auditing attempt {attempt}")
    kept: dict[int, list[Line]] = {}
    for rank in sorted({*range(beginning.data_ranks), *one.stretch.lines}):
        if rank >= beginning.data_ranks:
            message = f"there is a log of rank {rank}, but ranks are 0 to {beginning.data_ranks - 1}"
            found.add("unknown-rank", message, attempt=attempt, rank=rank)
        kept[rank] = _counted_lines(found, one, rank)
        for line in kept[rank]:
            progress.say(f"rank {rank}, step {line.steps.start} of {one.steps.stop}")
            _check_line(found, line, one, rank, stream, counter)
    if samples:
        _check_positions(found, one, kept, samples)


def _counted_lines(found: Audit, one: Counted, rank: int) -> list[Line]:
    """The lines of a rank about steps that count; steps that are missing or repeated are told."""
    attempt, reached = one.stretch.attempt, one.steps.start
    lines = []
    for whole in one.stretch.lines.get(rank, []):
        line = _cut(whole, one.steps)
        if line is None:
            continue
        begins, ends = line.steps.start, line.steps.stop
        if begins < reached:
            repeated = (begins, min(reached, ends))
            message = f"rank {rank} trained steps {_span(repeated)} more than once"
            found.add("repeated-steps", message, attempt=attempt, rank=rank, steps=repeated)
        elif begins > reached:
            _missing(found, attempt, rank, (reached, begins))
        reached = max(reached, ends)
        lines.append(line)
    if reached < one.steps.stop:
        _missing(found, attempt, rank, (reached, one.steps.stop))
    return lines


def _missing(found: Audit, attempt: int, rank: int, steps: tuple[int, int]) -> None:
    message = f"rank {rank} of attempt {attempt} has no log of steps {_span(steps)}: not trained, or the log is lost"
    found.add("no-log", message, attempt=attempt, rank=rank, steps=steps)


def _cut(line: Line, steps: range) -> Line | None:
    """The part of a line that is about some steps, as far as its chunks can be told apart."""
    if line.steps.start >= steps.start and line.steps.stop <= steps.stop:
        return line
    whole = [chunk for chunk in line.chunks if chunk.steps.start >= steps.start and chunk.steps.stop <= steps.stop]
    if not whole:
        return None
    before = sum(chunk.samples for chunk in line.chunks if chunk.steps.stop <= whole[0].steps.start)
    positions = between(line.positions, before, before + sum(chunk.samples for chunk in whole))
    covered = range(whole[0].steps.start, whole[-1].steps.stop)
    return replace(line, steps=covered, positions=positions, chunks=tuple(whole))


def _check_line(
    found: Audit, line: Line, one: Counted, rank: int, stream: Stream | None, counter: Counter | None
) -> None:
    """Its positions belong to its steps, and what came there is what the specification says."""
    beginning, before = one.stretch.beginning, 0
    for chunk in line.chunks:
        rows = between(line.positions, before, before + chunk.samples)
        before += chunk.samples
        if not rows:
            continue
        lowest, highest = min(row[0] for row in rows), max(row[0] + row[2] * (row[3] - 1) + row[1] - 1 for row in rows)
        steps, span = (chunk.steps.start, chunk.steps.stop), (lowest, highest + 1)
        where: dict[str, Any] = {"attempt": one.stretch.attempt, "rank": rank, "steps": steps, "positions": span}
        taken = consumed_before(np.array([lowest, highest]), beginning.skipped)
        if taken[0] < steps[0] * beginning.batch or taken[1] >= steps[1] * beginning.batch:
            message = f"rank {rank} took in steps {_span(steps)} positions {_span(span)}, which are of other steps"
            found.add("wrong-positions", message, **where)
        if stream is None or counter is None:
            continue
        expected = 0
        for at in pieces(rows):
            numbers = stream.order.at(at)
            expected = (expected + delivered_digest(at, numbers)) % 2**64
            counter.came(numbers)
        if expected != chunk.digest:
            message = (
                f"rank {rank} got in steps {_span(steps)}, between positions {lowest} and {highest}, other samples "
                f"than the specification says: digest {chunk.digest:016x}, expected {expected:016x}"
            )
            found.add("other-samples", message, **where)
            for at in pieces(rows):
                counter.came(stream.order.at(at), -1)


def _check_positions(found: Audit, one: Counted, lines: Mapping[int, list[Line]], samples: range) -> None:
    """Of the positions that belong to these steps, each was taken once; those that are skipped, by nobody."""
    skipped = one.stretch.beginning.skipped
    low, high = (int(at) for at in past_skipped(np.array([samples.start, samples.stop - 1]), skipped))
    found.skipped += [span for span in skipped if low < span[1] and span[0] <= high and span not in found.skipped]
    reach = [
        (row[0], row[0] + row[2] * (row[3] - 1) + row[1], row)
        for own in lines.values()
        for line in own
        for row in line.positions
    ]
    for start in range(low, high + 1, AT_ONCE):
        stop = min(start + AT_ONCE, high + 1)
        taken = times_taken(tuple(row for begins, ends, row in reach if begins < stop and ends > start), start, stop)
        wanted = np.ones(stop - start, np.int64)
        for span in skipped:
            wanted[max(span[0] - start, 0) : max(span[1] - start, 0)] = 0
        for begins, ends, times in spans_where(taken != wanted, taken):
            _tell_of_positions(found, one, lines, (start + begins, start + ends), times, bool(wanted[begins]))


def _tell_of_positions(
    found: Audit, one: Counted, lines: Mapping[int, list[Line]], span: tuple[int, int], times: int, wanted: bool
) -> None:
    beginning, attempt = one.stretch.beginning, one.stretch.attempt
    consumed = consumed_before(np.array([span[0], span[1] - 1]), beginning.skipped)
    steps = (int(consumed[0]) // beginning.batch, int(consumed[1]) // beginning.batch + 1)
    where: dict[str, Any] = {"attempt": attempt, "steps": steps, "positions": span}
    ranks = [rank for rank, own in lines.items() if any(times_taken(line.positions, *span).any() for line in own)]
    by = f"by rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    what = f"positions {_span(span)}, of step {_span(steps)},"
    if not wanted:
        found.add("skipped-trained", f"{what} were to be skipped, and were trained on {by}", **where)
    elif times:
        rank = ranks[0] if len(ranks) == 1 else None
        found.add("trained-twice", f"{what} were trained on {times} times, {by}", rank=rank, **where)
    else:
        gaps = [gap.steps for gap in found.unproven if gap.attempt == attempt and gap.rank is not None and gap.steps]
        if not any(gap[0] <= steps[0] and steps[1] <= gap[1] for gap in gaps):  # else it is told that a log is missing
            found.add("never-trained", f"{what} were trained on by no rank", **where)


def _check_turns(found: Audit, counted: Sequence[Counted], streams: int) -> None:
    """What needs no specification at all: within a source, no sample comes again before all others have come."""
    if found.findings or found.skipped or streams != 1:
        return
    if len({one.stretch.beginning.specification for one in counted}) > 1:
        found.notes.append("the data changed on the way, as accepted: samples need not have come equally often")
        return
    for seen in found.seen:
        if not seen.evenly:
            message = f"{seen.name}: some samples came {seen.fewest} times, others {seen.most} times"
            found.add("not-in-turns", message)


def _span(span: tuple[int, int]) -> str:
    return str(span[0]) if span[1] == span[0] + 1 else f"{span[0]} to {span[1] - 1}"
