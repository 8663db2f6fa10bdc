"""`gradus watch`: a run until it is over, on any terminal and on none; and Ctrl-C leaves the run alone."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time
from datetime import datetime, timedelta, timezone
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from watched_runs import begin, fail, health, save, say, train

from gradus.cli.watch import watch_command
from gradus.cli.watch_display import as_document, as_line, as_renderable, as_text, event_text, view_lines
from gradus.launcher.watching import View, Watching
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError

PATIENCE_SECONDS = 120.0  # this only ends a test that hangs


@pytest.fixture
def eventful(run: RunDirectory) -> RunDirectory:
    """A run in its third attempt, on a hundred nodes, two of which are not well."""
    train(run, begin(run), 1, 30)
    save(run, 20)
    fail(run, 1, 30, step_saved=20)
    train(run, begin(run, step=20), 21, 35)
    fail(run, 2, 35, step_begun=20, step_saved=20, error_message="OSError: [red]no[/red]", error_signature="2")
    train(run, begin(run, step=20, prediction_json={"tokens_per_second": 2500.0}), 21, 40)
    say(run, "running", 40, attempt=3)
    health(run, 100, n7={"phase": "silent", "phase_seconds": 70.0}, n9={"step": 30, "phase_seconds": 20.0})
    return run


def lines_of(view: View, height: int | None = None) -> dict[str, list[str]]:
    """What is shown under each label."""
    found: dict[str, list[str]] = {}
    label = "title"
    for number, (given, text) in enumerate(view_lines(view, height)):
        label = (given or label) if number else "title"
        found.setdefault(label, []).append(text)
    return found


def test_everything_that_there_is_to_see(eventful):
    shown = lines_of(Watching(eventful).look())
    assert shown["title"] == [f"run/{eventful.id} · running · attempt 3"]
    assert shown["step"][0].startswith("40/100  ━━━━━━━━╌")
    assert shown["step"][0].endswith("40%  ETA 0:30")
    assert shown["loss"][0].startswith("4.2  █")
    assert shown["speed"] == ["2 k tok/s, 80% of the predicted 2.5 k tok/s"]
    assert "25 steps were lost" in shown["goodput"][0]
    assert shown["saved"][0].startswith("step 20, 0:0")
    assert [line[:30] for line in shown["attempts"]] == [
        "1: failed at step 30 → again: ",
        "2: failed at step 35 → again: ",
    ]
    assert shown["nodes"][0] == "n7: 8 ranks at step 40, 8 silent, silent for 1:10, 1 GiB"
    assert shown["nodes"][1].startswith("n1: 8 ranks at step 40, a rank is 2.5× as slow as usual")
    assert shown["nodes"][2].startswith("n9: 8 ranks at step 30, 10 steps behind")
    assert shown["nodes"][-1] == "… and 93 nodes more, which do better"
    assert "  restart  again  " in shown["events"][0] or "  start  " in shown["events"][0]


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 12), (20, 8)])
def test_it_fits_on_any_terminal(eventful, width, height):
    stream = StringIO()
    console = Console(file=stream, width=width, height=height, force_terminal=False)
    console.print(as_renderable(Watching(eventful).look(), height))
    lines = stream.getvalue().rstrip("\n").splitlines()
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert lines[0].startswith("run/")
    assert lines[1].startswith("step")


def test_what_is_in_brackets_is_shown_as_it_is(eventful):
    """rich takes [red] for a colour, unless it is told not to."""
    stream = StringIO()
    Console(file=stream, width=400).print(as_renderable(Watching(eventful).look(), 60))
    assert "OSError: [red]no[/red]" in stream.getvalue()


def test_a_node_that_comes_on_is_not_behind_because_its_report_is_older(run):
    train(run, begin(run), 1, 40)
    say(run, "running", 40, attempt=1)
    health(run, 2, n0={"step": 36})
    assert not any("behind" in line for line in lines_of(Watching(run).look())["nodes"])


def test_a_deadline_before_the_end_is_said(run):
    soon = datetime.now(timezone.utc) + timedelta(seconds=29)
    train(run, begin(run, job_json={"job_id": 7, "nodes": ["n1"], "deadline": soon.timestamp()}), 1, 10)
    assert "job ends in 0:2" in lines_of(Watching(run).look())["step"][0]
    assert lines_of(Watching(run).look())["step"][0].endswith(", before the run does")


def test_health_that_nobody_renews_is_said_to_be_old(run):
    train(run, begin(run), 1, 3)
    health(run, 1)
    old = json.loads((run.path / "health.json").read_text())
    old["time"] = (datetime.now(timezone.utc) - timedelta(seconds=125)).isoformat()
    (run.path / "health.json").write_text(json.dumps(old))
    assert re.match("as they were 2:0[5-9] ago", lines_of(Watching(run).look())["nodes"][0])


def test_a_line_for_a_log_has_what_changes(eventful):
    line = as_line(Watching(eventful).look())
    assert "running  attempt 3  step 40/100  ETA 0:30  loss 4.2  2 k tok/s  goodput" in line
    assert "n7: 8 ranks at step 40, 8 silent" in line


@pytest.mark.parametrize("odd", [{}, {"time": 3, "event": None}, {"event": "x", "message": "a\nb"}, {"error": "text"}])
def test_any_event_is_a_line(odd):
    assert "\n" not in event_text(odd)


def test_once_shows_how_it_is_and_leaves(eventful, capsys):
    assert watch_command(str(eventful.path), "runs", once=True) == 0
    assert capsys.readouterr().out.splitlines()[0] == as_text(Watching(eventful).look()).splitlines()[0]
    assert watch_command(str(eventful.path), "runs", once=True, as_json=True) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["state"], document["step"], document["over"], document["exit_code"]) == (
        "running",
        40,
        False,
        None,
    )
    assert document["tokens_per_second"] == 2000
    assert document["nodes"][0]["node"] == "n7"
    assert [attempt["decision"] for attempt in document["attempts"]] == ["again", "again"]
    assert document["goodput"]["lost_steps"] == 25


def test_json_alone_waits_for_the_end_and_is_one_document(run, capsys):
    train(run, begin(run), 1, 5)
    say(run, "stopped", 5)
    assert watch_command(str(run.path), "runs", as_json=True) == 75
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"


def test_a_run_without_anything_is_shown_too(run, capsys):
    assert watch_command(str(run.path), "runs", once=True) == 0
    assert "saved    nothing yet" in capsys.readouterr().out
    assert as_document(Watching(run).look())["samples_per_second"] is None


# -- the real command -------------------------------------------------------------------------------------------------


def watch(run: RunDirectory, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gradus", "watch", str(run.path), "--every", "0.1", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def test_it_follows_a_run_to_its_end_in_lines_and_leaves_with_its_exit_code(run):
    attempt = begin(run)
    train(run, attempt, 1, 5)
    watcher = watch(run, stdout=subprocess.PIPE)
    assert watcher.stdout is not None
    seen = [watcher.stdout.readline() for _ in range(3)]
    assert any("step 5/100" in line for line in seen)
    train(run, attempt, 6, 9)
    say(run, "failed", 9, last_error="no")
    rest, _ = watcher.communicate(timeout=PATIENCE_SECONDS)
    assert "step 9/100" in rest
    assert "failed" in rest.splitlines()[-1]
    assert watcher.returncode == 1


def drain(terminal: int) -> None:
    """Until nobody writes to it any more."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:  # how Linux says so
        os.close(terminal)


