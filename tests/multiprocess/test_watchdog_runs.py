"""Runs that hang, with real ranks: they are ended, the rank that is behind is named, and nothing is left running."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from gradus_command import Gradus, committed, events, rank_processes, status, trained, wait_until

from gradus.launcher.processes import attempt_processes

pytestmark = pytest.mark.slow

HANGING = '''\
"""A user's model, data and hook that hang on one rank, as the environment says: HANG=place-rank-step."""

import ctypes
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import gradus

PLACE, RANK, STEP = (os.environ.get("HANG") or "nowhere-0-0").split("-")


def may_hang(place, step):
    if (place, os.environ.get("RANK", "0"), str(step)) == (PLACE, RANK, STEP):
        the_line_that_hangs()


def the_line_that_hangs():
    time.sleep(3600)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 1), 0

    def forward(self, x, y):
        if self.training:
            self.steps += 1
            time.sleep(0.02)
            may_hang("forward", self.steps)
            if (PLACE, os.environ["RANK"], str(self.steps)) == ("native", RANK, STEP):
                ctypes.PyDLL(None).sleep(3600)  # with Python's lock
        else:
            may_hang("evaluation", self.steps)
        return ((self.layer(x) - y) ** 2).mean()


class Data:
    fetched = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.fetched += 1
        may_hang("data", self.fetched)
        x = torch.full((4,), index / 64)
        return x, x[:1]


class Hook(gradus.Hook):
    every_rank = True

    def on_step(self, run):
        may_hang("hook", run.step)
        if PLACE == "collective" and run.step == int(STEP):
            group = dist.new_group(timeout=timedelta(seconds=6))
            if run.rank == int(RANK):
                the_line_that_hangs()
            dist.all_reduce(torch.ones(1), group=group)
