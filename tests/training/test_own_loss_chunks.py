"""An own loop with a reference model gets its loss in parts by the planner's rule, when the model is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import own_recipe, started
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.parallel.world import alone
from gradus.planner.choice import levers
from gradus.planner.defaults import Choice
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.errors import InputError
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import LoraBlock
from gradus.training import own_loop
from gradus.training.chunked_loss import ChunkedLoss
from gradus.training.lora import with_lora
from gradus.training.loss_placement import chunk_loss, with_loss_chunks
from gradus.training.own_loop import Run

H200 = (9, 0)
CHOICE = Choice(Plan(precision="bf16", micro_batch=32), {"micro_batch": "all at once"})
SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 16, "vocabulary": 32}


def without_memory(name: str = "gpt", **changes: Any) -> nn.Module:
    """4 GiB of logits for 32 samples."""
    with torch.device("meta"):
        return catalogue.build(name, {**SMALL, "context": 1024, "vocabulary": 65536, **changes})


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.more = without_memory(), nn.Linear(2, 2)


def chosen(
    model: nn.Module,
    capability: tuple[int, int] | None = H200,
    fixed: dict[str, Any] | None = None,
    **plan: Any,
) -> Choice:
    choice = Choice(CHOICE.plan.model_copy(update=plan), CHOICE.reasons)
    return with_loss_chunks(choice, own_recipe(plan=fixed or {}), model, capability)


@pytest.mark.parametrize("model", [without_memory(), without_memory("bert"), Wrapping()], ids=["gpt", "bert", "inside"])
def test_large_logits_of_a_reference_model_are_computed_in_parts(model):
    found = chosen(model)
    assert found.plan.loss_chunks == 4
    assert found.reasons["loss_chunks"] == "all logits at once would take 4.0 GiB, and go through memory four times"
    assert found.reasons["micro_batch"] == "all at once"
    assert chosen(model, mesh=Mesh(replicate=2)).plan.loss_chunks == 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"capability": None}, "compute capability 8.0"),
        ({"capability": (7, 5)}, "compute capability 8.0"),
        ({"micro_batch": 8}, "no more than 1.0 GiB"),
        ({"precision": "fp32"}, None),
        ({"mesh": Mesh(tensor=2)}, None),
        ({"mesh": Mesh(context=2)}, None),
        ({"fixed": {"loss_chunks": 1}}, None),
    ],
    ids=str,
)
def test_elsewhere_the_loss_stays_whole(options, why):
    found = chosen(without_memory(), **options)
    assert found.plan.loss_chunks == 1
    assert why in found.reasons["loss_chunks"] if why else "loss_chunks" not in found.reasons


def test_models_whose_loss_is_not_seen_are_left_alone():
    adapted = with_lora(without_memory(tied=False), LoraBlock(rank=2, targets=["head.output"]), 1)
    for model in (nn.Linear(4, 65536), adapted):
        assert chosen(model).plan.loss_chunks == 1


class Sequences(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        drawn = torch.randint(0, 32, (17,), generator=torch.Generator().manual_seed(number))
        return {"tokens": drawn[:-1], "targets": drawn[1:]}


def looped(folder: Path, **plan: Any) -> tuple[Run, list[float]]:
    directory = RunDirectory.create(folder, "own")
    directory.attempt_path(1).mkdir(parents=True, exist_ok=True)
    run = started(alone(torch.device("cpu")), str(directory.path), own_recipe(steps=4, plan=plan))
    model = catalogue.build("gpt", SMALL)
    model, _ = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for batch in run.batches(Sequences()):
        loss_sum, count, _ = model(**batch)
        run.step((loss_sum, count))
    run.finish()
    return run, [row["loss"] for row in read_metrics(directory)]


def test_a_loop_that_says_nothing_trains_in_parts_and_its_record_says_why(tmp_path, monkeypatch):
    """On a CPU that stands for a GPU, with small parts."""
    monkeypatch.setattr(own_loop, "compute_capability", lambda device: H200)
    monkeypatch.setattr(levers, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(levers, "LEAST_CHUNK_TOKENS", 2)
    monkeypatch.setattr(levers, "LEAST_COLUMNS", 32)
    run, losses = looped(tmp_path / "chosen", precision="bf16")
    [loss] = [module for module in run._live.model.modules() if isinstance(module, ChunkedLoss)]
    assert loss.chunks == run._live.plan.loss_chunks == 4
    text = (run.directory / "attempts/1/plan.yaml").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("loss_chunks: 4")]
    assert "all logits at once would take" in line
    assert "micro_batch: 8" in text
    whole, expected = looped(tmp_path / "whole", precision="bf16", loss_chunks=1)
    assert not any(isinstance(module, ChunkedLoss) for module in whole._live.model.modules())
    assert losses == pytest.approx(expected, rel=5e-3)


def test_gradients_of_gradients_of_a_loss_in_parts_are_refused_not_wrong():
    model = catalogue.build("gpt", SMALL)
    chunk_loss(model, 2, None, None)
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with pytest.raises(InputError, match="no gradients of gradients"):
        torch.autograd.grad(model(tokens, tokens).loss_sum, list(model.head.parameters()), create_graph=True)
