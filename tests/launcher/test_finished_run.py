"""A finished run: its directory, what `gradus runs` says of it, its exports, and what it must not hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gradus_command import CANARY, Gradus, events, lines, status, trained
from safetensors.torch import load_file

from gradus.schema.cluster import Cluster
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

GPT = {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16}


@pytest.fixture(scope="module")
def run(gradus: Gradus) -> Path:
    """Two ranks, an epoch as the budget, an exporter: what most of this file looks at."""
    recipe = gradus.recipe(
        name="whole",
        model=GPT,
        data={"use": "synthetic-tokens", "samples": 100},
        steps=None,
        epochs=1,
        evaluate={"every": 4},
        exporters=["tensorboard"],
    )
    done = gradus("train", recipe, "--nproc", "2", "--run-id", "r1")
    assert done.code == 0, done.err
    # 90 samples in batches of 8. Rank 0 counted the steps; the display learned of them from the status.
    assert "step 12/12" in done.err
    for label in ("loss", "validation loss", "speed", "peak memory", "steps", "run", "try next"):
        assert label in done.out
    return gradus.run("r1", "whole")


def test_the_directory_holds_what_it_should(run):
    found = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    attempt = {f"attempts/1/{name}" for name in ("recipe.yaml", "cluster.yaml", "plan.yaml", "environment.json")}
    parts = [f"part-0000{rank}-of-00002.safetensors" for rank in (0, 1)]
    checkpoint = {f"checkpoints/step-00000012/{name}" for name in (*parts, "MANIFEST.json", "COMMITTED")}
    assert attempt | checkpoint | {"status.json", "metrics.jsonl", "control/outcome-1.json"} <= found
    assert not [name for name in found if name.endswith(".tmp")]
    assert Plan.load(run / "attempts/1/plan.yaml").mesh.replicate == 2
    assert Recipe.load(run / "attempts/1/recipe.yaml").data.options["context"] == 16
    assert Cluster.load(run / "attempts/1/cluster.yaml").cpu_cores >= 1
    assert status(run)["state"] == "finished"
    assert [event["event"] for event in events(run) if event["writer"].startswith("launcher")] == ["launch", "end"]


def test_its_checkpoint_is_listed_verified_and_exported(gradus, run, tmp_path):
    [listed] = gradus("checkpoint", "list", str(run), "--json").json
    assert (listed["step"], listed["parts"], listed["committed"]) == (12, 2, True)
    assert listed["mesh"]["replicate"] == 2
    assert [entry["whole"] for entry in gradus("checkpoint", "verify", str(run), "--json").json] == [True]
    manifest = json.loads((run / "checkpoints/step-00000012/MANIFEST.json").read_text())
    assert manifest["samples"] == 90
    assert manifest["versions"].keys() == {"gradus", "torch", "python"}
    exported = gradus("checkpoint", "export", str(run), "--out", str(tmp_path / "out"), "--json")
    assert exported.code == 0, exported.err
    names = {name.removeprefix("model.") for name in manifest["tensors"] if name.startswith("model.")}
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


def test_metrics_have_the_documented_keys(run):
    rows = trained(run)
    assert [row["step"] for row in rows] == list(range(1, 13))
    keys = "step attempt samples tokens loss lr grad_norm step_seconds data_seconds samples_per_second"
    assert set(f"{keys} tokens_per_second memory_peak_bytes mfu".split()) <= rows[0].keys()
    assert [row["samples"] for row in rows][-2:] == [88, 90]
    assert rows[-1]["tokens"] == 90 * 16
    evaluated = [row for row in lines(run / "metrics.jsonl") if "validation_loss" in row]
    assert [row["step"] for row in evaluated] == [4, 8, 12]


def test_the_environment_is_recorded_without_its_secrets(run):
    environment = json.loads((run / "attempts/1/environment.json").read_text())
    assert environment["packages"]["torch"]
    assert environment["python"]
    for path in run.rglob("*"):
        if path.is_file():
            assert CANARY.encode() not in path.read_bytes(), path


def test_runs_lists_and_shows_it(gradus, run):
    listed = gradus("runs", "--json")
    assert (listed.code, listed.err) == (0, "")
    (entry,) = listed.json
    assert (entry["run"], entry["state"], entry["step"], entry["steps_total"]) == (str(run), "finished", 12, 12)
    for way in ("r1", "whole", "whole/r1", str(run)):
        shown = gradus("runs", way, "--json")
        assert shown.code == 0
        assert shown.json["run"] == str(run)
    assert [row["step"] for row in shown.json["metrics"]] == list(range(1, 13))
    assert shown.json["events"][0]["event"] == "launch"
    for text in (gradus("runs").out, gradus("runs", "r1").out):
        assert "finished" in text
        assert "whole/r1" in text


def scalars(folder: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return {point.step: point.value for point in board.Scalars(tag)}


def test_tensorboard_reads_what_the_exporter_wrote_while_training(run):
    expected = {row["step"]: pytest.approx(row["loss"], rel=1e-6) for row in trained(run)}
    assert scalars(run / "tensorboard", "train/loss") == expected
    assert set(scalars(run / "tensorboard", "validation/loss")) == {4, 8, 12}


def test_tensorboard_reads_an_export_made_afterwards(gradus, run):
    before = scalars(run / "tensorboard", "train/loss")
    for path in (run / "tensorboard").iterdir():
        path.unlink()
    done = gradus("runs", "r1", "--export", "tensorboard", "--json")
    assert done.code == 0
    assert scalars(Path(done.json["folder"]), "train/loss") == before


def test_resuming_a_finished_run_with_a_larger_budget_goes_on(gradus):
    recipe = gradus.recipe(name="whole", steps=3, exporters=["tensorboard"])
    assert gradus("train", recipe, "--nproc", "2", "--run-id", "r2").code == 0
    done = gradus("train", "--resume", "r2", "--nproc", "2", "--set", "steps=5", "--json")
    assert done.code == 0, done.err
    run = gradus.run("r2", "whole")
    rows = trained(run)
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)]
    assert rows[-1]["samples"] == 40
    [goes_on] = [event["message"] for event in events(run) if event["event"] == "resume"]
    assert goes_on == "goes on from step 3 with steps=5 (was 3)"
    # The exporter tells of both attempts.
    assert set(scalars(run / "tensorboard", "train/loss")) == set(range(1, 6))


def test_a_run_that_ended_with_a_short_batch_does_not_go_on(gradus, run):
    done = gradus("train", "--resume", "r1", "--nproc", "2", "--set", "epochs=1.5", "--json")
    assert done.code == 2
    assert "90 samples with a short batch" in done.json["error"]["message"]
    assert len(trained(run)) == 12
