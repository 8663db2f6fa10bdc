"""`gradus checkpoint`, through the real command: what is saved, whether it is whole, weights in and out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_cases
import pytest
import torch
import yaml
from gradus_command import Done, Gradus
from safetensors.torch import load_file

from gradus.checkpoint.state import collect
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.tensor_file import read_header
from gradus.models import catalogue
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError
from gradus.schema.recipe import OptimizerBlock, Recipe
from gradus.training.building import build_model
from gradus.training.exporting import export, open_saved
from gradus.training.optimizers import build_optimizer

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 8, "vocabulary": 11}
DAMAGED = "model.embedding.token.weight"
RECIPE = {
    "name": "saved",
    "model": {"use": "gpt", **SMALL},
    "data": {"use": "synthetic-tokens"},
    "batch": 2,
    "steps": 2,
    "optimizer": {"lr": 1e-3},
}


@pytest.fixture(scope="module")
def model(gradus: Gradus) -> torch.nn.Module:
    """A run with two checkpoints, as training would have left it."""
    run = RunDirectory.create(gradus.runs, "saved", "one")
    (run.attempt_path(run.new_attempt()) / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    model = catalogue.build("gpt", SMALL)
    tensors, numbers = collect(model, build_optimizer(model, OptimizerBlock(use="sgd", lr=0.1, momentum=0.9)))
    for step in (1, 2):
        CheckpointStore(run.checkpoints).save(step, tensors, {"optimizer": numbers})
    return model


def refused(done: Done, field: str, *texts: str) -> dict[str, Any]:
    assert done.code == 2, done.err
    error: dict[str, Any] = done.json["error"]
    assert error["field"] == field
    for text in texts:
        assert text in error["message"], error
    return error


@pytest.mark.usefixtures("model")
def test_checkpoints_are_listed_and_verified(gradus: Gradus) -> None:
    listed = gradus("checkpoint", "list", "saved/one", "--json").json
    assert [(entry["step"], entry["parts"], entry["committed"]) for entry in listed] == [(1, 1, True), (2, 1, True)]
    assert all(Path(entry["path"]).is_dir() and entry["size_bytes"] > 1000 for entry in listed)
    shown = gradus("checkpoint", "list", "saved")
    assert (shown.code, len(shown.out.splitlines())) == (0, 2)
    assert "step-00000002" in shown.out
    assert "1 part " in shown.out
    verified = gradus("checkpoint", "verify", "saved")
    assert (verified.code, verified.out.count("whole")) == (0, 2)


@pytest.mark.usefixtures("model")
def test_what_is_not_committed_is_listed_as_such_and_is_no_damage(gradus: Gradus, tmp_path: Path) -> None:
    left = tmp_path / "left"
    shutil.copytree(gradus.run("one", "saved"), left)
    (left / "checkpoints" / "step-00000002" / "COMMITTED").unlink()
    listed = gradus("checkpoint", "list", str(left), "--json").json
    assert [(entry["step"], entry["committed"]) for entry in listed] == [(1, True), (2, False)]
    assert "not committed" in gradus("checkpoint", "list", str(left)).out.splitlines()[1]
    verified = gradus("checkpoint", "verify", str(left), "--json")
    assert verified.code == 0
    assert [entry["whole"] for entry in verified.json] == [True, None]
    exported = gradus("checkpoint", "export", str(left), "--out", str(tmp_path / "out"), "--json")
    assert exported.json["step"] == 1, "the newest that is a checkpoint"
    assert gradus("checkpoint", "verify", str(left / "checkpoints" / "step-00000002")).code == 1, "asked for by name"


@pytest.mark.usefixtures("model")
def test_verify_names_all_that_is_damaged_and_exits_with_1(gradus: Gradus, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(gradus.run("one", "saved"), damaged)
    first, second = (damaged / "checkpoints" / f"step-0000000{step}" for step in (1, 2))
    [part] = second.glob("part-*.safetensors")
    flip(part, read_header(part, "").tensors[DAMAGED].pieces[0].start + 7)
    (first / "MANIFEST.json").unlink()
    done = gradus("checkpoint", "verify", str(damaged), "--json")
    assert done.code == 1
    assert [entry["whole"] for entry in done.json] == [False, False]
    assert "MANIFEST.json" in done.json[0]["damage"][0]
    [found] = done.json[1]["damage"]
    assert found.startswith(part.name)
    assert DAMAGED in found
    assert "position" not in found
    shown = gradus("checkpoint", "verify", str(second))
    assert (shown.code, "DAMAGED" in shown.out, part.name in shown.out) == (1, True, True)


@pytest.mark.usefixtures("model")
def test_what_is_damaged_is_not_exported_and_leaves_nothing(gradus: Gradus, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(gradus.run("one", "saved") / "checkpoints" / "step-00000002", damaged / "step-00000002")
    [part] = damaged.glob("*/part-*.safetensors")
    flip(part, read_header(part, "").tensors[DAMAGED].pieces[0].start + 7)
    failed = gradus("checkpoint", "export", str(part.parent), "--out", str(tmp_path / "new" / "out"), "--json")
    assert failed.code == 1
    assert failed.json["error"]["kind"] == "damaged-checkpoint"
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("model")
def test_a_damaged_one_is_marked_in_the_list_and_the_whole_one_is_named(gradus: Gradus, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(gradus.run("one", "saved"), damaged)
    [part] = (damaged / "checkpoints" / "step-00000002").glob("part-*.safetensors")
    part.write_bytes(part.read_bytes()[:-1])
    lines = gradus("checkpoint", "list", str(damaged)).out.splitlines()
    assert ["DAMAGED" in line for line in lines] == [False, True]
    failed = gradus("checkpoint", "export", str(damaged), "--out", str(tmp_path / "out"), "--json")
    assert failed.code == 1
    assert "--step 1" in failed.json["error"]["hint"]
    part.unlink()
    listed = gradus("checkpoint", "list", str(damaged), "--json").json
    assert [entry["looks_damaged"] for entry in listed] == [False, True]


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 4
    file.write_bytes(data)


def test_an_exported_model_needs_nothing_but_safetensors(
    gradus: Gradus, model: torch.nn.Module, tmp_path: Path
) -> None:
    done = gradus("checkpoint", "export", "saved/one", "--out", str(tmp_path / "out"), "--step", "1", "--json")
    assert done.code == 0, done.err
    assert (done.json["step"], done.json["merged"]) == (1, False)
    found = load_file(done.json["files"][0])
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())
    again = gradus("checkpoint", "export", "saved/one", "--out", str(tmp_path / "out"), "--json")
    refused(again, "--out", "exists already")


@pytest.mark.usefixtures("model")
def test_the_hugging_face_layout_brings_its_config(gradus: Gradus, tmp_path: Path) -> None:
    checkpoint = str(gradus.run("one", "saved") / "checkpoints" / "step-00000002")
    done = gradus("checkpoint", "export", checkpoint, "--out", str(tmp_path / "hf"), "--layout", "huggingface")
    assert done.code == 0, done.err
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"model.safetensors", "config.json"}
    assert "transformer.wte.weight" in load_file(tmp_path / "hf" / "model.safetensors")


TOKENS = torch.arange(24).reshape(2, 12)
LORA = {"rank": 2, "targets": ["*_proj"]}


@pytest.mark.parametrize("case", ["folder", "configuration", "own", "lora"])
def test_a_model_of_transformers_goes_back_to_from_pretrained(gradus: Gradus, tmp_path: Path, case: str) -> None:
    """Trained from a folder, a configuration or an own function: transformers reads the very model that was saved."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    huggingface_cases.llama().save_pretrained(tmp_path / "start")
    huggingface_cases.gpt2().save_pretrained(tmp_path / "tied")
    block: dict[str, Any] = {
        "folder": {"use": "huggingface", "path": str(tmp_path / "tied")},
        "configuration": {"use": "huggingface", "task": "causal-lm"}
        | {"config": {"model_type": "llama", **huggingface_cases.SMALL}},
        "own": {"use": f"{huggingface_cases.HERE}:gpt2"},
        "lora": {"use": "huggingface", "path": str(tmp_path / "start")},
    }[case]
    document = {**RECIPE, "model": block, **({"lora": LORA} if case == "lora" else {})}
    trained = build_model(Recipe.from_document(document), torch.device("cpu"), torch.float32)
    with torch.no_grad():  # as if it had been trained
        for parameter in trained.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    run = RunDirectory.create(gradus.runs, "transformers", case)
    (run.attempt_path(run.new_attempt()) / "recipe.yaml").write_text(yaml.safe_dump(document))
    tensors, numbers = collect(trained, build_optimizer(trained, OptimizerBlock(use="sgd", lr=0.1)))
    CheckpointStore(run.checkpoints).save(2, tensors, {"optimizer": numbers})

    out = tmp_path / "out"
    if case == "lora":
        run_and_out = ("transformers/lora", "--out", str(out))
        done = gradus("checkpoint", "export", *run_and_out, "--layout", "huggingface", "--json")
        assert done.code == 0, done.err
        assert done.json["merged"]
        files = [Path(file) for file in done.json["files"]]
    else:
        files = export(open_saved(run.path), out, "huggingface")
    assert {"config.json", "model.safetensors"} <= {file.name for file in files}
    again, report = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.allclose(again.eval()(TOKENS).logits, trained.eval()(TOKENS).logits, atol=1e-6, rtol=1e-5)
    with pytest.raises(InputError, match="exists already"):
        export(open_saved(run.path), out, "huggingface")


