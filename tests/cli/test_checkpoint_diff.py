"""`gradus checkpoint diff`, through the real command: in what two checkpoints differ, and what it exits with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradus_command import Gradus
from saved_parts import save_in_parts
from torch import Tensor

from gradus.cli.checkpoint import diff_command
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError

MESH = {"replicate": 2, "pipeline": 1, "shard": 1, "context": 1, "tensor": 1, "expert": 1}


def tensors(change: float = 0.0) -> dict[str, Tensor]:
    weight = torch.arange(12.0).view(4, 3)
    weight[1, 1] += change
    return {"model.weight": weight, "model.bias": torch.ones(2)}


def document(step: int, **more: Any) -> dict[str, Any]:
    return {"samples": 10 * step, "recipe_hash": "aa", "mesh": MESH, "state": {"seed": 1}, **more}


@pytest.fixture(scope="module")
def two_runs(gradus: Gradus) -> None:
    """`first` has steps 10 and 20; `second` its step 20 on another mesh, in other parts and with other numbers."""
    for name in ("first", "second"):
        run = RunDirectory.create(gradus.runs, name, "one")
        run.new_attempt()
        rows = [{"step": step, "attempt": 1, "loss": 1.0, "lr": 0.1 / step} for step in (1, 10, 20)]
        run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = (gradus.runs / name / "one" / "checkpoints" for name in ("first", "second"))
    save_in_parts(first, 10, tensors(), 2, document(10))
    save_in_parts(first, 20, tensors(0.25), 2, document(20))
    save_in_parts(second, 20, tensors(-1.0), 3, document(20, recipe_hash="bb"))


@pytest.mark.usefixtures("two_runs")
def test_two_steps_of_a_run_differ_in_numbers_and_state(gradus: Gradus) -> None:
    done = gradus("checkpoint", "diff", "first", "--steps", "10", "20", "--json")
    assert done.code == 1, done.err
    assert not done.json["same"]
    [weight] = done.json["numbers"]
    assert (weight["name"], weight["largest"], weight["different"]) == ("model.weight", 0.25, 1)
    state = {entry["name"]: (entry["first"], entry["second"]) for entry in done.json["state"]}
    assert state == {"step": (10, 20), "samples": (100, 200), "lr": (0.01, 0.005)}
    assert done.json["equal"] == 1


@pytest.mark.usefixtures("two_runs")
def test_two_runs_are_compared_by_their_newest(gradus: Gradus, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff_command("first", "second", None, str(gradus.runs), False) == 1
    shown = capsys.readouterr().out
    for words in (
        "1 tensor equal",
        "recipe_hash: aa in a, bb in b",
        "other numbers, model: 1",
        "model.weight  |a-b| 1.25 ",
        "1 of 12 differ",
    ):
        assert words in shown, shown


def test_a_checkpoint_is_equal_to_itself_on_another_number_of_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [save_in_parts(tmp_path / str(n), 10, tensors(), n, document(10)) for n in (1, 4)]
    assert diff_command(str(paths[0]), str(paths[1]), None, "runs", False) == 0
    assert capsys.readouterr().out.endswith("2 tensors equal\n")


@pytest.mark.usefixtures("two_runs")
def test_what_cannot_be_compared_says_why(gradus: Gradus) -> None:
    done = gradus("checkpoint", "diff", "first", "second", "--steps", "10", "30", "--json")
    assert done.code == 2
    assert (done.json["error"]["kind"], done.json["error"]["allowed"]) == ("bad-input", [20])
    with pytest.raises(InputError, match="nothing to be compared with"):
        diff_command("first", None, None, str(gradus.runs), False)
    with pytest.raises(InputError, match="'nowhere' is not a run"):
        diff_command("first", "nowhere", None, str(gradus.runs), False)


@pytest.mark.usefixtures("two_runs")
def test_the_mesh_and_the_parts_are_listed(gradus: Gradus) -> None:
    listed = gradus("checkpoint", "list", "second", "--json").json
    assert [(entry["parts"], entry["mesh"]) for entry in listed] == [(3, MESH)]
    shown = gradus("checkpoint", "list", "second").out
    assert "3 parts" in shown
    assert "replicate 2" in shown


@pytest.mark.slow
def test_the_same_recipe_on_another_mesh_differs_by_rounding_only(gradus: Gradus) -> None:
    """Real runs: one rank; two with slices of tensors. In 64 bits."""
    model = {"use": "gpt", "layers": 2, "width": 16, "heads": 2, "context": 16}
    for name, mesh in {"alone": {}, "slices": {"tensor": 2}}.items():
        plan = {"precision": "fp64", "mesh": mesh}
        recipe = gradus.recipe(
            name=name, model=model, data={"use": "synthetic-tokens"}, steps=3, plan=plan, deterministic=True
        )
        done = gradus("train", recipe, "--nproc", "1" if name == "alone" else "2", "--run-id", "r1")
        assert done.code == 0, done.err
    found = gradus("checkpoint", "diff", "alone", "slices", "--json").json
    assert found["only_first"] == found["only_second"] == found["kinds"] == []
    assert all(entry["relative"] < 1e-9 for entry in found["numbers"]), found["numbers"][:3]
    state = {entry["name"]: (entry["first"], entry["second"]) for entry in found["state"]}
    assert {"plan_hash", "mesh.tensor"} <= state.keys()
    assert not {"step", "samples", "seed", "versions.torch"} & state.keys()
