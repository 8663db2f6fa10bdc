"""A stop request reaches the ranks of a script as SIGTERM, once, and nothing is left of them afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gradus_command import Gradus, events, status, trained, wait_until
from scripts_to_launch import living, write_scripts

from gradus.launcher.attempt import Launch
from gradus.launcher.processes import rank_processes
from gradus.launcher.script import Script
from gradus.launcher.script_stop import ScriptStop
from gradus.record.directory import RunDirectory
from gradus.record.stop import request_stop


@pytest.fixture(scope="module", autouse=True)
def scripts(gradus: Gradus) -> None:
    write_scripts(gradus.folder)


def waiting(gradus: Gradus, name: str, how: str, **environment: str) -> tuple[subprocess.Popen[str], Path, Path]:
    """A script on two ranks that are both ready: the launcher, the run, the folder where it leaves its notes."""
    notes = gradus.folder / name
    notes.mkdir()
    command = ("train", "--nproc", "2", "--run-id", name, "--json", "--", "waits.py", str(notes), how)
    process = gradus.start(*command, **environment)
    wait_until(lambda: len(list(notes.glob("ready-*"))) == 2, process)
    return process, gradus.run(name, "waits"), notes


def saved(notes: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in notes.glob("saved-*")}


def torchrun_of(launcher: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(pid) for pid in children if "torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_text())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_one_sigterm_for_each_rank_and_the_script_has_its_time(gradus, number):
    process, run, notes = waiting(gradus, f"by-{number.name}", "0", SLOW="1.5")
    process.send_signal(number)
    done = gradus.end(process)
    assert (done.code, done.json["state"], done.json["reason"]) == (75, "stopped", number.name), done.err
    assert saved(notes) == {"saved-0": "1", "saved-1": "1"}
    assert "whether they save is up to the script" in done.err
    assert status(run)["state"] == "stopped"
    assert [event["event"] for event in events(run)] == ["launch", "stop-request", "end"]
    assert not living(run)


def test_gradus_runs_stop_asks_a_script_and_says_when_there_is_nothing_to_stop(gradus):
    process, run, notes = waiting(gradus, "asked", "0")
    asked = gradus("runs", "stop", "asked")
    assert (asked.code, asked.out) == (0, "waits/asked was asked to save and stop\n")
    done = gradus.end(process)
    assert (done.code, done.json["reason"]) == (75, "gradus runs stop")
    assert "stopping (gradus runs stop)" in done.err
    assert saved(notes) == {"saved-0": "1", "saved-1": "1"}
    again = gradus("runs", "stop", "asked", "--json")
    assert again.code == 2
    assert "is not running: stopped" in again.json["error"]["message"]
    assert gradus("runs", "halt", "asked").code == 2
    assert not living(run)


@pytest.mark.parametrize("how", ["plain", "3"])
def test_ranks_that_die_of_it_or_leave_with_any_code_were_stopped(gradus, how):
    process, run, _ = waiting(gradus, f"how-{how}", how)
    (run / "control" / "stop").touch()  # as anybody can, from any machine
    done = gradus.end(process)
    assert (done.code, done.json["state"], done.json["reason"]) == (75, "stopped", "stop file"), done.err
    assert "error" not in done.json
    assert not living(run)


def test_people_are_told_how_to_go_on(gradus):
    notes = gradus.folder / "people"
    notes.mkdir()
    process = gradus.start("train", "--run-id", "people", "--", "waits.py", str(notes), "0")
    wait_until(lambda: (notes / "ready-0").exists(), process)
    process.send_signal(signal.SIGTERM)
    done = gradus.end(process)
    assert done.code == 75
    assert "stopped on request (SIGTERM); whether it saved is up to the script; continue with" in done.err
    assert "gradus train --resume runs/waits/people" in done.err


def test_a_second_interrupt_ends_ranks_at_once_that_do_not_listen(gradus):
    process, run, notes = waiting(gradus, "twice", "children")
    process.send_signal(signal.SIGINT)
    wait_until(lambda: (run / "control" / "stop").exists(), process)
    process.send_signal(signal.SIGINT)
    done = gradus.end(process)  # by themselves, they never leave
    assert (done.code, done.json["error"]["kind"]) == (1, "interrupted")
    assert not saved(notes)
    assert not living(run)


def test_killing_the_launcher_takes_all_processes_of_a_script_along(gradus):
    process, run, _ = waiting(gradus, "orphans", "plain")
    assert len(living(run)) == 3  # torchrun and two ranks
    process.kill()
    process.communicate()
    wait_until(lambda: not living(run))


def test_killing_launcher_and_torchrun_takes_even_what_ranks_have_started_along(gradus):
    process, run, _ = waiting(gradus, "nobody", "children")
    torchrun = torchrun_of(process.pid)
    wait_until(lambda: len(living(run)) == 5)  # torchrun, two ranks that ignore SIGTERM, and a child of each
    assert sorted(rank_processes(torchrun)) == [0, 1]
    os.kill(torchrun, signal.SIGSTOP)  # so that it cannot do anything for its ranks any more
    process.kill()
    process.communicate()
    os.kill(torchrun, signal.SIGKILL)
    wait_until(lambda: not living(run))


def test_killing_torchrun_is_reported_and_leaves_nothing_behind(gradus):
    process, run, _ = waiting(gradus, "no-agent", "children")
    os.kill(torchrun_of(process.pid), signal.SIGKILL)
    done = gradus.end(process)
    assert (done.code, done.json["error"]["kind"]) == (1, "launch-failed")
    assert status(run)["state"] == "failed"
    assert not living(run)


def test_an_own_loop_tells_its_progress_stops_by_itself_and_says_how_it_ended(gradus):
    run = gradus.run("own-loop", "own_loop")
    process = gradus.start("train", "--nproc", "2", "--run-id", "own-loop", "--json", "--", "own_loop.py")
    wait_until(lambda: len(trained(run)) >= 5, process)
    assert status(run)["pid"] != process.pid
    process.send_signal(signal.SIGTERM)
    done = gradus.end(process)
    document = done.json
    assert (done.code, document["state"], document["reason"]) == (75, "stopped", "asked"), done.err
    assert document["step"] == trained(run)[-1]["step"] < 500
    assert f"step {document['step']}/500  loss" in done.err
    assert "the run saves after a few more steps" in done.err
    assert "problems" not in document
    assert [event["event"] for event in events(run)] == ["launch", "end"]  # it was not sent SIGTERM


def test_now_ends_ranks_at_once_that_do_not_listen(gradus):
    process, run, notes = waiting(gradus, "now", "children")
    assert gradus("runs", "stop", "now").code == 0
    wait_until(lambda: [event for event in events(run) if event["event"] == "stop-request"], process)
    asked = gradus("runs", "stop", "now", "--now")
    assert (asked.code, asked.out) == (0, "waits/now was ended at once\n")
    done = gradus.end(process)  # by themselves, they never leave
    assert (done.code, done.json["error"]["kind"]) == (1, "interrupted"), done.err
    assert "gradus runs stop --now" in done.json["error"]["message"]
    assert status(run)["state"] == "failed"
    assert not saved(notes)
    assert not living(run)
    assert gradus("runs", "now", "--now", "--json").json["error"]["field"] == "--now"


def test_a_launcher_that_is_only_asked_ends_its_ranks_at_once(gradus):
    process, run, _ = waiting(gradus, "elsewhere", "children")
    request_stop(RunDirectory(run), "somebody elsewhere", now=True)
    done = gradus.end(process)
    assert (done.code, done.json["error"]["kind"]) == (1, "interrupted"), done.err
    assert "somebody elsewhere" in done.json["error"]["message"]
    assert not living(run)


@pytest.mark.parametrize(
    ("signal_name", "how"), [("SIGINT", "Ctrl-C again ends"), (None, "gradus runs stop {run} --now ends")]
)
def test_ranks_that_do_not_leave_are_named_now_and_then(tmp_path, signal_name, how):
    run = RunDirectory.create(tmp_path, "waits")
    launch = Launch(run, run.new_attempt(), Script("file", "waits.py", (), tmp_path), 2, 1)
    said: list[str] = []
    stop = ScriptStop(launch, said.append, patience_seconds=0.3, say_every_seconds=0.2)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    ranks = [subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) for _ in range(2)]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()
    request_stop(run, "test")

    def waited(who: str) -> None:
        said.clear()
        deadline = time.monotonic() + 60
        while who not in said and time.monotonic() < deadline:
            stop.poll(signal_name, lambda: {n: rank.pid for n, rank in enumerate(ranks) if rank.poll() is None})
            time.sleep(0.02)
        assert who in said, said

    try:
        stop.poll(signal_name, lambda: {n: rank.pid for n, rank in enumerate(ranks)})
        assert not [line for line in said if "still waiting" in line], "they have their time first"
        how = how.format(run=run.path)
        waited(f"still waiting for ranks 0, 1 to leave; {how} them at once")
        waited(f"still waiting for ranks 0, 1 to leave; {how} them at once")
        ranks[0].kill()
        ranks[0].wait()
        waited(f"still waiting for rank 1 to leave; {how} it at once")
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
