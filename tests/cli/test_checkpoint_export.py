"""What is exported comes from the parts of several ranks, in as many files as it needs, and needs nothing of gradus."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from gradus_command import Gradus
from safetensors.torch import load_file
from saved_parts import save_in_parts

from gradus.checkpoint.state import collect
from gradus.checkpoint.weights import open_weights
from gradus.models import catalogue
from gradus.record.directory import RunDirectory
from gradus.schema.recipe import OptimizerBlock
from gradus.training.export_shards import sharded
from gradus.training.exporting import export, open_saved
from gradus.training.optimizers import build_optimizer

SMALL = {
    "gpt": {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 11},
    "bert": {"layers": 2, "width": 16, "heads": 2, "context": 8, "vocabulary": 11},
}

# A reader that has neither gradus nor torch: it fails at once if something tries to import them.
READER = """
import json, sys
for name in ("gradus", "torch", "transformers"):
    sys.modules[name] = None
from safetensors.numpy import load_file
folder = sys.argv[1]
with open(folder + "/model.safetensors.index.json") as stream:
    index = json.load(stream)
files = {file: load_file(folder + "/" + file) for file in sorted(set(index["weight_map"].values()))}
tensors = {name: files[file][name] for name, file in index["weight_map"].items()}
assert sum(len(file) for file in files.values()) == len(tensors)
total = sum(tensor.nbytes for tensor in tensors.values())
print(json.dumps({"total": total, "says": index["metadata"]["total_size"], "files": len(files),
                  "sums": {name: float(tensor.astype("float64").sum()) for name, tensor in tensors.items()}}))
"""


def trained(gradus: Gradus, use: str, ranks: int) -> tuple[RunDirectory, torch.nn.Module]:
    run = RunDirectory.create(gradus.runs, f"export-{use}-{ranks}", "one")
    recipe = {
        "name": run.name,
        "model": {"use": use, **SMALL[use]},
        "data": {"use": "synthetic-tokens"},
        "batch": 2,
        "steps": 2,
        "optimizer": {"lr": 1e-3},
    }
    (run.attempt_path(run.new_attempt()) / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    torch.manual_seed(3)
    model = catalogue.build(use, SMALL[use])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    tensors, numbers = collect(model, build_optimizer(model, OptimizerBlock(use="sgd", lr=0.1)))
    save_in_parts(run.checkpoints, 2, tensors, ranks, {"state": {"optimizer": numbers}})
    return run, model


def test_several_files_are_read_with_nothing_but_safetensors(gradus: Gradus, tmp_path: Path) -> None:
    run, model = trained(gradus, "gpt", 3)
    out = tmp_path / "out"
    assert [file.name for file in export(open_saved(run.path), out)] == ["model.safetensors"], "small enough for one"
    sharded_out = tmp_path / "sharded"
    files = export(open_saved(run.path), sharded_out, shard_bytes=4000)
    assert files[0].name == f"model-00001-of-{len(files) - 1:05d}.safetensors"
    reader = subprocess.run(
        [sys.executable, "-c", READER, str(sharded_out)], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert reader.returncode == 0, reader.stderr
    found = json.loads(reader.stdout)
    assert found["files"] == len(files) - 1 > 2
    assert found["total"] == found["says"] == sum(p.numel() * 4 for p in model.parameters())
    for name, parameter in model.named_parameters():
        assert found["sums"][name] == pytest.approx(parameter.double().sum().item(), rel=1e-12), name
    again = open_weights(sharded_out).tensors
    assert again.keys() == dict(model.named_parameters()).keys(), "gradus reads it too"
    whole = load_file(out / "model.safetensors")
    parts = {name: tensor for file in files[:-1] for name, tensor in load_file(file).items()}
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert whole.keys() == parts.keys()


@pytest.mark.parametrize("use", ["gpt", "bert"])
def test_transformers_computes_the_same_from_several_files(gradus: Gradus, tmp_path: Path, use: str) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    run, model = trained(gradus, use, 2)
    files = export(open_saved(run.path), tmp_path / "out", "huggingface", shard_bytes=3000)
    assert {"config.json", "model.safetensors.index.json"} < {file.name for file in files}
    kind = AutoModelForCausalLM if use == "gpt" else AutoModelForMaskedLM
    theirs, report = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(16).reshape(2, 8) % 11
    assert sum(p.numel() for p in theirs.parameters()) == sum(p.numel() for p in model.parameters())
    ours = model.eval()(tokens)
    assert torch.allclose(theirs.eval()(tokens).logits, ours.logits if hasattr(ours, "logits") else ours, atol=1e-4)


def test_a_failure_leaves_nothing(gradus: Gradus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = trained(gradus, "gpt", 4)
    saved = open_saved(run.path)
    (run.checkpoints / "step-00000002" / "part-00003-of-00004.safetensors").unlink()
    with pytest.raises(Exception, match="part-00003"):
        export(saved, tmp_path / "some" / "where", shard_bytes=2000)
    assert not (tmp_path / "some").exists()


def test_a_model_is_divided_between_tensors_in_their_order() -> None:
    from gradus.checkpoint.writing import Writable

    tensors = {name: Writable("F32", (count,), torch.zeros) for name, count in (("a", 2), ("b", 2), ("c", 9), ("d", 1))}
    files = sharded(tensors, 16)
    assert [list(content) for content in files.values() if isinstance(content, dict)] == [["a", "b"], ["c"], ["d"]]
    assert list(files) == [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), "model.safetensors.index.json"]
    index = json.loads(str(files["model.safetensors.index.json"]))
    assert (index["metadata"]["total_size"], index["weight_map"]["c"]) == (56, "model-00002-of-00003.safetensors")
    assert list(sharded(tensors, 56)) == ["model.safetensors"]
