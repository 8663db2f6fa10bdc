"""How a script with an own loop ends: what fetches data ends with the run, and what went wrong is what is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradus_command import Gradus, ended, only_run, python, status

LEFT = """\
import multiprocessing, sys
import torch
import gradus
from own import Data

how = sys.argv[1]
run = gradus.Run.start({"name": "left", "batch": 8, "steps": 6, "plan": {"workers": 2}})
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
kept = run.batches(Data(200))
for x, y in kept:
    run.step(((model(x) - y) ** 2).mean())
    if how != "to the end" and run.steps_done == 2:
        break
if how == "finished":
    run.finish()
if how != "left":
    print("children", len(multiprocessing.active_children()))
"""


@pytest.mark.parametrize("how", ["to the end", "finished", "left"])
def test_nothing_fetches_data_after_the_loop(gradus: Gradus, how: str) -> None:
    (gradus.folder / "left.py").write_text(LEFT)
    code, out, err = ended(python(gradus, "left.py", how))
    assert code == 0, err
    assert out == ("" if how == "left" else "children 0\n")
    assert err.splitlines()[-1].startswith("finished: "), err
    assert "Exception ignored" not in err


WRONG = """\
import sys
import torch
import gradus
from own import Data

how = sys.argv[1]
plan = {"loss_chunks": 4} if how in ("prepare", "caught") else {}
run = gradus.Run.start({"name": "wrong", "batch": 8, "steps": 2, "plan": plan})
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

def broken(*arguments):
    raise AttributeError("of the one who tells")

if how == "broken teller":
    run._live.watch.explain = broken
    run._live.saving.rescue = broken
    raise ValueError("the cat is on the keyboard")
try:
    model, optimizer = run.prepare(model, optimizer)
except gradus.GradusError:
    if how == "caught":
        sys.exit(0)
    raise
if how == "batches":
    run.batches(torch.utils.data.DataLoader(Data(200)))
try:
    with run:
        for x, y in run.batches(Data(200)):
            run.step(((model(x) - y) ** 2).mean())
            if how == "caught outside":
                raise ValueError("the cat is on the keyboard")
except ValueError:
    sys.exit(0)
run.step(torch.zeros(()))
"""


@pytest.fixture
def wrong(gradus: Gradus) -> str:
    (gradus.folder / "wrong.py").write_text(WRONG)
    return "wrong.py"


def runs_so_far(gradus: Gradus) -> set[Path]:
    return set((gradus.runs / "wrong").glob("*"))


@pytest.mark.parametrize(
    ("how", "message", "hint", "state"),
    [
        ("prepare", "plan.loss_chunks: in an own loop", "use plan.loss_chunks=1", "failed"),
        ("batches", "run.batches: DataLoader", "loader.dataset", "failed"),
        ("after it", "no batch whose loss this could be", "in the body of", "finished"),
    ],
)
def test_bad_input_is_told_in_two_lines(
    gradus: Gradus, wrong: str, how: str, message: str, hint: str, state: str
) -> None:
    before = runs_so_far(gradus)
    code, _, err = ended(python(gradus, wrong, how))
    assert code == 2, err
    error, advice = err.splitlines()[-2:]
    assert error.startswith("error: ")
    assert message in error
    assert advice.startswith("hint: ")
    assert hint in advice
    assert "Traceback" not in err
    assert ("finished: " in err) == (state == "finished")
    assert status(only_run(gradus, "wrong", before))["state"] == state


@pytest.mark.parametrize(
    ("how", "message"), [("caught", "plan.loss_chunks: in an own loop"), ("caught outside", "the cat is on the")]
)
def test_a_failure_that_the_script_catches_is_not_told_as_a_finish(
    gradus: Gradus, wrong: str, how: str, message: str
) -> None:
    before = runs_so_far(gradus)
    code, _, err = ended(python(gradus, wrong, how))
    assert code == 0, "what the script said"
    assert err.splitlines()[-1].startswith(f"failed: {message}"), err
    assert "finished" not in err
    assert status(only_run(gradus, "wrong", before))["state"] == "failed"


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("prepare", 2, "plan.loss_chunks: in an own loop"),
        ("broken teller", 1, "ValueError: the cat is on the keyboard"),
        pytest.param("batches", 2, "run.batches: DataLoader", marks=pytest.mark.slow),
        pytest.param("caught", 1, "plan.loss_chunks: in an own loop", marks=pytest.mark.slow),
    ],
)
def test_the_launcher_tells_the_cause(gradus: Gradus, wrong: str, how: str, code: int, message: str) -> None:
    done = gradus("train", "--nproc", "1", "--run-id", f"launched-{how.split()[0]}", "--json", "--", wrong, how)
    assert done.code == code, done.err
    assert message in done.json["error"]["message"]
    assert done.json["state"] == "failed"
