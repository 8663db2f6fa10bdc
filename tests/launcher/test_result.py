"""A run as Python sees it: launched with `gradus.train`, opened again, looked at, and its model put to use."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gradus_command import status, trained, wait_until
from torch import nn

import gradus
from gradus.checkpoint.state import collect
from gradus.checkpoint.store import CheckpointStore
from gradus.launcher.given import recipe_given
from gradus.record.directory import RunDirectory
from gradus.schema.errors import GradusError, InputError

FILE = '''
import os, time
import torch
from torch import nn


class Net(nn.Module):
    """With batch normalisation and dropout, which are not the same in training and evaluation mode."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 1)
        )

    def forward(self, x):
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return self.layers(x)


class Points:
    def __init__(self, samples=80):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(samples, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def data(split):
    return Points(80) if split == "train" else Points(24)


def far_off(output, batch):
    return (output - batch[1]).abs().mean()
'''

RECIPE: dict[str, Any] = {
    "name": "points",
    "model": {"use": "net.py:Net", "width": 16},
    "data": {"use": "net.py:data"},
    "loss": "mse",
    "metrics": ["net.py:far_off"],
    "batch": 8,
    "steps": 6,
    "optimizer": {"use": "sgd", "lr": 0.05},
    "evaluate": {"every": 2},
    "checkpoint": {"every": 2, "keep": 2, "best": True},
    "hooks": [{"use": "ema", "decay": 0.5}],
    "plan": {"workers": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("result")
    (folder / "net.py").write_text(FILE)
    return folder


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def result(folder: Path) -> gradus.Result:
    """Two ranks, launched from a dict."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return gradus.train(RECIPE, nproc=2, quiet=True)


def loss_of(model: nn.Module) -> float:
    """The validation loss as the run computed it, now in this process."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, 4, generator=generator)
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).item()


def test_a_batch_is_what_the_model_saw(result):
    x, y = result.batch(24)
    assert nn.functional.mse_loss(result.load_model()(x), y).item() == loss_of(result.load_model())
    assert len(result.batch(80, split="train")[0]) == 80
    for call, says in (({"samples": 25}, "samples: found 25, allowed: 1 to 24"), ({"split": "test"}, "unknown split")):
        with pytest.raises(InputError, match=says):
            result.batch(**call)


def test_a_dict_is_trained_and_the_run_comes_back(result):
    assert (result.state, result.exit_code, result.step) == ("finished", 0, 6), result.error
    assert result.metrics["step"] == [1, 2, 3, 4, 5, 6]
    assert [value is not None for value in result.metrics["validation_far_off"]] == [False, True] * 3
    assert result.metrics[-1]["loss"] == result.loss
    assert result.recipe.model.options == {"width": 16}


def test_the_loaded_model_gives_the_loss_that_the_run_measured(result):
    model = result.load_model()
    assert not model.training
    assert loss_of(model) == pytest.approx(result.metrics[-1]["validation_loss"], rel=1e-5)


def test_the_model_of_an_earlier_step_and_the_best_one(result):
    by_step = {row["step"]: row["validation_loss"] for row in result.metrics if "validation_loss" in row}
    assert loss_of(result.load_model(step=4)) == pytest.approx(by_step[4], rel=1e-5)
    assert loss_of(result.load_model("best")) == pytest.approx(min(by_step.values()), rel=1e-5)
    assert by_step[4] != pytest.approx(by_step[6], rel=1e-5)


def test_the_moving_average_is_another_model_with_the_same_buffers(result):
    model, average = result.load_model(), result.load_model(weights="ema")
    assert not torch.equal(model.layers[0].weight, average.layers[0].weight)
    assert torch.equal(model.layers[1].running_mean, average.layers[1].running_mean)
    assert loss_of(average) == pytest.approx(result.metrics[-1]["validation_ema_loss"], rel=1e-5)


def test_weights_go_into_a_model_that_is_given(result):
    sys.path.insert(0, ".")
    try:
        from net import Net
    finally:
        sys.path.pop(0)
    assert loss_of(result.load_model(model=Net(16))) == loss_of(result.load_model())
    with pytest.raises(InputError, match="another model"):
        result.load_model(model=nn.Linear(4, 1))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"step": 5}, "step: found 5, which is not saved; allowed: "),
        ({"step": "bset"}, "step: found 'bset', which is not saved"),
        ({"device": "cuda:7"}, "device: found 'cuda:7', allowed here: cpu"),
        ({"device": "gpu"}, "device: found 'gpu', allowed here: cpu"),
        ({"weights": "emma"}, "unknown weights 'emma'; did you mean 'ema'?"),
    ],
)
def test_what_cannot_be_loaded_is_refused_with_what_can(result, call, says):
    with pytest.raises(InputError) as caught:
        result.load_model(**call)
    assert says in caught.value.message


def test_checkpoints_are_listed_and_verified(result, tmp_path):
    *_, last = result.checkpoints
    assert last.step == 6
    assert last.path.name == "step-00000006"
    assert last.size_bytes == sum(file.stat().st_size for file in last.path.iterdir())
    assert (last.saved_at - gradus.load_run(result.run.path).checkpoints[0].saved_at).total_seconds() >= 0
    assert repr(last).startswith("<checkpoint of step 6: ")
    last.verify()


def test_a_damaged_checkpoint_is_not_loaded(result):
    oldest = result.checkpoints[0]
    tensors = next(tensors for name, tensors in oldest.manifest["tensors"].items() if name.startswith("model."))
    file, place = oldest.path / tensors["pieces"][0]["file"], tensors["pieces"][0]["start"]
    whole = file.read_bytes()
    file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    try:
        for use in (oldest.verify, lambda: result.load_model(step=oldest.step)):
            with pytest.raises(GradusError, match=file.name):
                use()
    finally:
        file.write_bytes(whole)


def test_a_run_is_opened_again_from_anywhere(result, monkeypatch, tmp_path):
    by_name = gradus.load_run("points")
    monkeypatch.chdir(tmp_path)
    by_path = gradus.load_run(result.run.path)
    assert by_name == by_path == result
    assert by_path.metrics == result.metrics
    assert loss_of(by_path.load_model()) == loss_of(result.load_model())
    with pytest.raises(InputError, match="is not a run"):
        gradus.load_run("pionts")


def test_it_says_what_it_is(result):
    assert repr(result).startswith(f"<run points/{result.run.id}: finished at step 6, loss ")
    html = result._repr_html_()
    assert "finished" in html
    assert "validation far_off" in html
    assert str(result.run.path) in html
    assert "(best " in result.summary()
    assert str(result.run.path) in result.summary()
    assert isinstance(result.log(), str)
    with pytest.raises(InputError, match="attempt: found 3, allowed: 1"):
        result.log(attempt=3)


def test_runs_are_plotted_and_compared(result):
    [axes] = result.plot("loss", against={"again": result}, label="first").axes
    first, again = axes.get_lines()
    assert list(first.get_ydata()) == list(again.get_ydata()) == result.metrics["loss"]
    assert [line.get_label() for line in (first, again)] == ["first", "again"]
    with pytest.raises(InputError, match="two runs have the name"):
        result.plot(against=result)
    with pytest.raises(InputError, match="did you mean 'validation_far_off'"):
        result.plot("validation_faroff")


def test_a_failed_run_returns_its_error_and_its_log(folder):
    failed = gradus.train(RECIPE, overrides={"model.width": "wide"}, quiet=True, run_id="failed")
    assert (failed.state, failed.exit_code) == ("failed", 2)
    assert "net.py:Net raised TypeError" in failed.error["message"]
    assert "error: model.use" in repr(failed)
    assert "TypeError" in failed.log()
    assert "TypeError" in failed.log(rank=0)
    assert "[rank0]" not in failed.log(rank=0)
    assert failed.log(rank=1) == ""
    assert gradus.load_run("points/failed") == failed
    with pytest.raises(InputError, match="no checkpoint yet"):
        failed.load_model()


def test_a_run_whose_own_loop_made_the_model_needs_one_to_load_into(tmp_path):
    run = RunDirectory.create(tmp_path, "own-loop")
    attempt = run.attempt_path(run.new_attempt())
    (attempt / "recipe.yaml").write_text("{name: own-loop, batch: 8, steps: 1}")
    (attempt / "plan.yaml").write_text("{}")
    trained_here = nn.Linear(4, 1)
    tensors, numbers = collect(trained_here, torch.optim.SGD(trained_here.parameters()))
    CheckpointStore(run.checkpoints).save(1, tensors, numbers)
    result = gradus.load_run(run.path)
    with pytest.raises(InputError, match="own loop or script made the model") as caught:
        result.load_model()
    assert "load_model(model=" in caught.value.hint
    with pytest.raises(InputError, match="own loop or script brought the data"):
        result.batch()
    loaded = result.load_model(model=nn.Linear(4, 1))
    assert torch.equal(loaded.weight, trained_here.weight)


HUGGING_FACE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS = torch.randint(0, 64, (48, 9), generator=torch.Generator().manual_seed(1))


def model():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    ))


def data(split):
    return [{"input_ids": row, "labels": row} for row in (TOKENS[:32] if split == "train" else TOKENS[32:])]
"""


@pytest.mark.slow  # quickly: exported, in test_checkpoint.py
def test_a_hugging_face_model_with_adapters_is_loaded_whole(folder):
    (folder / "llama.py").write_text(HUGGING_FACE)
    recipe = {
        "name": "llama",
        "model": {"use": "llama.py:model"},
        "data": {"use": "llama.py:data"},
        "lora": {"rank": 2, "targets": ["*_proj"]},
        "batch": 8,
        "steps": 3,
        "optimizer": {"lr": 0.05},
        "plan": {"workers": 0},
    }
    result = gradus.train(recipe, nproc=1, quiet=True)
    assert result.state == "finished", result.error
    with torch.no_grad():
        measured = result.load_model()(**result.batch(16)).loss.item()
    assert measured == pytest.approx(result.metrics[-1]["validation_loss"], rel=1e-5)


def test_a_thread_can_train(folder):
    """Only the main thread may handle signals; elsewhere a run simply cannot be interrupted."""
    found: list[gradus.Result] = []
    recipe = {**RECIPE, "hooks": []}
    thread = threading.Thread(target=lambda: found.append(gradus.train(recipe, overrides=["steps=2"], quiet=True)))
    thread.start()
    thread.join(120)
    assert [result.state for result in found] == ["finished"]
    assert found[0].step == 2


SCRIPT = """
import json, sys, gradus
result = gradus.train(json.loads(sys.argv[1]), overrides={"steps": 100_000}, run_id=sys.argv[2])
print(result.state, result.step)
print(result.error["message"] if result.error else result.load_model().training)
"""


@pytest.fixture
def script(folder, monkeypatch):
    """A script of the user's that trains for a long time, past its tenth step."""
    import json

    monkeypatch.setenv("STEP_SECONDS", "0.05")
    started: list[subprocess.Popen[str]] = []

    def start(run_id: str) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps({**RECIPE, "hooks": []}), run_id],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        run = folder / "runs" / "points" / run_id
        wait_until(lambda: len(trained(run)) >= 10, process)
        return process, run

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()


def test_an_interrupt_is_a_stop_request_and_the_result_is_usable(script):
    process, run = script("stopped")
    running = gradus.load_run(run)
    assert (running.state, running.exit_code) == ("running", None)
    assert running.loss is not None
    assert len(running.metrics) >= 10
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out.splitlines() == [f"stopped {status(run)['step']}", "False"], err
    assert gradus.load_run(run).exit_code == 75


class InACell(nn.Module):
    pass


InACell.__module__ = "__main__"


@pytest.mark.parametrize(
    ("value", "found", "hint"),
    [
        (InACell, "the class InACell itself", "`%%writefile model.py` as the first line into the cell that defines it"),
        (InACell(), "an object of the class InACell", "a function that returns it"),
        (lambda: 1, "the function <lambda> itself", "a function that returns it"),
        (nn.Linear, "the class Linear itself", 'name it: "torch.nn.modules.linear:Linear"'),
    ],
)
def test_an_object_in_place_of_a_name_is_refused_with_what_to_write(value, found, hint, folder):
    before = sorted((folder / "runs").glob("*/*"))
    with pytest.raises(InputError) as caught:
        gradus.train({**RECIPE, "model": {"use": value}})
    assert caught.value.message.startswith(f"model.use: found {found}, allowed: a name, file.py:name")
    assert hint in caught.value.hint
    assert sorted((folder / "runs").glob("*/*")) == before
    with pytest.raises(InputError, match="metrics: found"):
        gradus.train({**RECIPE, "metrics": [value]})
    with pytest.raises(InputError, match=r"model\.use: found"):
        gradus.train(RECIPE, overrides={"model.use": value})


def test_overrides_are_texts_or_a_dict():
    texts = recipe_given(RECIPE, ["optimizer.lr=1e-3", "epochs=2"])
    values = recipe_given(RECIPE, {"optimizer.lr": 1e-3, "epochs": 2})
    assert texts == values
    assert (texts.optimizer.lr, texts.epochs, texts.steps) == (1e-3, 2, None)
    nested = recipe_given(texts, {"evaluate": {"metric": "far_off", "better": "lower"}, "data.use": "net.py:Points"})
    assert nested.evaluate.metric == "far_off"
    assert nested.optimizer.lr == 1e-3
    assert nested.model == texts.model
    assert recipe_given(texts) is texts


def test_numbers_of_numpy_and_paths_are_as_good_as_plain_ones():
    lr, steps, use = np.logspace(-3, -1, 3)[1], np.int64(4), Path("net.py")
    written = {**RECIPE, "steps": steps, "optimizer": {"lr": lr}, "data": {"use": "synthetic-images", "path": use}}
    plain = {
        **RECIPE,
        "steps": 4,
        "optimizer": {"lr": float(lr)},
        "data": {"use": "synthetic-images", "path": "net.py"},
    }
    assert recipe_given(written).to_yaml() == recipe_given(plain).to_yaml()
    overridden = recipe_given(plain, {"optimizer.lr": lr, "steps": steps, "data.path": use})
    assert overridden.to_yaml() == recipe_given(plain).to_yaml()


@pytest.mark.parametrize(
    ("given", "overrides", "says"),
    [
        (RECIPE, "optimizer.lr=1", "overrides: found the text 'optimizer.lr=1'"),
        (RECIPE, {"optimizer.lr": {1, 2}}, "overrides: optimizer.lr: found set"),
        (RECIPE, {"optimizer.warm_up": 1}, "did you mean 'warmup'"),
        (3, (), "recipe: found int, allowed: a path to a recipe.yaml, a dict, or a gradus.Recipe"),
        ("recepi.yaml", (), "recepi.yaml: no such file"),
    ],
)
def test_what_is_no_recipe_is_refused(given, overrides, says):
    with pytest.raises(InputError) as caught:
        recipe_given(given, overrides)
    assert says in caught.value.message
