"""`gradus watch --web` and the exports: what the real command prints, serves, writes, and refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from watched_runs import begin, say, train

from gradus.cli.export import export_command, follow_command
from gradus.cli.watch_options import WatchOptions, watch_as_told
from gradus.cli.watch_web import WebOptions, watch_web_command
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError

PATIENCE_SECONDS = 120.0  # this only ends a test that hangs


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory.create(tmp_path / "runs", "gpt", "r1")
    train(run, begin(run), 1, 30)
    return run


def web(run: RunDirectory, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    runs = run.path.parents[1]
    command = [sys.executable, "-m", "gradus", "watch", "--web", "--runs", str(runs), *arguments]
    environ = {name: value for name, value in os.environ.items() if name != "SSH_CONNECTION"} | environment
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


def test_it_prints_where_to_look_writes_for_node_exporter_and_ends_at_ctrl_c(run, tmp_path):
    (tmp_path / "node").mkdir()
    (tmp_path / "token").write_text("0123456789abcdef\n")
    given = ["--textfile", str(tmp_path / "node"), "--token-file", str(tmp_path / "token")]
    process = web(run, *given, SSH_CONNECTION="10.0.0.1 2 10.0.0.2 22")
    try:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        assert address.endswith("/?token=0123456789abcdef")
        page = urllib.request.urlopen(address, timeout=PATIENCE_SECONDS).read().decode()
        assert "gpt/r1" in page
        metrics = urllib.request.urlopen(address.replace("/?", "/metrics?"), timeout=PATIENCE_SECONDS).read().decode()
        assert 'gradus_run_step{run="r1",name="gpt"} 30\n' in metrics
        assert 'gradus_run_step{run="r1",name="gpt"} 30\n' in (tmp_path / "node" / "gradus.prom").read_text()
    finally:
        process.send_signal(signal.SIGINT)
        rest, told = process.communicate(timeout=PATIENCE_SECONDS)
    port = address.split(":")[2].partition("/")[0]
    assert process.returncode == 0
    assert rest == ""
    assert f"ssh -L {port}:127.0.0.1:{port} " in told
    assert "0123456789abcdef" not in told
    assert not run.stop_file.exists()


def test_elsewhere_it_is_served_only_when_told_and_with_a_warning(run):
    process = web(run, "gpt", "--bind", "0.0.0.0", "--json")
    try:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
        document = json.loads("".join(lines))
        assert document["token"] in document["url"]
        assert len(document["token"]) >= 32
    finally:
        process.terminate()
        _, told = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0
    assert "warning: served on 0.0.0.0, without encryption" in told


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "RUN"),
        ({"run": "r1", "port": 8000}, "--port"),
        ({"run": "r1", "bind": "::1"}, "--bind"),
        ({"run": "r1", "textfile": "x"}, "--textfile"),
        ({"run": "r1", "token_file": "x"}, "--token-file"),
        ({"run": "r1", "to": "x"}, "--to"),
        ({"web": True, "once": True}, "--once"),
        ({"web": True, "every": 1.0}, "--every"),
        ({"web": True, "export": "mlflow"}, "--export"),
        ({"run": "r1", "export": "mlfow"}, "--export"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], field):
    with pytest.raises(InputError) as refusal:
        watch_as_told(WatchOptions(**options))
    assert refusal.value.details["field"] == field


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"runs": "nowhere"}, "there is no folder nowhere"),
        ({"run": "nothing"}, "is not a run"),
        ({"textfile": "nowhere"}, "--textfile: there is no folder nowhere"),
        ({"token_file": "nowhere"}, "--token-file: cannot read nowhere"),
        ({"bind": "256.0.0.1"}, "cannot serve on 256.0.0.1:0"),
        ({"bind": "192.0.2.1"}, "cannot serve on 192.0.2.1:0"),
    ],
)
def test_bad_input_is_told_before_anything_is_served(run, changes: dict[str, Any], words):
    with pytest.raises(InputError, match=words):
        watch_web_command(WebOptions(**{"runs": str(run.path.parents[1]), **changes}))


def test_a_token_that_anybody_could_guess_is_refused(run, tmp_path):
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(InputError, match="has no token") as refusal:
        watch_web_command(WebOptions(runs=str(run.path.parents[1]), token_file=str(tmp_path / "token")))
    assert "openssl rand" in (refusal.value.hint or "")


def test_metrics_can_be_written_once_for_one_run_or_for_all(run, tmp_path, capsys):
    runs = str(run.path.parents[1])
    assert export_command("gpt", runs, "prometheus", str(tmp_path / "one.prom"), False) == 0
    assert 'gradus_run_step{run="r1",name="gpt"} 30\n' in (tmp_path / "one.prom").read_text()
    assert capsys.readouterr().out == f"{tmp_path / 'one.prom'}\n"
    assert export_command(None, runs, "prometheus", None, False) == 0
    assert "gradus_runs 1\n" in capsys.readouterr().out
    with pytest.raises(InputError, match="--to: cannot write"):
        export_command(None, runs, "prometheus", str(tmp_path / "no" / "x.prom"), False)


def test_an_export_follows_a_run_until_it_is_over(run, tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    say(run, "failed", 30, last_error="no")
    assert follow_command("gpt", str(run.path.parents[1]), "tensorboard", str(tmp_path / "board"), 0.05, True) == 1
    assert json.loads(capsys.readouterr().out)["state"] == "failed"
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    assert len(board.Scalars("train/loss")) == 30
