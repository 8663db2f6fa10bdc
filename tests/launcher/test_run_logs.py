"""The end of what nodes printed, of all ranks or of one, however long the files are."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.launcher import run_logs
from gradus.launcher.job_place import JobPlace, write_place
from gradus.launcher.run_logs import followed, last_lines, log_files, shown_lines
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError


def test_the_last_lines_of_a_file_are_read_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    written = [f"[rank{number % 3}]: line {number} {'é' * (number % 7)}" for number in range(500)]
    path.write_text("\n".join(written))
    for chunk in (1, 7, 64, 1 << 16):
        monkeypatch.setattr(run_logs, "_CHUNK_BYTES", chunk)
        assert last_lines(path, 5) == written[-5:]
        assert last_lines(path, 4, rank=1) == [line for line in written if line.startswith("[rank1]")][-4:]
    assert last_lines(path, 1000) == written
    assert last_lines(path, 3, rank=12) == []
    path.write_text("")
    assert last_lines(path) == []


def test_the_newest_attempt_counts_with_what_its_job_printed_before_its_nodes(run: RunDirectory) -> None:
    assert log_files(run) == []
    run.job.mkdir()
    (run.job / "7.out").write_text("module not found\n")
    assert log_files(run) == [run.job / "7.out"]
    for attempt in (1, 2):
        assert run.new_attempt() == attempt
        for node in ("n1", "n2"):
            run.log_path(attempt, node).write_text(f"{attempt}\n")
    assert log_files(run) == [run.job / "7.out", run.log_path(2, "n1"), run.log_path(2, "n2")]
    assert log_files(run, 1) == [run.log_path(1, "n1"), run.log_path(1, "n2")]
    write_place(run, 1, JobPlace(7, nodes=("n1", "n2")))
    assert log_files(run, 1)[0] == run.job / "7.out"
    with pytest.raises(InputError, match="allowed: 1, 2"):
        log_files(run, 3)


def test_following_shows_what_is_added_and_new_attempts_until_the_run_is_over(run: RunDirectory) -> None:
    run.new_attempt()
    log = run.log_path(1, "n1")
    log.write_text("[rank0]: old\n")
    turns = 0

    def goes_on() -> bool:
        """What happens meanwhile: a line in two halves, then another attempt, then the end with a last line."""
        nonlocal turns
        turns += 1
        if turns == 1:
            log.write_text("[rank0]: old\n[rank0]: ha")
        elif turns == 2:
            log.write_text("[rank0]: old\n[rank0]: half\n[rank1]: other\n")
        elif turns == 3:
            run.new_attempt()
            run.log_path(2, "n2").write_text("[rank0]: again\n")
        return turns < 3

    seen = [(path.name, line) for path, line in followed(run, rank=0, goes_on=goes_on)]
    assert seen == [("n1.log", "[rank0]: old"), ("n1.log", "[rank0]: half"), ("n2.log", "[rank0]: again")]


def test_what_a_rank_said_is_shown_and_not_how_torchrun_repeats_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    said = ["[rank0]: AttributeError: 'Broken' object has no attribute 'layre'", "E1116 04:28:55 failed (exitcode: 1)"]
    report = [
        "Traceback (most recent call last):",
        '  File "torch/distributed/run.py", line 1032, in <module>',
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "=" * 60,
        *["  rank      : 0 (local_rank: 0)"] * 60,
        "=" * 60,
    ]
    path.write_text("\n".join([*said, *report, "last"]))
    assert shown_lines(path, 5) == [*said, "(torchrun's own report of this is left out here)", "last"]
    assert shown_lines(path, 1) == ["last"]
    path.write_text("\n".join(said))
    assert shown_lines(path) == said
