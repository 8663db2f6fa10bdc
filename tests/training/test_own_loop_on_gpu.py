"""On a GPU, a loop of one's own without any key computes as a recipe's run does: in 16 bits, in parts, in one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.training.own_loop import Run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS, LENGTH = 65536, 1024
OFF = {"narrow_weights": False, "loss_chunks": 1}


class Sequences(torch.utils.data.Dataset[Any]):
    """Of a few of many kinds of tokens, so that there is something to learn."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        drawn = torch.randint(0, 64, (LENGTH + 1,), generator=torch.Generator().manual_seed(number))
        return {"tokens": drawn[:-1], "targets": drawn[1:]}


class Refusing(nn.Module):
    """A product in fp32, which takes no other weights."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.layer = body, nn.Linear(1, 1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        with torch.autocast("cuda", enabled=False):
            one = self.layer(tokens[:1, :1].float())
        loss_sum, count, rest = self.body(tokens, targets)
        return loss_sum + 0.0 * one.sum(), count, rest


def looped(folder: Path, *, refusing: bool = False, **plan: Any) -> tuple[Run, list[float]]:
    recipe = {"name": "own", "batch": 9, "steps": 8, "seed": 1, "log_every": 1}
    run = Run.start({**recipe, **({"plan": plan} if plan else {})}, runs=folder)
    model = catalogue.build("gpt", {"layers": 2, "width": 64, "heads": 2, "context": LENGTH, "vocabulary": KINDS})
    model = Refusing(model) if refusing else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=4)
    model, same = run.prepare(model, optimizer, scheduler)
    assert same is optimizer
    for batch in run.batches(Sequences()):
        loss_sum, count, _ = model(**batch)
        run.step((loss_sum, count))
    run.finish()
    return run, [row["loss"] for row in read_metrics(run._place.run) if row.get("loss") is not None]


def test_the_plain_form_has_all_three_and_learns_the_same(tmp_path):
    run, losses = looped(tmp_path / "plain")
    live = run._live
    assert live.plan.narrow_weights
    assert live.plan.loss_chunks == 4
    assert live.step._one_pass is live.optimizer
    assert "loss_chunks: 4" in (run.directory / "attempts/1/plan.yaml").read_text()
    wide, expected = looped(tmp_path / "wide", **OFF)
    assert not wide._live.step.has_narrow_weights
    assert type(wide._live.optimizer) is torch.optim.AdamW
    assert losses == pytest.approx(expected, rel=1e-2)
    assert losses[-1] < losses[0]


def test_a_compiled_model_that_takes_no_narrow_weights_goes_on_without(tmp_path):
    run, losses = looped(tmp_path / "refusing", refusing=True)
    assert not run._live.step.has_narrow_weights
    assert run._live.step._one_pass is None
    [told] = [event["message"] for event in read_events(run._place.run) if event["event"] == "warning"]
    assert "does not take weights in 16 bits" in told
    _, expected = looped(tmp_path / "wide", refusing=True, **OFF)
    assert losses == pytest.approx(expected, rel=1e-2)
