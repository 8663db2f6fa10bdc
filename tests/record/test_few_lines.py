"""Few lines: short logs whole, long ones thinned, with all that must not be missed."""

from __future__ import annotations

import json

from gradus.record.append_log import read_lines
from gradus.record.few_lines import few_lines


def write(path, records, end="\n"):
    path.write_text("\n".join(json.dumps(record) for record in records) + end)
    return path


def test_a_short_log_is_read_whole(tmp_path):
    path = write(tmp_path / "log.jsonl", [{"step": step, "loss": "NaN"} for step in range(50)])
    assert [record["step"] for record in few_lines(path)] == [record["step"] for record in read_lines(path).records]
    assert few_lines(path)[0]["loss"] != few_lines(path)[0]["loss"]


def test_of_a_long_log_the_newest_half_and_an_even_part_of_the_rest(tmp_path):
    path = write(tmp_path / "log.jsonl", [{"step": step} for step in range(1000)])
    steps = [record["step"] for record in few_lines(path, most=100)]
    assert len(steps) <= 100
    assert steps[-50:] == list(range(950, 1000))
    assert steps[:3] == [0, 19, 38]


def test_what_changes_the_meaning_of_others_is_never_left_out(tmp_path):
    records = [{"step": step} for step in range(1000)]
    records[7] = {"rolled_back_to": 3, "attempt": 1}
    records[8] = {"step": 8, "validation_loss": 1.5}
    found = few_lines(write(tmp_path / "log.jsonl", records), most=100)
    assert records[7] in found
    assert records[8] in found


def test_broken_lines_and_no_file_at_all_are_no_problem(tmp_path):
    path = write(tmp_path / "log.jsonl", [{"a": 1}], end="\nno record\n[1]\n" + '{"a": 2')
    assert few_lines(path) == [{"a": 1}]
    assert few_lines(tmp_path / "none.jsonl") == []
