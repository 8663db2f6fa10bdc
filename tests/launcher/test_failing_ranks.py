"""What goes wrong in a rank is told as that rank saw it, and nothing is left running."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from gradus_command import events, rank_processes, status, trained, wait_until


def test_a_killed_rank_is_named_with_its_signal(gradus):
    recipe = gradus.recipe(steps=200)
    run = gradus.run("killed")
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "killed", "--json", STEP_SECONDS="0.1")
    wait_until(lambda: len(trained(run)) >= 2, process)
    os.kill(rank_processes(run)[1], signal.SIGKILL)
    done = gradus.end(process)
    assert done.code == 1
    error = done.json["error"]
    assert error["rank"] == 1
    assert "rank 1" in error["message"]
    assert "SIGKILL" in error["message"]
    assert "host memory" in error["hint"]
    found = status(run)
    assert found["state"] == "failed"
    assert "SIGKILL" in found["last_error"]
    assert not rank_processes(run)
    shown = gradus("runs", "killed")
    assert "failed" in shown.out
    assert "SIGKILL" in shown.out


def test_a_rank_that_raises_shows_its_own_error_and_not_its_peers(gradus):
    recipe = gradus.recipe(steps=50)
    run = gradus.run("raised")
    done = gradus("train", recipe, "--nproc", "2", "--run-id", "raised", RAISE_ON_RANK="1")
    assert done.code == 1
    assert "error: rank 1 on " in done.err
    assert "ValueError: the cat is on the keyboard" in done.err
    assert "own.py" in done.err
    assert "Connection" not in done.err
    assert len(done.err.splitlines()) <= 40
    found = status(run)
    assert (found["state"], found["step"] < 3) == ("failed", True)
    assert "the cat is on the keyboard" in found["last_error"]
    (end,) = [event for event in events(run) if event["event"] == "end"]
    assert (end["state"], end["exit_code"], end["error"]["rank"]) == ("failed", 1, 1)


FAILS_LATE = """
import atexit, os, time
from pathlib import Path
from own import Model

def leave():
    while not Path(os.environ["OUTCOME"]).exists():
        time.sleep(0.05)
    os._exit(7)

class Late(Model):
    def __init__(self):
        super().__init__()
        if os.environ["RANK"] == "1":
            atexit.register(leave)
"""


@pytest.mark.slow
def test_a_rank_that_fails_after_rank_0_has_finished_is_a_failure(gradus):
    (gradus.folder / "late.py").write_text(FAILS_LATE)
    recipe, run = gradus.recipe(model={"use": "late.py:Late"}), gradus.run("late")
    variables = {"OUTCOME": str(run / "control" / "outcome-1.json"), "PYTHONPATH": str(gradus.folder)}
    done = gradus("train", recipe, "--nproc", "2", "--run-id", "late", "--json", **variables)
    assert done.code == 1
    assert (done.json["state"], done.json["exit_code"], done.json["step"]) == ("failed", 1, 6)
    assert done.json["error"]["rank"] == 1
    assert "left with exit code 7" in done.json["error"]["message"]
    assert status(run)["state"] == "failed"


@pytest.mark.slow  # quickly: with a script, in test_script_stops.py
def test_killing_the_launcher_takes_the_ranks_along(gradus):
    recipe = gradus.recipe(steps=100_000)  # hours
    run = gradus.run("orphans")
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "orphans", STEP_SECONDS="0.1")
    wait_until(lambda: len(rank_processes(run)) == 2 and trained(run), process)
    process.kill()
    process.communicate()
    wait_until(lambda: not rank_processes(run))


def agent_of(rank: int) -> int:
    """The process id of the torchrun that started a rank."""
    return int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.slow  # quickly: with a script, in test_script_stops.py
def test_killing_torchrun_takes_the_ranks_along_and_is_reported(gradus):
    recipe = gradus.recipe(steps=200)
    run = gradus.run("no-agent")
    # In a step as long as that, no rank looks at the store that torchrun kept for it.
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "no-agent", "--json", STEP_SECONDS="600")
    wait_until(lambda: [event for event in events(run) if event["event"] == "start"], process)
    os.kill(agent_of(rank_processes(run)[0]), signal.SIGKILL)
    done = gradus.end(process)
    assert done.code == 1
    assert done.json["error"]["kind"] == "launch-failed"
    assert status(run)["state"] == "failed"
    wait_until(lambda: not rank_processes(run))


@pytest.mark.slow  # quickly: with a script, in test_script_stops.py
def test_killing_launcher_and_torchrun_takes_the_ranks_along(gradus):
    recipe = gradus.recipe(steps=200)
    run = gradus.run("nobody")
    process = gradus.start("train", recipe, "--nproc", "2", "--run-id", "nobody", STEP_SECONDS="600")
    wait_until(lambda: [event for event in events(run) if event["event"] == "start"], process)
    agent = agent_of(rank_processes(run)[0])
    os.kill(agent, signal.SIGSTOP)  # so that it cannot do anything for its ranks any more
    process.kill()
    process.communicate()
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: not rank_processes(run))


FULL = """
import os
import torch
from own import Model

class Full(Model):
    def forward(self, x, y):
        if self.steps == 2 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
        return super().forward(x, y)
"""


def test_a_rank_that_runs_out_of_memory_explains_itself_and_is_not_started_again(gradus):
    (gradus.folder / "full.py").write_text(FULL)
    recipe, run = gradus.recipe(model={"use": "full.py:Full"}), gradus.run("full")
    done = gradus("train", recipe, "--nproc", "2", "--run-id", "full", PYTHONPATH=str(gradus.folder))
    assert done.code == 93
    assert "error: rank 1 on " in done.err
    assert ": out of memory in the forward pass: " in done.err
    assert "what binds: " in done.err
    assert "Traceback" not in done.err
    (end,) = [event for event in events(run) if event["event"] == "end"]
    assert (end["exit_code"], end["error"]["kind"], end["error"]["rank"]) == (93, "out-of-memory", 1)
    assert "Traceback" in "".join(path.read_text() for path in (run / "attempts").rglob("*.log")), "for who wants it"


FULL_LOOP = """
import torch
import gradus

run = gradus.Run.start({"name": "loop", "batch": 4, "steps": 4})
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for x, y in run.batches([(torch.ones(4), torch.ones(1))] * 8):
    if run.steps_done == 2:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ...")
    run.step(((model(x) - y) ** 2).mean())
"""


@pytest.mark.slow  # quickly: in a recipe, above
def test_so_does_an_own_loop(gradus):
    (gradus.folder / "loop.py").write_text(FULL_LOOP)
    done = gradus("train", "--nproc", "1", "--run-id", "loop", "--", "loop.py")
    assert done.code == 93
    assert "out of memory in the forward pass: " in done.err
    assert "Traceback" not in done.err
