"""Scripts with an own loop, started the ways people start them: by gradus, by torchrun, by python."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from gradus_command import Gradus, committed, ended, events, only_run, python, status, trained, wait_until
from safetensors.torch import load_file

from gradus import load_run
from gradus.schema.callables import import_callable

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = """\
import os, sys, time
import torch
import gradus
from own import Data

run = gradus.Run.start({"name": "script", "batch": 8, "steps": 40, "seed": 3, **eval(os.environ.get("MORE", "{}"))},
                       resume=sys.argv[1] if len(sys.argv) > 1 else None)
model = torch.nn.Linear(4, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in run.batches(Data(200)):
    time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
    if run.steps_done == 5 and os.environ.get("RAISE_ON_RANK") == str(run.rank):
        raise ValueError("the cat is on the keyboard")
    run.step(((model(x) - y) ** 2).mean())
print("after the loop:", "stopped" if run.stopped else "finished")
"""


@pytest.fixture
def script(gradus: Gradus) -> str:
    (gradus.folder / "loop.py").write_text(SCRIPT)
    return "loop.py"


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in trained(run)]


def test_the_example_is_a_plain_loop_but_for_a_few_lines() -> None:
    plain, own = ((EXAMPLES / name).read_text().splitlines() for name in ("plain_loop.py", "own_loop.py"))
    new = [line for line in own[1:] if line.strip() and line not in plain]
    gone = [line for line in plain[1:] if line.strip() and line not in own]
    assert len(new) < 10, new
    assert len(gone) < 10, gone
    assert len(own) <= len(plain) + 3


def test_the_example_learns_on_two_ranks(gradus: Gradus) -> None:
    done = gradus("train", "--nproc", "2", "--run-id", "example", "--json", "--", str(EXAMPLES / "own_loop.py"))
    assert done.code == 0, done.err
    assert done.json["state"] == "finished"
    assert (done.json["step"], done.json["validation_loss"] < 0.5) == (100, True)
    run = gradus.run("example", "own_loop")
    assert len(trained(run)) == 100
    assert committed(run) == [100]
    assert (run / "attempts/1/plan.yaml").exists()
    assert gradus("runs", "own-loop", "--json").json["run"] == gradus("runs", "own_loop", "--json").json["run"]
    assert status(run)["state"] == "finished"


@pytest.mark.slow
def test_a_stopped_script_goes_on_where_it_was(gradus: Gradus, script: str) -> None:
    whole = gradus("train", "--nproc", "2", "--run-id", "whole", "--", script)
    assert whole.code == 0, whole.err
    process = gradus.start("train", "--nproc", "2", "--run-id", "cut", "--", script, STEP_SECONDS="0.5")
    cut = gradus.run("cut", "loop")
    wait_until(lambda: len(trained(cut)) >= 5, process)
    assert gradus("runs", "stop", str(cut)).code == 0
    first = gradus.end(process)
    assert first.code == 75, first.err
    assert "after the loop: stopped" in first.out
    assert 5 <= committed(cut)[-1] < 40
    second = gradus("train", "--resume", str(cut))
    assert second.code == 0, second.err
    assert "after the loop: finished" in second.out
    assert losses(cut) == losses(gradus.run("whole", "loop"))


@pytest.mark.slow  # quickly: that of a script, in test_scripts.py
def test_the_rank_that_fails_first_is_named(gradus: Gradus, script: str) -> None:
    done = gradus("train", "--nproc", "2", "--run-id", "fails", "--json", "--", script, RAISE_ON_RANK="1")
    assert done.code == 1
    error = done.json["error"]
    assert "ValueError: the cat is on the keyboard" in error["message"]
    assert error["rank"] == 1
    assert status(gradus.run("fails", "loop"))["state"] == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_plain_python_stops_on_a_signal_and_resumes(gradus: Gradus, script: str, number: signal.Signals) -> None:
    before = set((gradus.runs / "script").glob("*"))
    process = python(gradus, script, STEP_SECONDS="0.3")
    wait_until(lambda: set((gradus.runs / "script").glob("*")) - before)
    run = only_run(gradus, "script", before)
    wait_until(lambda: len(trained(run)) >= 3)
    process.send_signal(number)
    code, out, err = ended(process)
    assert code == 75, err
    assert "after the loop: stopped" in out
    assert f"stopped: {number.name}" in err
    assert status(run)["state"] == "stopped"
    step = committed(run)[-1]
    code, out, err = ended(python(gradus, script, str(run)))
    assert code == 0, err
    assert (status(run)["state"], status(run)["step"], status(run)["attempt"]) == ("finished", 40, 2)
    assert [row["step"] for row in trained(run) if row["attempt"] == 2] == list(range(step + 1, 41))


def test_plain_torchrun_makes_one_run_of_its_ranks(gradus: Gradus, script: str) -> None:
    before = set((gradus.runs / "script").glob("*"))
    code, _, err = ended(python(gradus, "-m", "torch.distributed.run", "--nproc-per-node", "2", script))
    assert code == 0, err
    run = only_run(gradus, "script", before)
    [start] = [event for event in events(run) if event["event"] == "start"]
    assert start["ranks"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stesp": 3}, "unknown key 'stesp'"),
        ({"plan": {"mesh": {"pipeline": 2}}}, "pipeline"),
        ({"batch": 0}, "batch"),
    ],
)
def test_a_bad_recipe_is_told_without_a_traceback(
    gradus: Gradus, script: str, more: dict[str, Any], message: str
) -> None:
    before = set(gradus.runs.rglob("*"))
    code, _, err = ended(python(gradus, script, MORE=repr(more)))
    assert code == 2, err
    assert message in err
    assert "Traceback" not in err
    assert set(gradus.runs.rglob("*")) == before, "bad input changes nothing on disk"


def test_a_failure_in_the_loop_keeps_its_traceback_and_fails_the_run(gradus: Gradus, script: str) -> None:
    before = set((gradus.runs / "script").glob("*"))
    code, _, err = ended(python(gradus, script, RAISE_ON_RANK="0"))
    assert code == 1
    assert "ValueError: the cat is on the keyboard" in err
    assert "Traceback" in err
    run = only_run(gradus, "script", before)
    assert status(run)["state"] == "failed"
    assert committed(run) == []


BY_PARAMETERS = """\
import torch
import gradus
from own import Data

plan = {"precision": "bf16", "narrow_weights": True}
run = gradus.Run.start({"name": "penalty", "batch": 8, "steps": 2, "plan": plan})
model = torch.nn.Linear(4, 1)
parameters = list(model.parameters())
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
for x, y in run.batches(Data(200)):
    loss = ((model(x) - y) ** 2).mean()
    run.step(loss + sum(g.norm() for g in torch.autograd.grad(loss, parameters, create_graph=True)))
"""


def test_a_loop_that_differentiates_by_its_parameters_is_told_which_key_lets_it(gradus: Gradus) -> None:
    (gradus.folder / "penalty.py").write_text(BY_PARAMETERS)
    done = gradus("train", "--nproc", "1", "--run-id", "penalty", "--json", "--", "penalty.py")
    assert done.code == 1
    assert "appears to not have been used in the graph" in done.json["error"]["message"]
    assert "plan.narrow_weights=false" in done.json["error"]["hint"]
    code, _, err = ended(python(gradus, "penalty.py"))
    assert code == 1
    assert err.rstrip().splitlines()[-1].endswith("plan.narrow_weights=false")


TWICE = """\
import os, signal, sys
import torch
import gradus
from own import Data

before = signal.getsignal(signal.SIGTERM)

def go(steps, resume=None):
    run = gradus.Run.start({"name": "twice", "batch": 8, "steps": steps}, resume=resume)
    model = torch.nn.Linear(4, 1)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for x, y in run.batches(Data(200)):
        run.step(((model(x) - y) ** 2).mean())
        if len(sys.argv) > 1 and run.steps_done == 2:
            break
    return run

if len(sys.argv) > 1:
    go(5)
    def full(*arguments, **more): raise OSError(28, "No space left on device")
    __import__("gradus.checkpoint.job", fromlist=["x"]).write_part = full
    sys.exit(0)
run = go(3)
run.finish()
assert signal.getsignal(signal.SIGTERM) == before
again = go(6, resume=str(run.directory))
again.finish()
print(again.steps_done)
raise KeyError("after everything")
"""


def test_a_finished_run_gives_everything_back(gradus: Gradus) -> None:
    (gradus.folder / "twice.py").write_text(TWICE)
    before = set((gradus.runs / "twice").glob("*"))
    code, out, err = ended(python(gradus, "twice.py"))
    assert (code, out.splitlines()[-1]) == (1, "6"), err
    assert "KeyError: 'after everything'" in err
    run = only_run(gradus, "twice", before)
    assert status(run)["state"] == "finished", "what fails after the run is none of it"


def test_a_last_save_that_fails_fails_the_run(gradus: Gradus) -> None:
    (gradus.folder / "twice.py").write_text(TWICE)
    before = set((gradus.runs / "twice").glob("*"))
    code, _, err = ended(python(gradus, "twice.py", "break"))
    assert code == 1, err
    assert "the checkpoint of step 2 cannot be written" in err
    assert status(only_run(gradus, "twice", before))["state"] == "failed"


ADAPTERS = """\
import gradus, torch
from safetensors.torch import save_file
from own import Data


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 6), torch.nn.Linear(6, 1)

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


