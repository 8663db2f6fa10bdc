"""Any script: it runs as under torchrun, and its run has a directory, a log, a state and a first failure."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from gradus_command import Gradus, events, status
from scripts_to_launch import living, write_scripts

from gradus.launcher import following
from gradus.launcher.attempt import Launch
from gradus.launcher.script import Script
from gradus.record.directory import RunDirectory
from gradus.record.status import Status, read_status, write_status
from gradus.schema.errors import DoNotRestart


@pytest.fixture(scope="module", autouse=True)
def scripts(gradus: Gradus) -> None:
    write_scripts(gradus.folder)


def log_text(run: Path, attempt: int = 1) -> str:
    return (run / "attempts" / str(attempt) / "logs" / f"{socket.gethostname()}.log").read_text()


@pytest.fixture(scope="module")
def printed(gradus: Gradus):
    done = gradus("train", "--nproc", "2", "--run-id", "r1", "--", "prints.py", "--lr", "3", "--", "x y")
    assert done.code == 0, done.err
    return done


def test_the_script_has_the_environment_of_torchrun_and_its_own_arguments(gradus, printed):
    log = log_text(gradus.run("r1", "prints"))
    for rank in (0, 1):
        assert f"[rank{rank}]: out of {rank} 2 {rank} --lr 3 -- x y\n" in log
        assert f"[rank{rank}]: err of {rank}\n" in log
        assert f"[rank{rank}]: threads 1 {gradus.run('r1', 'prints')} 1\n" in log
    assert "50%" not in log  # of a progress bar only what it came to
    assert log.count(": 100%\n") == 2


def test_rank_0_is_shown_as_it_prints_each_stream_on_its_own(gradus, printed):
    assert printed.out.startswith("out of 0 2 0 --lr 3 -- x y\nthreads 1")
    assert "of 1" not in printed.out + printed.err
    assert "err of 0\n" in printed.err
    assert "\n10%\n50%\n100%\n" in printed.err  # carriage returns, which Python reads as newlines
    assert "prints: 2 ranks, run " in printed.err


def test_the_run_directory_tells_what_was_run(gradus, printed):
    run = gradus.run("r1", "prints")
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    attempt = {"command.json", "cluster.yaml", "environment.json", f"logs/{socket.gethostname()}.log"}
    files = {f"attempts/1/{name}" for name in attempt} | {"status.json", "events/launcher-attempt-1.jsonl"}
    assert found == files | {"control/lock", f"devices/{socket.gethostname()}.jsonl"}
    command = json.loads((run / "attempts/1/command.json").read_text())
    assert (command["target"], command["arguments"]) == ("prints.py", ["--lr", "3", "--", "x y"])
    assert (command["directory"], command["ranks"]) == (str(gradus.folder), 2)
    assert status(run)["state"] == "finished"
    assert [event["event"] for event in events(run)] == ["launch", "finding", "finish", "end"]
    shown = gradus("runs", "r1", "--json").json
    assert (shown["state"], shown["command"]) == ("finished", "prints.py --lr 3 -- 'x y'")
    assert "command: prints.py" in gradus("runs", "r1").out


def test_ranks_that_never_meet_are_a_warning_and_no_failure(gradus, printed):
    assert "warning: no rank ever connected to another" in printed.err
    assert "init_process_group" in printed.err


def test_ranks_that_meet_in_their_own_way_are_no_warning(gradus):
    done = gradus("train", "--nproc", "2", "--json", "--", "meets_elsewhere.py", str(gradus.folder / "port"))
    assert done.code == 0, done.err
    assert "problems" not in done.json


def test_one_rank_has_nobody_to_meet(gradus):
    done = gradus("train", "--nproc", "1", "--json", "--", "prints.py")
    assert done.code == 0, done.err
    assert "problems" not in done.json
    assert "out of 0 1 0" in done.err  # stdout is for the document


def test_a_module_runs_as_with_dash_m(gradus):
    package = gradus.folder / "pack" / "inner"
    package.mkdir(parents=True)
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    done = gradus("train", "--run-id", "module", "--", "-m", "pack.inner.train", "--lr", "1")
    assert done.code == 0, done.err
    assert done.out == "__main__ pack.inner ['--lr', '1']\n"
    assert gradus.run("module", "train").is_dir()


def test_an_executable_runs_as_it_is(gradus):
    path = gradus.folder / "wrapper.sh"
    path.write_text("#!/bin/sh\nexec python3 -c \"import os; print(os.environ['RANK'])\"\n")
    path.chmod(0o755)
    done = gradus("train", "--", "wrapper.sh")
    assert (done.code, done.out) == (0, "0\n"), done.err


def test_the_first_failing_rank_is_shown_with_its_traceback(gradus):
    run = gradus.run("raised", "fails")
    done = gradus("train", "--nproc", "2", "--run-id", "raised", "--", "fails.py", "raise")
    assert done.code == 1
    assert "error: rank 1 on " in done.err
    assert "ValueError: the cat is on the keyboard" in done.err
    assert 'fails.py", line' in done.err
    assert str(run / "attempts/1/logs") in done.err
    assert len(done.err.splitlines()) < 20
    found = status(run)
    assert (found["state"], found["last_error"]) == ("failed", "ValueError: the cat is on the keyboard")
    fault, end = events(run)[1:]
    assert (fault["event"], fault["rank"], fault["rank_exit_code"]) == ("fault", 1, 1)
    assert (end["event"], end["state"], end["exit_code"]) == ("end", "failed", 1)
    assert not living(run)


def test_a_rank_that_raises_in_ddp_is_blamed_and_not_its_peers(gradus):
    done = gradus("train", "--nproc", "2", "--json", "--", "loses_peer.py")
    error = done.json["error"]
    assert (done.code, error["rank"], error["message"]) == (1, 1, "ValueError: the cat is on the keyboard")
    assert error["traceback"].startswith("Traceback (most recent call last)")
    assert 'loses_peer.py", line 7' in error["traceback"]


@pytest.mark.parametrize(
    ("how", "code", "state", "kind", "words"),
    [
        ("kill", 1, "failed", "rank-died", "rank 1 on {} was killed by SIGKILL"),
        ("7", 1, "failed", "rank-died", "rank 1 on {} left with exit code 7"),
        ("usage", 1, "failed", "rank-died", "rank 1 on {} left with exit code 2"),
        ("93", 93, "failed", "do-not-restart", "left with exit code 93"),
        ("75", 75, "stopped", None, "rank 1 left with exit code 75"),
    ],
)
def test_how_a_rank_left_is_kept(gradus, how, code, state, kind, words):
    done = gradus("train", "--nproc", "2", "--json", "--", "fails.py", how)
    document = done.json
    assert (done.code, document["state"], document["exit_code"]) == (code, state, code)
    error = document.get("error", {})
    assert error.get("kind") == kind
    assert words.format(socket.gethostname()) in (error.get("message") or document["reason"])
    if how == "kill":
        assert (error["rank"], error["signal"]) == (1, "SIGKILL")
        assert "host memory" in error["hint"]
    if how == "usage":
        assert "unrecognized arguments: --foo" in error["output"]
    assert status(Path(document["run"]))["state"] == state


def test_a_breakpoint_in_a_rank_is_pointed_to_where_it_works(gradus):
    error = gradus("train", "--nproc", "2", "--json", "--", "fails.py", "breakpoint").json["error"]
    assert error["message"] == "bdb.BdbQuit"
    assert "RANK=0" in error["hint"]


def test_the_launcher_keeps_the_status_fresh_until_somebody_else_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(following, "_BEAT_EVERY_SECONDS", 0.0)
    run = RunDirectory.create(tmp_path, "own")
    launch = Launch(run, run.new_attempt(), Script("file", "x.py", (), tmp_path), ranks=1, cores=1)
    an_hour_ago = datetime.now(timezone.utc).replace(microsecond=0) - timedelta(hours=1)
    old = Status("running", attempt=1, pid=os.getpid(), updated_at=an_hour_ago)
    beat = following.Beat(launch)
    write_status(run, old)
    beat.poll()
    assert read_status(run).updated_at > old.updated_at
    write_status(run, replace(old, pid=os.getpid() + 1))  # an own loop
    beat.poll()
    assert read_status(run).updated_at == old.updated_at
    write_status(run, old)
    beat.poll()
    assert read_status(run).updated_at == old.updated_at  # never again


def test_resume_repeats_the_command_with_as_many_ranks_in_the_same_place(gradus, tmp_path):
    script = gradus.folder / "again.py"
    script.write_text(
        "import os, sys\n"
        "print('again', os.environ['GRADUS_ATTEMPT'], os.environ['WORLD_SIZE'], os.getcwd(), sys.argv[1:])\n"
    )
    assert gradus("train", "--nproc", "2", "--run-id", "again", "--", "again.py", "a b").code == 0
    run = gradus.run("again", "again")
    elsewhere = Gradus(tmp_path)
    done = elsewhere("train", "--resume", str(run))
    assert (done.code, done.out) == (0, f"again 2 2 {gradus.folder} ['a b']\n"), done.err
    done = gradus("train", "--resume", "again", "--nproc", "1", "--", "again.py", "other")
    assert (done.code, done.out) == (0, f"again 3 1 {gradus.folder} ['other']\n"), done.err
    assert status(run)["attempt"] == 3
    for words, message in (
        (("--resume", "again", "--", "prints.py"), "only its arguments may change"),
        (("--resume", "again", gradus.recipe()), "the run is of a script"),
    ):
        refused = gradus("train", "--json", *words)
        assert refused.code == 2
        assert message in refused.json["error"]["message"]
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["1", "2", "3"]


def test_secrets_in_arguments_are_not_recorded_and_so_not_repeated(gradus):
    done = gradus("train", "--run-id", "secret", "--", "prints.py", "--api-key", "hunter2")
    assert done.code == 0
    run = gradus.run("secret", "prints")
    for path in run.rglob("*"):  # except what the script itself printed
        assert not path.is_file() or path.suffix == ".log" or b"hunter2" not in path.read_bytes(), path
    refused = gradus("train", "--resume", "secret", "--json")
    assert refused.code == 2
    assert "secret" in refused.json["error"]["message"]
    assert "-- prints.py --api-key" in refused.json["error"]["hint"]


def test_a_job_has_secret_arguments_from_its_environment_and_from_no_file(tmp_path, monkeypatch):
    script = Script("file", "train.py", ("--api-key", "hunter2", "--steps", "3"), tmp_path)
    (tmp_path / "command.json").write_text(script.to_json())
    assert "hunter2" not in (tmp_path / "command.json").read_text()
    with pytest.raises(DoNotRestart, match="arguments that look like secrets"):
        Script.of_job(tmp_path / "command.json")  # rather than a run with *** for a key
    for name, value in script.unrecorded.items():
        monkeypatch.setenv(name, value)
    assert Script.of_job(tmp_path / "command.json") == script
    plain = replace(script, arguments=("--steps", "3"))
    assert plain.unrecorded == {}