def test_a_model_that_is_not_of_transformers_has_no_names_there(gradus: Gradus, tmp_path: Path) -> None:
    document = {**RECIPE, "model": {"use": f"{huggingface_cases.HERE}:MeanOfBert"}}
    model = huggingface_cases.MeanOfBert()
    run = RunDirectory.create(gradus.runs, "mean", "one")
    (run.attempt_path(run.new_attempt()) / "recipe.yaml").write_text(yaml.safe_dump(document))
    tensors, numbers = collect(model, build_optimizer(model, OptimizerBlock(use="sgd", lr=0.1)))
    CheckpointStore(run.checkpoints).save(2, tensors, {"optimizer": numbers})
    with pytest.raises(InputError, match="makes a MeanOfBert, which is not one of transformers"):
        export(open_saved(run.path), tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("model")
def test_what_cannot_be_exported_says_why(gradus: Gradus, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"), "--json")
    error = refused(gradus("checkpoint", "export", "saved", *out, "--layout", "hugginface"), "--layout")
    assert error["nearest"] == "huggingface"
    refused(gradus("checkpoint", "export", "saved", *out, "--step", "7"), "--step", "found 7", "1, 2")
    refused(gradus("checkpoint", "export", "saved", *out, "--adapter"), "--adapter", "no adapters")
    assert gradus("checkpoint", "export", "nowhere", *out).code == 2
    assert not (tmp_path / "out").exists()


def test_a_pickled_file_is_imported_and_checked_against_a_recipe(
    gradus: Gradus, model: torch.nn.Module, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    names = {f"module.{name}": p for name, p in model.state_dict().items()}
    torch.save({"model_state_dict": names, "epoch": 3}, tmp_path / "old.pt")
    out = tmp_path / "new" / "weights.safetensors"
    done = gradus(
        "checkpoint", "import", str(tmp_path / "old.pt"), "--out", str(out), "--recipe", str(recipe), "--json"
    )
    assert done.code == 0, done.err
    found = load_file(out)
    assert all(torch.equal(found[name], p) for name, p in model.state_dict().items())
    assert done.json["tensors"] == len(found)

    other = tmp_path / "other.yaml"
    other.write_text(yaml.safe_dump({**RECIPE, "model": {"use": "gpt", **SMALL, "width": 32}}))
    arguments = (str(tmp_path / "old.pt"), "--out", str(tmp_path / "no.safetensors"), "--json")
    refused(
        gradus("checkpoint", "import", *arguments, "--recipe", str(other)), "model.weights", "other.yaml", "(11, 32)"
    )
    assert not (tmp_path / "no.safetensors").exists()


def test_what_cannot_be_imported_says_why_and_leaves_nothing(gradus: Gradus, tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    out = tmp_path / "x.safetensors"
    arguments = ("checkpoint", "import", str(tmp_path / "model.pt"), "--json", "--out")
    refused(gradus(*arguments, str(out)), "FILE", "holds more than tensors")
    refused(gradus(*arguments, str(tmp_path / "x.pt")), "--out", "ends in .safetensors")
    assert not out.exists()
