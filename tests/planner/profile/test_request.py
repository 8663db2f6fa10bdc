"""A trace is made once, and where torch must not be loaded, by another process, with the same answer and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from planner_cases import recipe, site

from gradus.planner.profile import request
from gradus.planner.profile.request import ProfileRequest, profile_for, profiles_for, request_for
from gradus.schema.errors import GradusError, InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

MODELS = """
import urllib.request

import torch
from torch import nn


def shy():
    raise ValueError("not today")


def online():
    urllib.request.urlopen("http://127.0.0.1:9/weights")


def loud():
    print("hello from the model")
    return nn.Linear(4, 1)


def data(split):
    return [(torch.zeros(4), torch.zeros(1))] * 8
"""


def own(folder: Path, name: str) -> Recipe:
    (folder / "own.py").write_text(MODELS)
    document = {
        "name": "own",
        "model": {"use": f"own.py:{name}"},
        "data": {"use": "own.py:data"},
        "loss": "mse",
        "batch": 8,
        "steps": 1,
        "optimizer": {"lr": 0.1},
    }
    return Recipe.from_document(document, str(folder / "recipe.yaml"), folder=folder)


def test_sharded_parameters_are_traced_in_16_bits_and_others_are_not() -> None:
    shards, replicas = Plan(mesh=Mesh(shard=2), zero=1, precision="bf16"), Plan(precision="bf16")
    assert request_for(shards, site()).narrow_parameters
    assert not request_for(replicas, site()).narrow_parameters
    assert not request_for(shards.model_copy(update={"precision": "fp32"}), site()).narrow_parameters
    assert request_for(replicas, site()).capability == (9, 0)


def test_the_same_trace_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(request, "traced_here", lambda recipe, wanted: made.append(wanted) or wanted)
    asked = [ProfileRequest("bf16", capability=(6, 1)), ProfileRequest("fp32", capability=(6, 1))]
    assert profiles_for(recipe(), [*asked, asked[0]]) == [*asked, asked[0]]
    assert profiles_for(recipe(batch=32), asked) == asked, "the batch changes nothing"
    assert made == asked
    profile_for(recipe(model={"layers": 2}), asked[0])
    assert len(made) == 3
    monkeypatch.setattr(request, "_known", {})


def test_another_process_gives_the_same_trace_whatever_the_model_prints(tmp_path: Path) -> None:
    wanted = ProfileRequest("bf16", True, (8, 0))
    loud = own(tmp_path, "loud")
    [elsewhere] = request._traced_elsewhere(loud, [wanted])
    assert elsewhere == request.traced_here(loud, wanted)


@pytest.mark.parametrize(("name", "words"), [("shy", "raised ValueError: not today"), ("online", "raised URLError")])
def test_what_is_wrong_with_a_model_is_bad_input_in_either_process(tmp_path: Path, name: str, words: str) -> None:
    found = []
    for trace in (lambda r, w: request._traced_elsewhere(r, [w]), request.traced_here):
        with pytest.raises(InputError, match=words) as caught:
            trace(own(tmp_path, name), ProfileRequest("fp32"))
        found.append({**caught.value.document(), "traceback": None})
    assert found[0] == found[1]
    assert (found[0]["field"], found[0]["file"]) == ("model.use", str(tmp_path / "recipe.yaml"))


def test_a_process_that_dies_is_told_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "_CHILD", "gradus.planner.profile.nowhere")
    with pytest.raises(GradusError, match="ended with exit code 1") as caught:
        request._traced_elsewhere(recipe(), [ProfileRequest("fp32")])
    assert "No module named" in caught.value.details["traceback"]


PLANNING = """
import sys
import gradus
from gradus.schema.cluster import Cluster, GpuNumbers
site = Cluster(name="s", gpus_per_node=2, gpu=GpuNumbers(name="H200", memory_gib=140), cpu_cores=8, memory_gib=64)
recipe = {"name": "t", "model": {"use": "gpt"}, "data": {"use": "synthetic-tokens"}, "batch": 8, "steps": 1}
choices = gradus.plan(gradus.Recipe.from_document({**recipe, "optimizer": {"lr": 0.1}}), site, gpus=2)
assert choices[0].prediction is not None
assert "torch" not in sys.modules
"""


def test_planning_does_not_load_torch_where_it_was_not() -> None:
    done = subprocess.run([sys.executable, "-c", PLANNING], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
