"""A run proves from its own records that it trained on what it should have; and what was not so is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampled_runs import BATCH, SampledRun, described

from gradus.data.audit import Audit, Stream, audit, plain_stream
from gradus.data.lineage import read_records
from gradus.data.loader import Slices
from gradus.data.order import Shuffled
from gradus.data.sample_counts import between, spans_where, times_taken
from gradus.data.sample_log import expanded
from gradus.record.events import EventWriter

LENGTH = 60


class FakeRun(SampledRun):
    def audit(self) -> Audit:
        newest = max(self.committed, default=None)
        return audit(read_records(self.run), newest, lambda attempt, described: plain_stream(described))


def kinds(found: Audit) -> set[str]:
    return {finding.kind for finding in found.findings}


def changed(log: Path, number: int, change: Callable[[dict[str, Any]], Any]) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    change(lines[number])
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_undisturbed_run_is_proven_with_the_times_that_each_sample_was_seen(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 20, ranks=2, accumulate=3)
    found = fake.audit()
    assert not found.findings
    assert (found.steps, found.samples, found.attempts, found.ranks) == (20, 240, [(1, 0, 20)], 2)
    (seen,) = found.seen
    assert (seen.expected, seen.found, seen.fewest, seen.most) == (240, 240, 4, 4)


def test_what_a_restart_discards_does_not_count(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 11, ranks=2)  # dies after step 11; the last checkpoint is of step 8
    fake.attempt(8, 15, ranks=3)
    fake.attempt(12, 20, ranks=1)
    found = fake.audit()
    assert not found.findings
    assert found.attempts == [(1, 0, 8), (2, 8, 12), (3, 12, 20)]
    assert found.samples == 240


def test_an_attempt_that_goes_back_further_makes_void_what_came_after(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 16)
    fake.attempt(8, 20, ranks=2)  # the checkpoints of 12 and 16 were damaged
    found = fake.audit()
    assert not found.findings
    assert found.attempts == [(1, 0, 8), (2, 8, 20)]


def test_an_attempt_that_saved_nothing_voids_nothing(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 16)
    fake.attempt(8, 10)  # the newest checkpoint could not be read for a while
    fake.attempt(16, 20)
    assert fake.audit().attempts == [(1, 0, 16), (3, 16, 20)]
    assert not fake.audit().findings


@pytest.mark.parametrize("reaches", [10, 3])
def test_a_finished_run_that_had_to_start_over_is_audited_as_it_is_now(tmp_path: Path, reaches: int):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 20, ranks=2)
    events = EventWriter(fake.run, "rank-0")
    events.write("finish", attempt=1, step=20)
    events.close()
    # All its checkpoints turn out to be damaged, and still lie there: the samples of the second are others.
    fake.attempt(0, reaches, order=Shuffled(2, LENGTH))
    found = fake.audit()
    if reaches == 3:  # before its first checkpoint: there is nothing yet that counts
        assert (found.steps, found.attempts) == (0, [])
    else:
        assert (found.steps, found.attempts) == (8, [(2, 0, 8)])
        assert kinds(found) == {"other-samples"}, "of the attempt that counts"
    assert "the checkpoint of step 20 does not count: attempt 2 began again after it, at step 0" in found.notes
    assert "that attempt 1 was finished at step 20 does not count: attempt 2 began again" in " ".join(found.notes)


def test_a_run_that_went_back_behind_its_newest_checkpoint_and_has_no_other_yet_counts_up_to_there(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 16)
    fake.attempt(8, 10)
    found = fake.audit()
    assert (found.steps, found.attempts) == (8, [(1, 0, 8)])
    fake.attempt(16, 18)  # it could be read after all
    found = fake.audit()
    assert (found.steps, found.attempts, found.notes) == (16, [(1, 0, 16)], [])


def test_an_attempt_whose_log_is_lost_is_not_taken_for_one_that_never_was(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    fake.attempt(8, 20)
    fake.log(2).unlink()
    found = fake.audit()
    assert found.steps == 20
    assert [(f.kind, f.steps) for f in found.unproven] == [("no-log", (8, 20))]


def test_steps_after_the_newest_checkpoint_do_not_count_yet(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    fake.attempt(8, 12, commits=False)  # died after its logs were written and before the commit
    found = fake.audit()
    assert not found.findings
    assert found.steps == 8


def test_a_restart_in_the_middle_of_a_line_counts_its_steps_up_to_there(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8, every=8)
    fake.committed.append(5)
    fake.attempt(5, 20, every=5)
    found = fake.audit()
    assert not found.findings
    assert found.attempts == [(1, 0, 5), (2, 5, 20)]


def test_skipped_positions_are_listed_and_no_sample_is_missing_otherwise(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    fake.attempt(8, 20, ranks=2, skipped=((100, 119), (130, 131)))
    found = fake.audit()
    assert not found.findings
    assert found.skipped == [(100, 119), (130, 131)]


def test_a_doctored_digest_is_found_with_its_step_and_rank(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 20, ranks=2)
    changed(fake.log(1, 1), 2, lambda line: line["chunks"][1].__setitem__(2, "00000000deadbeef"))
    found = fake.audit()
    assert [(f.kind, f.rank, f.steps) for f in found.findings] == [("other-samples", 1, (5, 6))]
    assert found.seen[0].found == found.seen[0].expected - BATCH // 2


def test_a_loader_that_delivered_other_samples_is_found(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    fake.attempt(8, 20, order=Shuffled(2, LENGTH))
    found = fake.audit()
    assert kinds(found) == {"other-samples"}
    assert {finding.attempt for finding in found.findings} == {2}


def test_a_rank_that_trained_on_the_shard_of_another_is_found(tmp_path: Path):
    fake = FakeRun(tmp_path)
    shard_of_0 = lambda slices: Slices(BATCH, slices.micro_batch, 1, 0, slices.total_samples)  # noqa: E731
    fake.attempt(0, 4, ranks=2, slices_of=shard_of_0)
    found = fake.audit()
    assert kinds(found) == {"trained-twice", "never-trained"}
    twice = next(f for f in found.findings if f.kind == "trained-twice")
    assert "ranks 0, 1" in twice.message
    assert (twice.steps, twice.positions) == ((0, 1), (0, 6))
    never = next(f for f in found.findings if f.kind == "never-trained")
    assert (never.steps, never.positions) == ((0, 1), (6, 12))


def test_a_step_that_was_left_out_is_found(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8, ranks=2, steps=[0, 1, 2, 3, 4, 6, 7])
    found = fake.audit()
    assert {(f.kind, f.rank, f.steps) for f in found.findings} == {("no-log", 0, (5, 6)), ("no-log", 1, (5, 6))}


def test_a_step_that_was_trained_twice_is_found(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8, steps=[0, 1, 2, 3, 4, 5, 5, 6, 7])  # at once: in one line
    assert [(f.kind, f.steps, f.positions) for f in fake.audit().findings] == [("trained-twice", (5, 6), (60, 72))]
    other = FakeRun(tmp_path / "other")
    other.attempt(0, 8, steps=[0, 1, 2, 3, 4, 5, 3, 6, 7])
    found = other.audit()
    assert {"repeated-steps", "trained-twice"} <= kinds(found)
    assert next(f.steps for f in found.findings if f.kind == "repeated-steps") == (3, 4)


def test_a_lost_log_is_not_taken_for_proof_nor_for_a_wrong_sample(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 20, ranks=2)
    fake.log(1, 1).unlink()
    found = fake.audit()
    assert not found.differences
    assert [(f.kind, f.rank, f.steps) for f in found.unproven] == [("no-log", 1, (0, 20))]


def test_an_attempt_without_any_log_is_told(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    fake.attempt(8, 20)
    fake.log(1).unlink()
    assert [(f.kind, f.steps) for f in fake.audit().unproven] == [("no-log", (0, 8))]
    fake.log(2).unlink()
    assert [(f.kind, f.steps) for f in fake.audit().unproven] == [("no-log", (0, 20))]


def test_a_line_that_was_removed_repeated_or_swapped_is_found(tmp_path: Path):
    for number, name in enumerate(("removed", "repeated", "swapped")):
        fake = FakeRun(tmp_path / name)
        fake.attempt(0, 20, ranks=2)
        log = fake.log(1, number % 2)
        lines = log.read_text().splitlines(keepends=True)
        if name == "removed":
            del lines[3]
        elif name == "repeated":
            lines.insert(3, lines[2])
        else:  # between the ranks
            lines = [lines[0], *fake.log(1, 1 - number % 2).read_text().splitlines(keepends=True)[1:]]
        log.write_text("".join(lines))
        assert fake.audit().findings, name


def test_a_description_that_was_changed_afterwards_proves_nothing(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 20, seed=2)
    changed(fake.log(), 0, lambda line: line.update(described=described(1, LENGTH)))
    assert kinds(fake.audit()) == {"no-specification"}


def test_data_that_changed_on_the_way_is_followed(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8, seed=1)
    fake.attempt(8, 20, seed=2)
    found = fake.audit()
    assert not found.findings
    assert found.notes


def test_metrics_that_contradict_the_logs_are_found(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    rows = [{"attempt": 1, "step": step, "samples": step * BATCH} for step in (1, 2, 3)]
    fake.run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not fake.audit().findings
    with fake.run.metrics_path.open("a") as file:
        file.write('{"attempt": 1, "step": 4, "samples": 36}\n')
    assert [(f.kind, f.steps) for f in fake.audit().findings] == [("other-count", (3, 4))]


def test_a_log_that_begins_elsewhere_than_its_attempt_did_is_found(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    fake.attempt(8, 12)
    changed(fake.log(2), 0, lambda line: line.update(begin=4))
    assert "other-beginning" in kinds(fake.audit())


class Lopsided:
    """An order that has its first sample twice as often as it should."""

    length = LENGTH

    def at(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        numbers = positions % LENGTH
        return np.where(numbers == 1, 0, numbers)


def test_an_order_that_gives_some_samples_more_often_is_found_although_all_ranks_followed_it(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 10, every=5, order=Lopsided())
    records = read_records(fake.run)
    found = audit(records, 10, lambda attempt, described: Stream(Lopsided(), {"data": (0, LENGTH)}))
    assert kinds(found) == {"not-in-turns"}
    assert (found.seen[0].fewest, found.seen[0].most) == (0, 4)


def test_the_samples_of_a_mixture_are_counted_for_each_source(tmp_path: Path):
    class Mixed:
        length = 2 * LENGTH

        def at(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            turn = positions // 4
            code = positions % 4 == 0  # one in four, of the 20 first numbers
            return np.where(code, turn % 20, 20 + (positions - turn - 1) % 100)

    fake = FakeRun(tmp_path, length=120)
    fake.attempt(0, 20, ranks=3, order=Mixed())
    stream = Stream(Mixed(), {"code": (0, 20), "web": (20, 100)})
    found = audit(read_records(fake.run), 20, lambda attempt, described: stream)
    assert not found.findings
    assert [(seen.name, seen.found, seen.fewest, seen.most) for seen in found.seen] == [
        ("code", 60, 3, 3),
        ("web", 180, 1, 2),
    ]


RANKS = st.sampled_from([(1, 1), (2, 1), (3, 2), (4, 1), (1, 4), (6, 2)])


@settings(max_examples=12)
@given(data=st.data(), length=st.integers(1, 300), every=st.integers(1, 6))
def test_any_run_that_kept_its_word_is_proven(tmp_path_factory, data, length, every):
    fake = FakeRun(tmp_path_factory.mktemp("run"), total_steps=12, length=length)
    reached = 0
    for _ in range(data.draw(st.integers(0, 3))):
        ranks, accumulate = data.draw(RANKS)
        fake.attempt(reached, data.draw(st.integers(reached, 12)), ranks, every, accumulate)
        reached = data.draw(st.sampled_from([0, *fake.committed]))  # some checkpoint, not always the newest
        fake.committed = [step for step in fake.committed if step <= reached]
    ranks, accumulate = data.draw(RANKS)
    fake.attempt(reached, 12, ranks, every, accumulate)
    found = fake.audit()
    assert not found.findings
    assert found.samples == max(fake.committed, default=0) * BATCH


@settings(max_examples=25)
@given(data=st.data())
def test_any_number_of_a_log_that_is_changed_is_noticed(tmp_path_factory, data):
    fake = FakeRun(tmp_path_factory.mktemp("run"), total_steps=12)
    fake.attempt(0, 8, ranks=2)
    fake.attempt(8, 12, ranks=3)
    log = fake.log(*data.draw(st.sampled_from([(1, 0), (1, 1), (2, 0), (2, 2)])))
    lines = log.read_text().splitlines(keepends=True)
    number = data.draw(st.integers(1, len(lines) - 1))
    line = json.loads(lines[number])
    places = [(line["steps"], 0), (line["steps"], 1)]
    places += [(row, at) for row in line["positions"] for at in (0, 1, 3)]
    places += [(chunk, at) for chunk in line["chunks"] for at in (0, 1, 2)]
    row, at = data.draw(st.sampled_from(places))
    by = data.draw(st.integers(1, 3))
    row[at] = f"{int(row[at], 16) ^ by:016x}" if isinstance(row[at], str) else row[at] + by
    lines[number] = json.dumps(line) + "\n"
    log.write_text("".join(lines))
    assert fake.audit().findings


ROW = st.tuples(st.integers(0, 30), st.integers(1, 5), st.integers(0, 8), st.integers(1, 5))


@given(st.lists(ROW, max_size=4), st.integers(0, 20), st.integers(0, 30))
def test_a_part_of_rows_is_what_lies_there(rows, start, count):
    everything = expanded(rows).tolist()
    assert expanded(between(tuple(rows), start, start + count)).tolist() == everything[start : start + count]


@given(st.lists(ROW, max_size=4), st.integers(0, 40), st.integers(1, 30))
def test_positions_are_counted_as_often_as_rows_have_them(rows, start, count):
    everything = expanded(rows).tolist()
    expected = [everything.count(position) for position in range(start, start + count)]
    assert times_taken(tuple(rows), start, start + count).tolist() == expected


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_spans_are_the_runs_of_one_value_that_is_wrong(values):
    array = np.array(values)
    spans = list(spans_where(array != 1, array))
    assert [v for first, stop, v in spans for _ in range(first, stop)] == [v for v in values if v != 1]
    assert all((array[first:stop] == value).all() for first, stop, value in spans)


def test_a_run_without_any_record_is_not_proven_by_that(tmp_path: Path):
    fake = FakeRun(tmp_path)
    fake.committed = [8]
    assert [f.kind for f in fake.audit().unproven] == ["no-log"]


@pytest.mark.parametrize(
    "text", ["{", "[]\n{}\n", '{"steps": [0, 1]}\n', '{"begin": -1}\n', '{"begin": 0}\n{"a": 1}\n']
)
def test_a_log_that_is_no_log_is_told(tmp_path: Path, text: str):
    fake = FakeRun(tmp_path)
    fake.attempt(0, 8)
    fake.log(1, 1).write_text(text)
    assert fake.audit().findings or text == "{"  # an unfinished last line is none