if __name__ == "__main__":
    save_file(Net().state_dict(), "base.safetensors")
    run = gradus.Run.start({
        "name": "adapters", "batch": 8, "steps": 5, "model": {"weights": "base.safetensors"}, "lora": {"rank": 2},
        "optimizer": {"use": "adamw", "lr": 0.1},
    })
    model, _ = run.prepare(Net())
    for x, y in run.batches(Data(200)):
        run.step(((model(x) - y) ** 2).mean())
    torch.save(model(torch.ones(3, 4)).detach(), "said.pt")
"""


@pytest.mark.slow
def test_adapters_that_an_own_loop_trained_are_put_beside_a_model_that_is_given(gradus: Gradus, tmp_path: Path) -> None:
    (gradus.folder / "adapters.py").write_text(ADAPTERS)
    done = gradus("train", "--nproc", "1", "--run-id", "one", "--", "adapters.py")
    assert done.code == 0, done.err
    run = gradus.run("one", "adapters")
    said = torch.load(gradus.folder / "said.pt")
    result = load_run(run)
    model = import_callable(f"{gradus.folder}/adapters.py:Net", "model")()
    loaded = result.load_model(model=model)
    assert torch.equal(loaded(torch.ones(3, 4)), said)
    assert torch.equal(result.load_model(model=loaded)(torch.ones(3, 4)), said), "adapters are not put on twice"

    refused = gradus("checkpoint", "export", str(run), "--out", str(tmp_path / "out"), "--json")
    assert (refused.code, refused.json["error"]["field"]) == (2, "model")
    assert "load_model(model=" in refused.json["error"]["hint"]
    assert not (tmp_path / "out").exists()
    lora = {"weights": "base.safetensors", "use": "adapters.py:Net"}
    recipe = gradus.recipe("named.yaml", name="adapters", model=lora, lora={"rank": 2})
    named = gradus("checkpoint", "export", str(run), "--out", str(tmp_path / "out"), "--recipe", recipe)
    assert named.code == 0, named.err
    plain = type(model)()
    plain.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    torch.testing.assert_close(plain(torch.ones(3, 4)), said)


@pytest.mark.parametrize("how", [pytest.param("repeated", marks=pytest.mark.slow), "given"])
def test_what_plain_python_began_goes_on_from_the_command_line(gradus: Gradus, script: str, how: str) -> None:
    before = set((gradus.runs / "script").glob("*"))
    process = python(gradus, script, STEP_SECONDS="0.3")
    wait_until(lambda: set((gradus.runs / "script").glob("*")) - before)
    run = only_run(gradus, "script", before)
    wait_until(lambda: len(trained(run)) >= 3)
    process.send_signal(signal.SIGTERM)
    ended(process)
    assert status(run)["state"] == "stopped"
    step = committed(run)[-1]
    # The second way gives the script its run by an argument as well, as its users do without gradus.
    command = ["--nproc", "1", "--", script, f"runs/script/{run.name}"] if how == "given" else []
    done = gradus("train", "--resume", str(run), *command)
    assert done.code == 0, done.err
    assert "no checkpoint" not in done.err
    assert [row["step"] for row in trained(run) if row["attempt"] == 2] == list(range(step + 1, 41))
    assert [event["ranks"] for event in events(run) if event["event"] == "launch"] == [1]


def test_a_script_that_asks_for_another_run_than_the_chosen_one_is_refused(gradus: Gradus, script: str) -> None:
    done = gradus("train", "--nproc", "1", "--run-id", "chosen", "--", script, "another")
    assert done.code == 2
    assert "gradus train has chosen the run already" in done.err


def test_secrets_on_the_command_line_of_plain_python_are_not_recorded(gradus: Gradus) -> None:
    loop = SCRIPT.replace("resume=sys.argv[1] if len(sys.argv) > 1 else None", "resume=None")
    (gradus.folder / "secret.py").write_text(loop)
    before = set((gradus.runs / "script").glob("*"))
    code, _, err = ended(python(gradus, "secret.py", "--api-key", "canary-77"))
    assert code == 0, err
    run = only_run(gradus, "script", before)
    assert "canary-77" not in (run / "attempts/1/command.json").read_text()
    again = gradus("train", "--resume", str(run), "--json")
    assert (again.code, "give it again" in again.json["error"]["hint"]) == (2, True)


@pytest.mark.slow
def test_a_loop_that_was_never_saved_says_that_it_starts_again(gradus: Gradus, script: str) -> None:
    before = set((gradus.runs / "script").glob("*"))
    assert ended(python(gradus, script, RAISE_ON_RANK="0"))[0] == 1
    run = only_run(gradus, "script", before)
    code, _, err = ended(python(gradus, script, str(run), RAISE_ON_RANK="0"))
    assert (code, "no checkpoint: starts again from step 0" in err) == (1, True), err
    done = gradus("train", "--resume", str(run))
    assert done.code == 0, done.err
    assert "no checkpoint: starts again from step 0" in done.err
    assert [row["step"] for row in trained(run) if row["attempt"] == 3] == list(range(1, 41))


def test_an_own_loop_of_plain_python_is_ended_at_once(gradus: Gradus, script: str) -> None:
    before = set((gradus.runs / "script").glob("*"))
    process = python(gradus, script, STEP_SECONDS="20")
    wait_until(lambda: set((gradus.runs / "script").glob("*")) - before)
    run = only_run(gradus, "script", before)
    wait_until(lambda: status(run).get("pid") == process.pid)
    done = gradus("runs", "stop", str(run), "--now")
    assert done.code == 0, done.err
    assert ended(process)[0] == -signal.SIGKILL
    assert status(run)["state"] == "failed"
    assert "gradus runs stop --now" in status(run)["last_error"]