def test_on_a_terminal_it_draws_in_place_and_ctrl_c_leaves_the_run_alone(run):
    train(run, begin(run), 1, 5)
    ours, theirs = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    watcher = watch(run, stdout=theirs, env={**environment, "TERM": "xterm", "COLUMNS": "60", "LINES": "20"})
    os.close(theirs)
    drawn = b""
    deadline = time.monotonic() + PATIENCE_SECONDS
    # Until it has gone back up to draw over what it drew before.
    while b"\x1b[1A" not in drawn and time.monotonic() < deadline:
        if select.select([ours], [], [], 1.0)[0]:
            drawn += os.read(ours, 65536)
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    watcher.send_signal(signal.SIGINT)
    # As a terminal does: one that nobody reads any more is full after a few frames, and then it would draw for ever.
    threading.Thread(target=drain, args=[ours], daemon=True).start()
    _, told = watcher.communicate(timeout=PATIENCE_SECONDS)
    assert "5/100" in drawn.decode()
    assert "the run goes on without being watched" in told
    assert watcher.returncode == 130
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before
    assert not run.stop_file.exists()


def test_bad_input_is_told(run):
    with pytest.raises(InputError, match="--every: found 0"):
        watch_command(str(run.path), "runs", every=0)
    with pytest.raises(InputError, match="is not a run"):
        watch_command(str(run.path / "nothing"), "runs")
