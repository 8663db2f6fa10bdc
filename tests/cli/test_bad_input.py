"""Bad input, through the real command: a message that names what to change, exit code 2, and nothing on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gradus_command import RECIPE, Done, Gradus, committed, events, lines, status, trained

ONE_SCREEN = 40  # lines


def error_of(done: Done, code: int = 2) -> dict[str, Any]:
    """The error in a JSON document that is all there is on stdout."""
    assert done.code == code, done.err
    document = done.json
    assert document["exit_code"] == code
    assert {"kind", "message", "hint"} <= document["error"].keys()
    return document["error"]


@pytest.fixture
def recipe(gradus: Gradus) -> Any:
    def write(**changes: Any) -> str:
        return gradus.recipe("bad.yaml", **changes)

    return write


@pytest.fixture(scope="module")
def good(gradus: Gradus) -> Done:
    """The recipe, trained."""
    return gradus("train", gradus.recipe("good.yaml"), "--run-id", "good", "--json")


def broken_yaml(folder: Path) -> None:
    (folder / "bad.yaml").write_text("name: own\nbatch: [8\nsteps: 3\n")


def with_recipe(**changes: Any) -> Any:
    return lambda folder: Gradus(folder).recipe("bad.yaml", **changes)


BEFORE_LAUNCH: list[tuple[str, Any, list[str], dict[str, Any], list[str]]] = [
    ("broken YAML", broken_yaml, [], {"file": "bad.yaml"}, ["bad.yaml, line", "not valid YAML"]),
    (
        "a wrong type",
        with_recipe(batch="eight"),
        [],
        {"file": "bad.yaml", "field": "batch", "found": "eight", "allowed": "a whole number"},
        ["bad.yaml: batch: found 'eight' (text), allowed: a whole number"],
    ),
    (
        "an unknown key",
        with_recipe(optimizer={"lr": 1e-3, "warmpu": 3}),
        [],
        {"file": "bad.yaml", "field": "optimizer.warmpu", "nearest": "warmup"},
        ["did you mean 'warmup'?"],
    ),
    (
        "an unknown key of the model",
        with_recipe(model={"use": "gpt", "layrs": 2}, data={"use": "synthetic-tokens"}),
        [],
        {"file": "bad.yaml", "field": "model.layrs", "nearest": "layers"},
        ["bad.yaml: model.layrs", "did you mean 'layers'?"],
    ),
    (
        "an unknown key by --set",
        with_recipe(),
        ["--set", "plan.mesh.tensr=2"],
        {"file": "--set plan.mesh.tensr=2", "field": "plan.mesh.tensr", "nearest": "tensor"},
        ["did you mean 'tensor'?"],
    ),
    ("a missing recipe", lambda folder: (folder / "bad.yml").write_text(""), [], {"nearest": "bad.yml"}, ["no such"]),
    (
        "a missing model file",
        with_recipe(model={"use": "owm.py:Model"}),
        [],
        {"file": "bad.yaml", "field": "model.use"},
        ["owm.py: no such file", "own.py?"],
    ),
    (
        "a name that the model file lacks",
        with_recipe(model={"use": "own.py:Modle"}),
        [],
        {"field": "model.use", "found": "Modle", "nearest": "Model"},
        ["did you mean 'Model'?"],
    ),
    (
        "a batch that cannot be split",
        with_recipe(batch=9),
        ["--nproc", "2"],
        {"file": "bad.yaml", "field": "batch", "found": 9, "allowed": "a multiple of 2"},
        ["9 samples cannot be split evenly over 2 ranks"],
    ),
    (
        "a mesh that the model cannot be split over",
        with_recipe(plan={"mesh": {"tensor": 2}}),
        [],
        {"field": "plan.mesh.tensor", "found": 2, "allowed": 1},
        ["nothing says how the layers of Model are split"],
    ),
    (
        "a built-in dataset of length 0",
        with_recipe(model={"use": "gpt"}, data={"use": "synthetic-tokens", "samples": 0}),
        [],
        {"file": "bad.yaml", "field": "data.samples", "found": 0},
        ["data.samples: found 0"],
    ),
    ("an unknown cluster", with_recipe(), ["--cluster", "nowhere"], {"field": "--cluster"}, ["nowhere"]),
    ("no run to resume", with_recipe(), ["--resume", "nothing"], {"found": "nothing"}, ["not a run"]),
    ("a run id that is no name", with_recipe(), ["--run-id", "a/b"], {"found": "a/b"}, ["cannot name a folder"]),
    ("debug with two ranks", with_recipe(), ["--debug", "--nproc", "2"], {"field": "--nproc"}, ["--debug"]),
]


@pytest.mark.parametrize(
    ("prepare", "options", "details", "words"),
    [pytest.param(*case[1:], id=case[0]) for case in BEFORE_LAUNCH],
)
def test_bad_input_is_explained_and_changes_nothing_on_disk(tmp_path, prepare, options, details, words):
    gradus = Gradus(tmp_path)
    prepare(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    error = error_of(gradus("train", "bad.yaml", *options, "--json"))
    assert error["kind"] == "bad-input"
    assert {key: error.get(key) for key in details} == details
    for word in words:
        assert word in error["message"]
    assert sorted(tmp_path.rglob("*")) == before
    assert not gradus.runs.exists()


def test_people_get_the_same_without_a_traceback(tmp_path):
    gradus = Gradus(tmp_path)
    gradus.recipe("bad.yaml", batch="eight")
    done = gradus("train", "bad.yaml")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: bad.yaml: batch: found 'eight' (text), allowed: a whole number\n"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["train", "r.yaml", "--nprocs", "2"], "--nproc"),
        (["train", "r.yaml", "--nproc", "0"], "--nproc"),
        (["train", "r.yaml", "--nproc", "two"], "--nproc"),
        (["train"], "RECIPE"),
        (["trian"], "train"),
        (["runs", "nothing"], "nothing"),
        (["runs", "--export", "tensorboard"], "RUN"),
        (["runs", "nothing", "--export", "tensorbord"], "did you mean 'tensorboard'"),
    ],
)
def test_a_wrong_option_is_one_json_document_too(tmp_path, arguments, word):
    error = error_of(Gradus(tmp_path)(*arguments, "--json"))
    assert error["kind"] == "bad-input"
    assert word in error["message"]


def test_a_model_callable_that_raises_shows_the_users_file_line_and_message_on_one_screen(gradus, recipe):
    path = recipe(model={"use": "own.py:broken_model", "width": 3})
    done = gradus("train", path, "--run-id", "raises", "--nproc", "2")
    assert done.code == 2
    assert len(done.err.splitlines()) <= ONE_SCREEN
    line = next(n for n, text in enumerate((gradus.folder / "own.py").read_text().splitlines(), 1) if "missing" in text)
    assert f'own.py, line {line}: return nn.Linear(width, table["missing"])' in done.err
    assert "KeyError: 'missing'" in done.err
    found = status(gradus.run("raises"))
    assert found["state"] == "failed"
    assert "KeyError" in found["last_error"]


def test_a_dataset_of_length_0_is_refused(gradus, recipe):
    error = error_of(gradus("train", recipe(data={"use": "own.py:Data", "length": 0}), "--json"))
    assert (error["field"], error["found"]) == ("data.use", 0)
    assert "length 0" in error["message"]


def test_a_built_in_source_that_finds_no_samples_is_refused(gradus, recipe):
    (gradus.folder / "empty.bin").write_bytes(b"")
    model = {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16}
    path = recipe(model=model, data={"use": "tokens", "path": "empty.bin", "dtype": "uint16"})
    error = error_of(gradus("train", path, "--json"))
    assert error["field"].startswith("data.")
    assert "empty.bin" in error["message"]


def test_a_nan_stops_with_the_step_the_last_good_step_and_the_samples(gradus, recipe):
    path = recipe(data={"use": "own.py:Data", "nan_at": 17}, steps=8, checkpoint={"every": 1})
    error = error_of(gradus("train", path, "--run-id", "nan", "--nproc", "2", "--json"), code=93)
    run = gradus.run("nan")
    step = error["step"]
    assert 1 <= step <= 8
    assert error["kind"] == "do-not-restart"
    assert f"the loss is nan at step {step}; the last good step is {step - 1}" in error["message"]
    assert error["last_good_step"] == step - 1
    assert error["positions"] == [8 * (step - 1), 8 * step - 1]
    assert len(error["sample_indices"]) == 8
    assert 17 in error["sample_indices"]
    # The numbers come a step late, yet nothing of the bad step or of a later one is kept.
    assert [row["step"] for row in trained(run)] == list(range(1, step))
    assert max(committed(run), default=0) == step - 1 == (error.get("checkpoint_step") or 0)
    assert status(run)["state"] == "failed"
    assert [event["step"] for event in events(run) if event["event"] == "fault"] == [step]


def test_a_full_disk_while_logging_is_reported_and_training_goes_on(gradus, recipe):
    done = gradus("train", recipe(steps=4), "--run-id", "full", "--json")
    assert done.code == 0, done.err
    run = gradus.run("full")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    done = gradus("train", "--resume", str(run), "--set", "steps=9")
    assert done.code == 0, done.err
    assert "warning: " in done.err
    assert "metrics.jsonl: cannot write (No space left on device)" in done.err
    assert "8 records not written" in done.err  # five steps, an epoch, an evaluation, and how long saving took
    found = status(run)
    assert (found["state"], found["step"]) == ("finished", 9)
    assert committed(run)[-1] == 9
    faults = [event for event in events(run) if event["event"] == "fault"]
    assert [fault["kind"] for fault in faults] == ["write-error"]
    assert "No space left on device" in faults[0]["message"]
    shown = gradus("runs", str(run), "--json")
    assert shown.code == 0
    assert shown.json["state"] == "finished"


def test_a_run_directory_that_exists_is_refused_and_stays_as_it_was(gradus, recipe, good):
    path, run = recipe(), gradus.run("good")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    error = error_of(gradus("train", path, "--run-id", "good", "--json"))
    assert str(run) in error["message"]
    assert "--resume" in error["hint"]
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_the_recipe_of_these_tests_is_itself_good(gradus, good):
    assert good.code == 0
    assert good.json == {
        "run": str(gradus.run("good")),
        "state": "finished",
        "exit_code": 0,
        "step": RECIPE["steps"],
        "loss": trained(gradus.run("good"))[-1]["loss"],
        "reason": "6 steps done",
        "validation_loss": lines(gradus.run("good") / "metrics.jsonl")[-1]["validation_loss"],
    }
    assert "step 6/6" in good.err
