"""A run whose optimizer takes gradients as narrow as backward made them is the run that widens them first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_cases import MODELS, live_run, recipe_for

from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.training import model_to_step as building
from gradus.training.gradients import total_norm
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.precision import numbers_for
from gradus.training.step import TrainingStep

CPU = torch.device("cpu")


def run(folder: Path, one_pass: bool, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> LiveRun:
    """On a CPU, where the kernel is interpreted, if it is asked for."""
    plan = {"precision": "bf16", "narrow_weights": True, **changes.pop("plan", {})}
    recipe = recipe_for("gpt", steps=6, log_every=1, plan=plan, **changes)
    with monkeypatch.context() as patch:
        if one_pass:
            usual = building.build_optimizer
            patch.setattr(building, "build_optimizer", lambda *given, **_: usual(*given, narrow_weights=True))
        live = live_run(alone(CPU), str(RunDirectory.create(folder, str(one_pass)).path), recipe)
    live.recorder.close(state=train(live).state)
    return live


def weights_of(live: LiveRun) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in live.model.parameters()])


NARROW_MOMENTS = {"optimizer": {**MODELS["gpt"]["optimizer"], "moments": "bf16"}}


@pytest.mark.parametrize(
    "changes", [{}, {"freeze": ["embedding.*"]}, {"plan": {"loss_chunks": 3}}, NARROW_MOMENTS], ids=str
)
def test_the_run_is_the_same(changes, tmp_path, monkeypatch):
    begun = live_run(alone(CPU), str(RunDirectory.create(tmp_path, "begun").path), recipe_for("gpt"))
    plain, found = (run(tmp_path, one_pass, monkeypatch, **changes) for one_pass in (False, True))
    assert found.step._one_pass is not None
    assert plain.step._one_pass is None
    rows = [list(read_metrics(live.run)) for live in (plain, found)]
    # Where a GPU rounds to 16 bits, Triton's interpreter cuts off: weights are half a unit in the last place smaller.
    for name, allowed in (("loss", 1e-3), ("grad_norm", 1e-2)):
        before, after = ([row[name] for row in some if name in row] for some in rows)
        assert after == pytest.approx(before, rel=allowed), name
    moved = weights_of(plain) - weights_of(begun)
    assert (weights_of(found) - weights_of(plain)).norm() < 0.05 * moved.norm()
    assert all(parameter.grad is None for parameter in found.model.parameters())


def test_several_micro_batches_and_skipped_steps_need_wide_gradients(tmp_path, monkeypatch):
    for number, changes in enumerate(({"plan": {"accumulate": 2}}, {"on_nan": "skip"})):
        assert run(tmp_path / str(number), True, monkeypatch, **changes).step._one_pass is None


def test_narrow_weights_follow_the_update_and_what_others_write(tmp_path, monkeypatch):
    live = run(tmp_path, True, monkeypatch)
    copies = live.step._narrow.copies()
    for parameter, copy in copies.items():
        assert torch.allclose(copy.float(), parameter, rtol=2**-7, atol=0)  # see above
    first = next(iter(copies))
    with torch.no_grad():
        first.mul_(2.0)
    live.step._refresh_narrow()
    assert torch.equal(copies[first], first.to(torch.bfloat16))


def test_parameters_that_are_not_in_fp32_or_have_gaps_are_left_to_torch():
    def takes(parameter: torch.Tensor) -> bool:
        layer = nn.Linear(8, 8)
        layer.weight = nn.Parameter(parameter)
        recipe = recipe_for("gpt")
        optimizer = building.build_optimizer(layer, recipe.optimizer, narrow_weights=True)
        numbers = numbers_for("bf16", CPU)
        step = TrainingStep(
            layer, optimizer, None, numbers, alone(CPU), accumulate=1, clip=None, seed=1, narrow_weights=True
        )
        return step._one_pass is not None

    assert takes(torch.zeros(8, 8))
    assert takes(torch.zeros(8, 8).t())
    assert not takes(torch.zeros(8, 8, dtype=torch.bfloat16))
    assert not takes(torch.zeros(8, 8, dtype=torch.float64))
    assert not takes(torch.zeros(8, 16)[:, ::2])


def test_the_norm_of_narrow_gradients_is_not_rounded():
    torch.manual_seed(0)
    wide = [torch.randn(1000) for _ in range(3)]
    narrow = [tensor.bfloat16() for tensor in wide]
    exact = torch.cat([tensor.double() for tensor in narrow]).norm()
    assert float(total_norm([(t, t) for t in narrow], alone(CPU))) == pytest.approx(float(exact), rel=1e-6)
    mixed = [*narrow[:2], wide[2]]
    exact = torch.cat([tensor.double() for tensor in mixed]).norm()
    assert float(total_norm([(t, t) for t in mixed], alone(CPU))) == pytest.approx(float(exact), rel=1e-6)
