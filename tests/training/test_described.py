"""Described: a model of the user's own gets its values in parts, and says so where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import own_recipe
from pool import Pool
from safetensors.torch import save_file
from state_cases import described_and_filled, own_loop

from gradus.record.directory import RunDirectory
from gradus.schema.recipe import Recipe
from gradus.training.building import build_model

MODELS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, 7)
        self.second = nn.Linear(7, width, bias=False)
        self.third = nn.Linear(7, width, bias=False)
        self.third.weight = self.second.weight
        self.register_buffer("counted", torch.arange(5))
        self.register_buffer("table", torch.linspace(0, 1, 4), persistent=False)


class Plain(Net):
    def __init__(self):
        super().__init__()
        self.angles = torch.linspace(0, 1, 3)  # neither a parameter nor a buffer


def looking(width=6):
    model = Net(width)
    if model.first.weight.abs().max().item() > 100:
        raise ValueError("too large")
    return model


def saved_only(width=6):
    return nn.Sequential(nn.Linear(width, 7), nn.BatchNorm1d(7))
"""


def document(use: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "model": {"use": f"models.py:{use}", **changes.pop("model", {})},
        "data": {"use": "synthetic-tokens"},
        "batch": 2,
        "steps": 1,
        "optimizer": {"lr": 0.1},
        **changes,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    return tmp_path


def alone(folder: Path, of: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = build_model(Recipe.from_document(of, folder=folder), torch.device("cpu"), torch.float32)
    return {name: t.detach() for name, t in (*model.named_parameters(), *model.named_buffers())}


def filled(pool: Pool, folder: Path, of: dict[str, Any]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = pool.run(2, described_and_filled, of, str(folder), {"shard": 2})
    expected = alone(folder, of)
    for result in results:
        assert result["values"].keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(result["values"][name], value), name
    return results


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}, {"freeze": ["first.*"]}])
def test_rank_0_builds_a_users_model_and_the_others_get_their_part(
    pool: Pool, folder: Path, changes: dict[str, Any]
) -> None:
    first, second = filled(pool, folder, document("Net", **changes))
    assert (first["shapes_only"], second["shapes_only"]) == (True, True)
    assert first["kept"] > 0
    assert second["kept"] == 0, "only rank 0 ever holds the model"


@pytest.mark.parametrize(
    ("use", "reason"),
    [("looking", "it cannot be built on the meta device"), ("Plain", "angles is a tensor, but neither a parameter")],
)
def test_a_model_that_needs_memory_to_be_built_gets_it_and_says_so(
    pool: Pool, folder: Path, use: str, reason: str
) -> None:
    for result in filled(pool, folder, document(use)):
        assert result["shapes_only"], "it is given back before the model is divided"
        assert reason in result["note"]


def test_weights_in_a_file_are_read_by_each_rank_and_nobody_builds_the_model(pool: Pool, folder: Path) -> None:
    of = document("saved_only")
    weights = {name: tensor + 1 for name, tensor in alone(folder, of).items()}
    save_file(weights, folder / "weights.safetensors")
    of["model"]["weights"] = str(folder / "weights.safetensors")
    results = filled(pool, folder, of)
    assert torch.equal(results[1]["values"]["0.weight"], weights["0.weight"])
    assert [result["kept"] for result in results] == [0, 0]


def test_a_loop_of_ones_own_is_divided_too_and_goes_on_undivided(pool: Pool, tmp_path: Path) -> None:
    """Each rank brings the whole model, with weights of its own: all train rank 0's."""
    divided = {"precision": "fp64", "mesh": {"shard": 2}, "zero": 3}

    def trained(run: RunDirectory, attempt: int, ranks: int, steps: int) -> dict[str, torch.Tensor]:
        recipe = own_recipe(steps=steps, plan=divided if ranks > 1 else {"precision": "fp64"})
        results: list[dict[str, torch.Tensor]] = pool.run(ranks, own_loop, str(run.path), recipe, attempt)
        return results[0]

    one, two = (RunDirectory.create(tmp_path, name) for name in ("one", "two"))
    expected = trained(one, 1, 1, 6)
    trained(two, 1, 2, 4)
    found = trained(two, 2, 1, 6)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-12)
