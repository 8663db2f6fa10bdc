"""A step that is launched as graphs does what it would do without them."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import MODELS

from gradus.hardware.cluster import detect_cluster
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.graphed_step import GraphedStep
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.own_loop import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PLAIN = {"compile": False, "narrow_weights": False, "loss_chunks": 1}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"plan": {"precision": "fp32"}},
    "bf16": {"plan": {"precision": "bf16"}},
    "compiled": {"plan": {"precision": "bf16", "compile": True}},
    "compiled, recomputed": {"plan": {"precision": "bf16", "compile": True, "recompute": "selective"}},
    "narrow weights": {"plan": {"precision": "bf16", "narrow_weights": True}},
    "narrow weights, chunks": {"plan": {"precision": "bf16", "narrow_weights": True, "loss_chunks": 3}},
    "sgd": {
        "plan": {"precision": "bf16", "narrow_weights": True},
        "optimizer": {"use": "sgd", "lr": 0.05, "momentum": 0.9, "warmup": 8},
    },
    "dropout": {"plan": {"precision": "bf16"}, "model": {**MODELS["gpt"]["model"], "dropout": 0.2}},
    "evaluated, saved": {"plan": {"precision": "bf16", "checkpoint_every": 7}, "evaluate": {"every": 6, "batches": 2}},
    "groups": {
        "plan": {"precision": "bf16", "narrow_weights": True},
        "optimizer": {
            **MODELS["gpt"]["optimizer"],
            "groups": [{"match": ["embedding.*"], "lr_factor": 0.1, "weight_decay": 0.0}],
        },
    },
}


def losses(folder: Path, case: str, graph: bool, **changes: Any) -> tuple[list[float], LiveRun]:
    plan = {**PLAIN, **changes.pop("plan", {}), "cuda_graph": graph}
    document = {"name": "graphs", "batch": 12, "steps": 20, "seed": 7, "log_every": 1, "evaluate": {}, **MODELS[case]}
    recipe = resolved(Recipe.from_document({**document, **changes, "plan": plan, "deterministic": False}))
    run = RunDirectory.create(folder, "graphed" if graph else "plain")
    live = LiveRun.from_recipe(
        recipe, default_plan(recipe, detect_cluster(), 1).plan, run, 1, alone(torch.device("cuda", 0))
    )
    # Which algorithm is the quickest, and the order of its sums, may be another each time.
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = False, True
    ending = train(live)
    live.recorder.close(state=ending.state)
    assert ending.state == "finished"
    return [row["loss"] for row in read_metrics(run) if row.get("loss") is not None], live


def recorded(live: LiveRun) -> bool:
    return isinstance(live.step, GraphedStep) and live.step.is_recorded


@pytest.mark.parametrize("name", CASES)
def test_losses_of_a_gpt_are_those_without_graphs(name, tmp_path):
    plain, _ = losses(tmp_path, "gpt", False, **CASES[name])
    graphed, live = losses(tmp_path, "gpt", True, **CASES[name])
    assert recorded(live)
    assert len(plain) == 20
    # Sums of gradients of an embedding come in any order.
    assert graphed == pytest.approx(plain, rel=2e-3)


@pytest.mark.parametrize("case", ["simple-cnn", "resnet18"])
def test_statistics_of_batch_norms_go_on(case, tmp_path):
    changes: dict[str, Any] = {"plan": {"precision": "fp32"}}
    plain, before = losses(tmp_path, case, False, **changes)
    graphed, live = losses(tmp_path, case, True, **changes)
    assert recorded(live)
    assert graphed[:6] == pytest.approx(plain[:6], rel=1e-3)
    for (name, found), (_, expected) in zip(live.model.named_buffers(), before.model.named_buffers(), strict=True):
        if "num_batches" in name:
            assert torch.equal(found, expected), name
        else:
            assert torch.allclose(found, expected, rtol=0.05, atol=0.02), name


def test_a_short_last_batch_is_computed_without_a_graph(tmp_path):
    changes = {"steps": None, "epochs": 1.0, "plan": {"precision": "fp32"}}
    changes["data"] = {"use": "synthetic-images", "size": 32, "samples": 118}
    plain, _ = losses(tmp_path, "simple-cnn", False, **changes)
    graphed, live = losses(tmp_path, "simple-cnn", True, **changes)
    assert recorded(live)
    assert len(graphed) == 9  # of 106 samples: a tenth is for evaluation
    assert graphed == pytest.approx(plain, rel=2e-2)  # the last of which is that batch's


def test_a_run_that_goes_on_after_a_stop_is_the_run_that_never_stopped(tmp_path):
    changes: dict[str, Any] = {"plan": {"precision": "bf16", "narrow_weights": True, "checkpoint_every": 10}}
    whole, live = losses(tmp_path, "gpt", True, **changes)
    recipe, plan = live.recipe, live.plan
    for checkpoint in live.store.steps():
        if checkpoint > 10:
            shutil.rmtree(live.store.path(checkpoint))
    resumed = LiveRun.from_recipe(recipe, plan, live.run, 2, alone(torch.device("cuda", 0)))
    assert resumed.state.step == 10
    train(resumed)
    resumed.recorder.close(state="finished")
    assert recorded(resumed)
    rows = [row for row in read_metrics(live.run) if row.get("loss") is not None]
    assert [row["loss"] for row in rows] == pytest.approx(whole, rel=2e-3)


class Waits(nn.Module):
    """Looks at a number on the host, which no graph can do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(8, 1), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(self.dropout(x))
        return y * (2.0 if float(y.sum()) > 0 else 1.0)


