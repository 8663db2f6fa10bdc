"""`gradus train --profile` on the command line: a user's own script, own loops, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from gradus_command import Gradus, events

from gradus.diagnosis.timeline.analysis import analyse
from gradus.launcher.script import script_from
from gradus.launcher.script_run import prepared_script
from gradus.launcher.slurm.description import attempt_files
from gradus.schema.profile_request import PROFILE_FILE, ProfileRequest

SCRIPT = """\
import sys

import torch
import torch.distributed as dist
from torch import nn


def train(steps):
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        loss = model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item())
    dist.destroy_process_group()


train(int(sys.argv[1]))
"""
OWN_LOOP = """\
import torch

import gradus
from own import Data, Model

run = gradus.Run.start({"name": "mine", "batch": 8, "steps": 6, "plan": {"workers": 0}})
model = Model()
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
for x, y in run.batches(Data()):
    run.step(model(x, y))
"""
HIDDEN = """\
import os
from pathlib import Path

Path(os.environ["NOTE"]).write_text("was run")
"""


@pytest.fixture
def gradus(tmp_path: Path) -> Iterator[Gradus]:
    command = Gradus(tmp_path)
    yield command
    command.stop_all()


@pytest.mark.slow
def test_steps_of_a_foreign_script_are_those_of_its_optimizer(gradus: Gradus) -> None:
    (gradus.folder / "loop.py").write_text(SCRIPT)
    (gradus.folder / "site").mkdir()
    (gradus.folder / "site" / "sitecustomize.py").write_text(HIDDEN)
    note = gradus.folder / "note"
    for name in ("first", "second", "third"):
        done = gradus(
            *("train", "--nproc", "2", "--run-id", name, "--profile", "steps=2,from=3,stacks", "--", "loop.py", "6"),
            PYTHONPATH=str(gradus.folder / "site"),
            NOTE=str(note),
        )
        if "was killed by SIGABRT" not in done.err:  # torch 2.13 does at exit, without gradus as well
            break
    assert done.code == 0, done.err
    assert note.read_text() == "was run", "a sitecustomize of the user's own is not lost"
    run = gradus.run(name, "loop")
    found = [analyse(path) for path in sorted((run / "traces").iterdir())]
    assert [(one.rank, one.steps, one.world_size) for one in found] == [(0, 2, 2), (1, 2, 2)]
    assert all(one.communication_seconds > 0 for one in found)
    (sync,) = [one for one in found[0].syncs if not one.by_library]
    assert (sync.file, sync.line, sync.count) == (str(gradus.folder / "loop.py"), 17, 2)
    told = [event for event in events(run) if event["event"] == "profile"]
    assert {event["rank"] for event in told} == {0, 1}


def test_the_attempts_of_a_job_have_the_request_of_its_submission(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    request = ProfileRequest.parse("steps=2,ranks=0")
    prepared = prepared_script(script_from(["loop.py"], tmp_path), profile=request)
    for name, text in prepared.files.items():
        (tmp_path / name).write_text(text)
    assert ProfileRequest.from_json(attempt_files(tmp_path)[PROFILE_FILE]) == request


@pytest.mark.slow
def test_an_own_loop_is_recorded_by_its_own_steps(gradus: Gradus) -> None:
    (gradus.folder / "loop.py").write_text(OWN_LOOP)
    done = gradus("train", "--run-id", "a", "--profile", "steps=2,from=3", "--", "loop.py")
    assert done.code == 0, done.err
    run = gradus.run("a", "loop")
    assert [path.name for path in (run / "traces").iterdir()] == ["attempt-1-rank-0-steps-3-4.json.gz"]
    assert "forward" in analyse(next((run / "traces").iterdir())).phase_seconds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--profile", "step=5"), "did you mean 'steps'"),
        (("--profile", "steps=5,from=7"), "from=7 is after the last of 6 steps"),
        (("--profile", "ranks=1"), "ranks names rank 1, but there are 1"),
        (("--profile", "steps=5", "--dry-run"), "--dry-run"),
    ],
)
def test_a_profile_that_cannot_be_is_refused_and_leaves_no_run(
    gradus: Gradus, arguments: tuple[str, ...], said: str
) -> None:
    done = gradus("train", gradus.recipe(), *arguments)
    assert done.code == 2
    assert said in done.err
    assert not gradus.runs.exists()
