"""How a script with an own loop ends: what fetches data ends with the run, and what went wrong is what is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradus_command import Gradus, committed, ended, events, only_run, python, status

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


LEAVES = """\
import sys
import torch
import gradus
from own import Data

run = gradus.Run.start({"name": "leaves", "batch": 8, "steps": 6, "plan": {"workers": 0}})
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in run.batches(Data(200)):
    try:
        sys.exit(9)
    except SystemExit:
        pass
    run.step(((model(x) - y) ** 2).mean())
    if run.steps_done == 2:
        if "raise" in sys.argv[1]:
            with run:
                exec(sys.argv[1])
        exec(sys.argv[1])
"""


@pytest.fixture
def leaves(gradus: Gradus) -> str:
    (gradus.folder / "leaves.py").write_text(LEAVES)
    return "leaves.py"


@pytest.mark.parametrize(
    ("how", "code", "state", "error"),
    [
        ("sys.exit(3)", 3, "failed", "the script left with exit code 3"),
        ("sys.exit(0)", 0, "finished", None),
        pytest.param("pass", 0, "finished", None, marks=pytest.mark.slow),
        pytest.param("sys.exit()", 0, "finished", None, marks=pytest.mark.slow),
        pytest.param("exit(1)", 1, "failed", "the script left with exit code 1", marks=pytest.mark.slow),
        pytest.param(
            "sys.exit('no good')", 1, "failed", "the script left with exit code 1: no good", marks=pytest.mark.slow
        ),
        pytest.param("raise SystemExit(4)", 4, "failed", "the script left with exit code 4", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_leaves_with_another_code_than_0_has_failed(
    gradus: Gradus, leaves: str, how: str, code: int, state: str, error: str | None
) -> None:
    before = set((gradus.runs / "leaves").glob("*"))
    left, _, err = ended(python(gradus, leaves, how))
    assert left == code, err
    found = status(only_run(gradus, "leaves", before))
    assert (found["state"], found["last_error"]) == (state, error)
    assert err.splitlines()[-1].startswith(f"{state}: {error or ''}"), err


def test_the_launcher_tells_how_a_script_left(gradus: Gradus, leaves: str) -> None:
    done = gradus("train", "--nproc", "1", "--run-id", "launched", "--json", "--", leaves, "sys.exit('no good')")
    assert (done.code, done.json["state"]) == (1, "failed"), done.err
    assert done.json["error"]["message"] == "the script left with exit code 1: no good"
    assert "finish" not in [event["event"] for event in events(gradus.run("launched", "leaves"))]


STOPS = """\
import sys
import torch
import gradus
from own import Data

run = gradus.Run.start({"name": "stops", "batch": 8, "steps": 10**6, "plan": {"workers": 0}})
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in run.batches(Data(200)):
    run.step(((model(x) - y) ** 2).mean())
    if run.steps_done == 2:
        (run.directory / "control" / "stop").write_text("asked by itself")
sys.exit(int(sys.argv[1]) if run.stopped else 0)
"""


@pytest.mark.parametrize(("code", "state", "error"), [(75, "stopped", None), (1, "failed", "the script left with")])
def test_a_script_may_leave_with_the_code_of_a_stopped_run(
    gradus: Gradus, code: int, state: str, error: str | None
) -> None:
    (gradus.folder / "stops.py").write_text(STOPS)
    done = gradus("train", "--nproc", "1", "--run-id", f"with-{code}", "--json", "--", "stops.py", str(code))
    assert (done.code, done.json["state"]) == (code, state), done.err
    before = set((gradus.runs / "stops").glob("*"))
    left, _, err = ended(python(gradus, "stops.py", str(code)))
    assert left == code, err
    for run in (gradus.run(f"with-{code}", "stops"), only_run(gradus, "stops", before)):
        assert status(run)["state"] == state
        assert (status(run)["last_error"] or "").startswith(error or "")


APART = """\
import sys, time
import torch
import gradus
from own import Data

run = gradus.Run.start({"name": "apart", "batch": 8, "steps": 12, "plan": {"workers": 0}})
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in run.batches(Data(200)):
    if run.steps_done == 5 and (run.rank == 1 or "all" in sys.argv[1]):
        if run.rank == 0:
            time.sleep(float(sys.argv[2]))
        if "exit" in sys.argv[1]:
            sys.exit(int(sys.argv[1][-1]))
        break
    run.step(((model(x) - y) ** 2).mean())
if "evaluate" in sys.argv[1]:
    run.evaluate(Data(20), lambda batch: ((model(batch[0]) - batch[1]) ** 2).mean())
"""


@pytest.fixture
def apart(gradus: Gradus) -> str:
    (gradus.folder / "apart.py").write_text(APART)
    return "apart.py"


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("break", "rank 1 left the loop after 5 steps while rank 0 goes on"),
        ("exit 1", "the script of rank 1 left with exit code 1"),
        pytest.param("exit 0", "rank 1 left the loop after 5 steps while rank 0 goes on", marks=pytest.mark.slow),
        pytest.param("break, evaluate", "rank 1 left the loop after 5 steps while rank 0", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_leaves_the_loop_alone_is_named_and_ends_the_run(
    gradus: Gradus, apart: str, how: str, told: str
) -> None:
    """It had gone into the save, and the other one stood in a reduction for half an hour."""
    name = how.replace(" ", "-").replace(",", "")
    done = gradus("train", "--nproc", "2", "--run-id", name, "--json", "--", apart, how, timeout=100)
    assert done.code == 1, done.err
    error = done.json["error"]
    assert (error["rank"], error["message"][: len(told)]) == (1, told)
    run = gradus.run(name, "apart")
    assert status(run)["state"] == "failed"
    assert status(run)["last_error"].startswith(told)
    assert committed(run) == []


@pytest.mark.parametrize(("how", "seconds"), [("all", "1"), pytest.param("all exit 0", "14", marks=pytest.mark.slow)])
def test_ranks_that_leave_the_loop_at_the_same_step_finish_though_one_is_slow(
    gradus: Gradus, apart: str, how: str, seconds: str
) -> None:
    done = gradus("train", "--nproc", "2", "--run-id", f"slow-{seconds}", "--", apart, how, seconds)
    assert done.code == 0, done.err
    assert committed(gradus.run(f"slow-{seconds}", "apart")) == [5]


MISFIT = """\
import torch
import gradus
from own import Data

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(4, 7), torch.nn.Linear(5, 1)

    def forward(self, x):
        return self.head(self.body(x))

run = gradus.Run.start({"name": "misfit", "batch": 8, "steps": 6, "plan": {"workers": 0}})
model = Net()
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in run.batches(Data(200)):
    run.step(((model(x) - y) ** 2).mean())
"""


def test_a_shape_error_keeps_its_traceback_and_shows_what_the_model_was_given(gradus: Gradus) -> None:
    (gradus.folder / "misfit.py").write_text(MISFIT)
    done = gradus("train", "--nproc", "1", "--json", "--", "misfit.py")
    assert done.code == 1, done.err
    error = done.json["error"]
    assert error["message"].startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied (8x7 and 5x1)")
    assert error["hint"].startswith("make the data's shapes fit the module that failed")
    for told in (error["traceback"], done.err):
        assert "return self.head(self.body(x))" in told
        assert "the model failed in head (Linear)\n" in told
        assert "was given 0: float32 [8, 7]\n" in told
        assert "the batch: 0: float32 [8, 4], 1: float32 [8, 1]\n" in told


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
