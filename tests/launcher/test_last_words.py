"""What ranks print at their end is read for the one error that matters."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest

from gradus.launcher.attempt import Launch
from gradus.launcher.ending import Departure, result_of
from gradus.launcher.last_words import last_words
from gradus.launcher.rank_output import RankOutput, without_rank_lines
from gradus.launcher.script import Script
from gradus.record.directory import RunDirectory
from gradus.record.outcome import write_outcome

RAISED = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "    boom()",
    "ValueError: boom",
]
LOST = [*RAISED[:3], "RuntimeError: [gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:18"]


def test_the_exception_is_the_last_traceback_that_ended_the_rank():
    first = [*RAISED[:3], "KeyError: 1", "", "During handling of the above exception, another exception occurred:", ""]
    ignored = ["Exception ignored in: <function x>", *RAISED[:3], "OSError: at exit"]
    words = last_words(["step 1", *first, *RAISED, *ignored])
    assert words.exception == "ValueError: boom"
    assert words.traceback is not None
    assert words.traceback.splitlines()[:4] == RAISED


def test_without_a_traceback_the_last_lines_are_kept():
    words = last_words([f"line {number}" for number in range(100)])
    assert (words.exception, words.traceback) == (None, None)
    assert words.lines.splitlines()[-1] == "line 99"
    assert len(words.lines.splitlines()) == 12


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("ValueError: Default process group has not been initialized, please", "init_process_group"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "smaller batch"),
        ("bdb.BdbQuit", "RANK=0"),
        ("ValueError: boom", None),
    ],
)
def test_some_errors_have_a_hint(text, hint):
    found = last_words([*RAISED[:3], text]).hint("train.py")
    assert hint in found if hint else found is None


TABLE = """\
Failures:
[1]:
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : {other} (pid: 11)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : {first} (pid: 10)
"""


@pytest.mark.parametrize(
    ("first", "other", "said", "blamed"),
    [
        (1, 1, {0: LOST, 1: RAISED}, 1),  # torchrun found both dead at once
        (1, 1, {0: RAISED, 1: LOST}, 0),
        (1, -9, {0: LOST, 1: []}, 1),
        (-6, -6, {0: LOST, 1: RAISED}, 1),  # aborted by torch when all was said
        (-15, 7, {0: [], 1: []}, 1),
        (1, -15, {0: LOST, 1: RAISED}, 1),  # was on its way out when torchrun ended it
        (1, -15, {0: LOST, 1: []}, 0),
        (1, 1, {0: LOST, 1: LOST}, 0),  # a cause that nobody tells
    ],
)
def test_a_rank_that_only_lost_its_peer_is_not_blamed(tmp_path, first, other, said, blamed):
    run = RunDirectory.create(tmp_path, "train")
    launch = Launch(run, run.new_attempt(), Script("file", "train.py", (), tmp_path), ranks=2, cores=2)
    # A script may well print such a table itself, of ranks of its own.
    own = "".join(f"[rank0]: {line}\n" for line in TABLE.format(first=5, other=5).splitlines())
    run.log_path(1, socket.gethostname()).write_text(TABLE.format(first=first, other=other) + own)
    result = result_of(launch, Departure(1, said=said))
    assert result.error is not None
    assert (result.state, result.error["rank"]) == ("failed", blamed)
    assert (result.error["message"] == "ValueError: boom") == (said[blamed] is RAISED)


def test_a_rank_that_is_still_leaving_when_torchrun_looks_is_blamed_by_its_words(tmp_path):
    run = RunDirectory.create(tmp_path, "train")
    launch = Launch(run, run.new_attempt(), Script("file", "train.py", (), tmp_path), ranks=2, cores=2)
    only_the_first = TABLE[TABLE.index("Root Cause") :].format(first=1)
    run.log_path(1, socket.gethostname()).write_text(only_the_first)
    result = result_of(launch, Departure(1, said={0: LOST, 1: RAISED}))
    assert result.error is not None
    assert (result.error["rank"], result.error["message"]) == (1, "ValueError: boom")


@pytest.mark.parametrize(("other", "kind"), [(-15, "lost-peer"), (-9, "rank-died")])
def test_a_rank_that_says_itself_that_it_lost_a_peer_is_not_the_one_that_died(tmp_path, other, kind):
    """The node of the peer may have left no word at all; torchrun ends the others with SIGTERM."""
    run = RunDirectory.create(tmp_path, "train")
    launch = Launch(run, run.new_attempt(), Script("file", "train.py", (), tmp_path), ranks=2, cores=2)
    run.log_path(1, socket.gethostname()).write_text(TABLE.format(first=1, other=other))
    error = {"kind": "lost-peer", "message": "Connection reset by peer", "rank": 0}
    write_outcome(run, 1, {"state": "failed", "exit_code": 1, "error": error})
    result = result_of(launch, Departure(1, said={0: LOST, 1: []}))
    assert result.error is not None
    assert result.error["kind"] == kind


def test_lines_of_ranks_are_told_apart_while_they_come(tmp_path: Path):
    folders = {rank: tmp_path / "none_x" / "attempt_0" / str(rank) for rank in (0, 1)}
    for folder in folders.values():
        folder.mkdir(parents=True)
    log, shown = io.BytesIO(), io.StringIO()
    output = RankOutput(tmp_path, 2, log)
    output.show(shown, shown)
    out, err = folders[0] / "stdout.log", folders[1] / "stderr.log"
    out.write_bytes(b"half ")
    err.write_bytes(b"[rank1]: Traceback\n1%\r2%\r")
    output.poll()
    assert (log.getvalue(), shown.getvalue()) == (b"[rank1]: Traceback\n", "half ")
    with out.open("ab") as file:
        file.write("line ü".encode()[:-1])
    output.poll()
    with out.open("ab") as file:
        file.write("ü".encode()[1:] + b"\nno newline")
    with err.open("ab") as file:
        file.write(b"3%\rdone\r\n")
    output.close()
    assert log.getvalue().decode().splitlines() == [
        "[rank1]: Traceback",
        "[rank0]: half line ü",
        "[rank1]: done",
        "[rank0]: no newline",
    ]
    assert shown.getvalue() == "half line ü\nno newline"
    assert output.last_words(1) == ["Traceback", "done"]
    assert output.last_words(0) == ["half line ü", "no newline"]
    assert not (tmp_path / "none_x").exists()
    assert without_rank_lines(log.getvalue().decode() + "torchrun says\n") == "torchrun says"
