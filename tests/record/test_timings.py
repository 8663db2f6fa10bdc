"""Timings as they are read: whole lines of all ranks, whatever else is in the files."""

from __future__ import annotations

import json

import pytest

from gradus.record.timings import FOLDER, TimingLog, by_rank, mean_seconds, mean_step_seconds, read_timings
from gradus.schema.breakdown import KINDS, Breakdown


def line(**changes):
    values = {
        "time": 1.0,
        "attempt": 1,
        "rank": 0,
        "node": "n1",
        "step": 10,
        "steps": 10,
        "measured_steps": 10,
        "step_seconds": 0.5,
        "seconds": {"data": 0.1, "forward": 0.4},
    }
    return Breakdown(**{**values, **changes})


def test_what_ranks_write_is_read_in_the_order_of_steps(run):
    for rank in (1, 0):
        log = TimingLog(run, rank)
        for step in (10, 20):
            log.write(line(rank=rank, step=step))
        assert log.close() == []
    found = read_timings(run)
    assert [(one.step, one.rank) for one in found] == [(10, 0), (10, 1), (20, 0), (20, 1)]
    assert [one.step for one in by_rank(found)[1]] == [10, 20]


def test_a_run_of_an_older_version_has_none(run):
    assert read_timings(run) == []
    assert mean_seconds([]) == {}
    assert mean_step_seconds([]) is None


def test_lines_that_are_broken_or_no_timings_are_left_out(run):
    log = TimingLog(run, 0)
    log.write(line())
    log.close()
    path = run.path / FOLDER / "rank-0.jsonl"
    with path.open("a") as file:
        file.write('{"attempt": 1}\nnonsense\n{"time": 2.0, "atte')
    assert [one.step for one in read_timings(run)] == [10]


def test_a_later_line_of_a_step_replaces_the_earlier(run):
    log = TimingLog(run, 0)
    log.write(line(step_seconds=0.5))
    log.write(line(step_seconds=0.7))
    log.write(line(attempt=2))
    log.close()
    assert [one.step_seconds for one in read_timings(run, attempt=1)] == [0.7]
    assert len(read_timings(run)) == 2


def test_every_step_counts_alike_in_the_mean():
    found = mean_seconds([line(steps=1, seconds={"data": 4.0}), line(steps=3, seconds={"forward": 4.0})])
    assert found == {**dict.fromkeys(KINDS, 0.0), "data": 1.0, "forward": 3.0}


def test_a_kind_of_a_later_version_goes_to_the_rest_and_unknown_fields_are_ignored(run):
    document = {**line().model_dump(), "seconds": {"data": 0.1, "dreaming": 0.4}, "mood": "good"}
    (run.path / FOLDER).mkdir()
    (run.path / FOLDER / "rank-0.jsonl").write_text(json.dumps(document) + "\n")
    [found] = read_timings(run)
    assert found.seconds == {"data": 0.1, "other": 0.4}


def test_negative_seconds_are_no_timings():
    with pytest.raises(ValueError, match="greater than or equal"):
        line(seconds={"other": -0.1})


def test_a_folder_that_cannot_be_made_is_a_problem_and_no_end(run):
    (run.path / FOLDER).write_text("in the way")
    problems: list[str] = []
    log = TimingLog(run, 0, problems.append)
    log.write(line())
    assert log.close()
    assert any("rank-0.jsonl" in problem for problem in problems)
