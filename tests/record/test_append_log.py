import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np

from gradus.record.append_log import AppendLog, read_lines

FULL = Path("/dev/full")


def make_space(path: Path) -> None:
    path.unlink()


def test_every_record_is_one_line_of_strict_json(tmp_path):
    log = AppendLog(tmp_path / "log.jsonl")
    log.write({"step": 1, "text": "two\nlines", "path": tmp_path, "loss": np.float32(0.5), "count": np.int64(3)})
    assert log.close() == []
    (line,) = (tmp_path / "log.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "text": "two\nlines", "path": str(tmp_path), "loss": 0.5, "count": 3}


def test_a_loss_that_is_no_number_is_strict_json_and_comes_back(tmp_path):
    log = AppendLog(tmp_path / "log.jsonl")
    log.write({"nan": math.nan, "up": math.inf, "down": [-math.inf]})

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    json.loads((tmp_path / "log.jsonl").read_text(), parse_constant=refuse)
    (record,) = read_lines(tmp_path / "log.jsonl").records
    assert math.isnan(record["nan"])
    assert record["up"] == math.inf
    assert record["down"] == [-math.inf]


def test_a_full_disk_stops_nobody_and_records_catch_up_when_there_is_space_again(tmp_path):
    path, problems = tmp_path / "log.jsonl", []
    path.symlink_to(FULL)
    log = AppendLog(path, problems.append)
    for step in range(3):
        log.write({"step": step})
    assert len(problems) == 1
    assert "No space left on device" in problems[0]
    make_space(path)
    log.write({"step": 3})
    assert len(problems) == 2
    assert "4 records caught up" in problems[1]
    assert log.close() == []
    assert [record["step"] for record in read_lines(path).records] == [0, 1, 2, 3]


def test_while_the_disk_stays_full_memory_is_bounded_and_losses_are_counted(tmp_path):
    path, problems = tmp_path / "log.jsonl", []
    path.symlink_to(FULL)
    log = AppendLog(path, problems.append, keep=2)
    for step in range(5):
        log.write({"step": step})
    not_written, dropped = log.close()
    assert "2 records not written: No space left on device" in not_written
    assert "3 records dropped" in dropped


def test_a_missing_folder_is_a_problem_not_an_exception(tmp_path):
    problems: list[str] = []
    log = AppendLog(tmp_path / "gone" / "log.jsonl", problems.append)
    log.write({"step": 1})
    (tmp_path / "gone").mkdir()
    log.write({"step": 2})
    assert [record["step"] for record in read_lines(log.path).records] == [1, 2]
    assert len(problems) == 2


def test_the_listener_may_write_to_the_same_log(tmp_path):
    path = tmp_path / "log.jsonl"
    path.symlink_to(FULL)
    log = AppendLog(path, lambda message: log.write({"problem": message}))
    log.write({"step": 1})
    make_space(path)
    log.write({"step": 2})
    assert [record.get("step", "problem") for record in read_lines(path).records] == [1, "problem", 2, "problem"]


# Four lines of 40 bytes by a process that may make a file only `limit` bytes long, and one more when it may again.
CUT_SHORT = """
import resource, sys
from pathlib import Path
from gradus.record.append_log import AppendLog

path, limit = Path(sys.argv[1]), int(sys.argv[2])
problems = []
log = AppendLog(path, problems.append)
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for step in range(4):
    log.write({"step": step, "padding": "x" * 13})
assert path.stat().st_size == limit, path.stat().st_size
assert len(problems) == 1 and "File too large" in problems[0], problems
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write({"step": 4})
assert len(problems) == 2, problems
assert log.close() == []
"""


def cut_short_at(path: Path, limit: int) -> None:
    subprocess.run([sys.executable, "-c", CUT_SHORT, str(path), str(limit)], check=True)


def test_a_line_cut_short_is_written_again_and_never_glued_to_the_next(tmp_path):
    path = tmp_path / "log.jsonl"
    cut_short_at(path, 100)
    records, broken = read_lines(path)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert broken == 1


def test_a_line_that_lacks_only_its_newline_is_not_written_twice(tmp_path):
    path = tmp_path / "log.jsonl"
    cut_short_at(path, 119)
    records, broken = read_lines(path)
    assert [record["step"] for record in records] == [0, 1, 2, 3, 4]
    assert broken == 0


def test_a_writer_starts_a_new_line_after_a_predecessor_that_died_in_the_middle_of_one(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1}\n{"st')
    assert read_lines(path) == ([{"step": 1}], 0)
    AppendLog(path).write({"step": 2})
    assert read_lines(path) == ([{"step": 1}, {"step": 2}], 1)


def test_broken_lines_are_skipped_and_counted(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n\x00\x00\x00\n[1, 2]\n\xff\xfe\n\n{"step": 2}')
    assert read_lines(path) == ([{"step": 1}, {"step": 2}], 3)
    assert read_lines(tmp_path / "none") == ([], 0)