class Points(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return x, x.sum(0, keepdim=True)


def own(folder: Path, monkeypatch: pytest.MonkeyPatch, model: nn.Module, *, graph: bool) -> tuple[list[float], LiveRun]:
    monkeypatch.chdir(folder)
    recipe = {"name": f"own-{graph}", "batch": 8, "steps": 30, "seed": 1, "log_every": 1}
    recipe["optimizer"] = {"use": "adamw", "lr": 0.05, "decay": "cosine"}
    run = Run.start({**recipe, "plan": {"cuda_graph": graph, "compile": False, "precision": "fp32"}})
    model, _ = run.prepare(model)
    gc.collect()  # what other tests have left must not be freed in between
    held = []
    for _ in run.batches(Points()):
        run.step(lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]))
        held.append(torch.cuda.memory_allocated())
    live = run._live
    assert max(held[10:]) == held[10], "batches are freed, whether or not a recording came to its end"
    run.finish()
    return [row["loss"] for row in read_metrics(live.run) if row.get("loss") is not None], live


def test_an_own_loop_that_hands_over_its_loss_is_recorded(tmp_path, monkeypatch):
    torch.manual_seed(0)
    weights = nn.Linear(8, 1).state_dict()
    found = {}
    for graph in (False, True):
        model = nn.Linear(8, 1)
        model.load_state_dict(weights)
        found[graph], live = own(tmp_path, monkeypatch, model, graph=graph)
        assert recorded(live) is graph
    assert found[True] == pytest.approx(found[False], rel=1e-4)
    assert found[True][-1] < 0.5 * found[True][0]


def test_a_script_with_an_optimizer_of_its_own_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = {"name": "own", "batch": 8, "steps": 3, "optimizer": {"use": "adamw", "lr": 0.1}}
    run, model = Run.start({**recipe, "plan": {"cuda_graph": True}}), nn.Linear(8, 1)
    with pytest.raises(InputError, match="an optimizer of its own"):
        run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def test_what_cannot_be_recorded_is_told_and_trained_as_ever(tmp_path, monkeypatch):
    torch.manual_seed(0)
    found, live = own(tmp_path, monkeypatch, Waits(), graph=True)
    assert not recorded(live)
    assert len(found) == 30
    assert found[-1] < found[0]