'''
PATIENCE = 400.0  # for a run on a busy machine: most of it is the start of its ranks
WATCHDOG = {"after": 20, "at_least": "8s", "starting": "3m"}


@pytest.fixture(scope="module")
def gradus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gradus]:
    command = Gradus(tmp_path_factory.mktemp("hanging"))
    (command.folder / "hanging.py").write_text(HANGING)
    yield command
    command.stop_all()


def recipe(gradus: Gradus, **changes: Any) -> str:
    usual = {
        "model": {"use": "hanging.py:Model"},
        "data": {"use": "hanging.py:Data"},
        "hooks": ["hanging.py:Hook"],
        "batch": 12,
        "steps": 5000,
        "watchdog": WATCHDOG,
    }
    return gradus.recipe(**{**usual, **changes})


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""  # it has just ended


def line_of(text: str) -> int:
    return HANGING.splitlines().index(text) + 1


def hang_of(done: Any, run: Path) -> dict[str, Any]:
    """The error of a run that hung, after what must be so of any has been checked."""
    assert done.code == 1, done.err
    error: dict[str, Any] = done.json["error"]
    assert error["kind"] == "hang", error
    assert (run / error["stacks"]).exists()
    assert not attempt_processes(run, 1)
    assert status(run)["state"] == "failed"
    (fault,) = [event for event in events(run) if event["event"] == "fault"]
    assert (fault["kind"], fault["rank"], fault["seconds"] > 0) == ("hang", error["rank"], True)
    assert error["node"]
    return error


@pytest.mark.parametrize("place", ["forward-1-9", "hook-0-9", "evaluation-1-40"])
def test_the_rank_that_sleeps_is_named_with_its_line_and_not_those_that_wait(gradus, place):
    run = gradus.run(place)
    changes = {"evaluate": {"every": 20}} if place.startswith("evaluation") else {}
    done = gradus(
        "train", recipe(gradus, **changes), "--nproc", "3", "--run-id", place, "--json", timeout=PATIENCE, HANG=place
    )
    error = hang_of(done, run)
    assert error["rank"] == int(place.split("-")[1])
    assert f"hanging.py:{line_of('    time.sleep(3600)')} in the_line_that_hangs" in error["message"]
    assert sorted(path.name for path in (run / "attempts" / "1" / "stacks").glob("*.txt")) == [
        *("rank-0.txt", "rank-1.txt", "rank-2.txt")
    ]


def test_a_loader_worker_that_hangs_is_seen_and_does_not_outlive_its_rank(gradus):
    run = gradus.run("worker")
    hanging = {"HANG": "data-1-30"}
    done = gradus(
        *("train", recipe(gradus, plan={"workers": 2}), "--nproc", "2", "--run-id", "worker", "--json"),
        timeout=PATIENCE,
        **hanging,
    )
    error = hang_of(done, run)
    assert error["rank"] == 1
    assert "waiting for data" in error["message"]
    stacks = (run / error["stacks"]).read_text()
    assert "loader worker" in stacks
    assert "the_line_that_hangs" in stacks


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_process_is_stopped_is_named_by_the_others(gradus, rank):
    run = gradus.run(f"stopped-{rank}")
    command = ("train", recipe(gradus), "--nproc", "3", "--run-id", f"stopped-{rank}", "--json")
    process = gradus.start(*command)
    wait_until(lambda: len(trained(run)) >= 20, process, seconds=PATIENCE)
    os.kill(rank_processes(run)[rank], signal.SIGSTOP)
    error = hang_of(gradus.end(process, PATIENCE), run)
    assert error["rank"] == rank
    assert "its process is stopped (SIGSTOP)" in error["message"]


def test_native_code_that_holds_pythons_lock_is_seen_from_outside(gradus):
    run = gradus.run("native")
    command = ("train", recipe(gradus), "--nproc", "3", "--run-id", "native", "--json")
    error = hang_of(gradus(*command, timeout=PATIENCE, HANG="native-1-9"), run)
    assert error["rank"] == 1
    assert "does not let go of Python's lock" in error["message"]
    assert (
        f"hanging.py:{line_of('                ctypes.PyDLL(None).sleep(3600)  # with Python' + chr(39) + 's lock')}"
        in (error["message"])
    )


def test_a_collective_that_times_out_is_explained_in_the_same_way(gradus):
    run = gradus.run("timeout")
    off = recipe(gradus, watchdog=False)
    done = gradus(
        "train", off, "--nproc", "3", "--run-id", "timeout", "--json", timeout=PATIENCE, HANG="collective-2-9"
    )
    error = hang_of(done, run)
    assert error["rank"] == 2
    assert "a collective timed out on rank" in error["message"]
    assert "the_line_that_hangs" in error["message"]


def test_a_checkpoint_that_is_being_written_is_committed_before_the_run_is_ended(gradus):
    run = gradus.run("saved")
    saving = recipe(gradus, checkpoint={"every": 8})
    error = hang_of(
        gradus("train", saving, "--nproc", "2", "--run-id", "saved", "--json", timeout=PATIENCE, HANG="forward-1-9"),
        run,
    )
    assert error["rank"] == 1
    assert committed(run) == [8]


@pytest.mark.parametrize("workers", [0, 2])
def test_signals_to_the_whole_tree_save_the_run(gradus, workers):
    """As a scheduler sends them; torchrun itself is spared, which is told otherwise under Slurm."""
    name = f"tree-{workers}"
    run = gradus.run(name)
    saving = recipe(gradus, plan={"workers": workers}, checkpoint={"every": 5})
    process = gradus.start("train", saving, "--nproc", "2", "--run-id", name, "--json")
    wait_until(lambda: committed(run), process, seconds=PATIENCE)  # by a writer process, which is there from now on
    tree = [pid for pid in attempt_processes(run, 1) if "torch.distributed.run" not in command_of(pid)]
    assert len(tree) >= 2 * (1 + workers + 1), "ranks, loader workers and writer processes"
    for number in (signal.SIGTERM, signal.SIGUSR1):
        for pid in (*tree, process.pid):
            with suppress(ProcessLookupError):  # a writer process may have left meanwhile
                os.kill(pid, number)
    done = gradus.end(process, PATIENCE)
    assert done.code == 75, done.err
    assert committed(run)[-1] == done.json["step"]
    assert not attempt_processes(run, 1)


def test_a_rank_that_is_left_when_another_was_killed_goes_at_once_though_it_survives_sigterm(gradus):
    run = gradus.run("left")
    process = gradus.start(
        *("train", recipe(gradus, watchdog=False), "--nproc", "2", "--run-id", "left", "--json"), HANG="forward-0-9"
    )
    wait_until(lambda: len(trained(run)) >= 7, process, seconds=PATIENCE)
    time.sleep(1)  # rank 0 hangs by now, and cannot hear of its peer's end
    os.kill(rank_processes(run)[1], signal.SIGKILL)
    done = gradus.end(process, 25)  # torchrun alone would take 30 s
    assert (done.code, done.json["error"]["rank"]) == (1, 1)
