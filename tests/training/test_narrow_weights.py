"""Narrow weights: the model computes with copies, and everybody else knows only the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import HERE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_cases import live_run, recipe_for, trained

from gradus.checkpoint.store import CheckpointStore
from gradus.data.loader import MicroBatch
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.training.narrow_weights import NarrowWeights

CPU = torch.device("cpu")
NARROW = {"precision": "bf16", "narrow_weights": True}


class Everything(nn.Module):
    """Tied, frozen, unused and normalised weights, and a part that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.unused = nn.Linear(8, 8)
        self.output = nn.Linear(8, 16, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.embedding(tokens))
        x = checkpoint(self.inner, x, use_reentrant=False)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        return self.output(self.recurrent(x)[0])


def made() -> tuple[Everything, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Everything()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(number))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, narrow: NarrowWeights | None, passes: int) -> None:
    for step in range(3):
        if narrow is not None:
            narrow.refresh()
        for number in range(passes):
            if narrow is not None:
                narrow.put_in()
            loss_of(model, 10 * step + number).backward()
            if narrow is not None:
                narrow.take_out()
                narrow.hand_over_gradients()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.InstanceNorm1d(4, affine=True)])
def test_norms_with_statistics_keep_wide_weights(norm):
    narrow = NarrowWeights(nn.Sequential(norm, nn.Linear(4, 4)), torch.bfloat16)
    assert len(narrow.copies()) == 2


def test_gradients_of_copies_have_those_of_parameters_that_a_loss_held_on_to():
    model = nn.Linear(3, 1, bias=False)
    held, narrow = model.weight, NarrowWeights(model, torch.bfloat16)
    narrow.refresh()
    narrow.put_in()
    (model(torch.ones(1, 3, dtype=torch.bfloat16)).sum() + 2.0 * held.sum()).backward()
    narrow.take_out()
    ((parameter, gradient),) = narrow.gradients()
    assert parameter is held
    assert held.grad is None
    assert gradient.dtype == torch.bfloat16
    assert gradient.tolist() == [[3.0, 3.0, 3.0]]


@pytest.mark.parametrize("passes", [1, 3])
def test_copies_that_are_not_rounded_change_nothing(passes):
    (plain, optimizer), (model, narrow_optimizer) = made(), made()
    stepped(plain, optimizer, None, passes)
    stepped(model, narrow_optimizer, NarrowWeights(model, torch.float32), passes)
    for (name, found), (_, expected) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_what_is_computed_with_is_the_rounded_parameter_and_not_what_is_kept():
    model, _ = made()
    narrow = NarrowWeights(model, torch.bfloat16)
    kept = dict(model.named_parameters())
    narrow.refresh()
    narrow.put_in()
    assert model.output.weight is model.embedding.weight
    assert model.inner.weight.dtype == torch.bfloat16
    assert torch.equal(model.inner.weight, kept["inner.weight"].bfloat16())
    assert model.norm.weight is kept["norm.weight"]  # of batch norms and recurrent layers there are no copies
    assert model.recurrent.weight_ih_l0 is kept["recurrent.weight_ih_l0"]
    assert not model.frozen.weight.requires_grad
    narrow.take_out()
    narrow.take_out()  # as often as one likes
    assert all(parameter is kept[name] for name, parameter in model.named_parameters())


def test_a_frozen_parameter_is_rounded_again_only_when_it_has_changed(monkeypatch):
    model, _ = made()
    narrow = NarrowWeights(model, torch.bfloat16)
    rounded: list[int] = []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda to, of: (rounded.append(len(of)), real(to, of)))
    for _ in range(2):
        narrow.refresh()
    with torch.no_grad():
        model.frozen.weight.fill_(0.5)
    narrow.refresh()
    assert rounded[1] == rounded[0] - 2
    assert rounded[2] == rounded[1] + 1
    narrow.put_in()
    assert bool((model.frozen.weight == 0.5).all())


def run(folder: Path, plan: dict[str, Any], name: str, **changes: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    directory = RunDirectory.create(folder, name)
    found = trained(alone(CPU), str(directory.path), recipe_for("gpt", plan=plan, **changes))
    return read_metrics(directory), found["weights"]


def test_losses_are_those_of_autocast_but_for_rounding(tmp_path):
    """Over 60 steps of real text: the gap stays below what bf16 itself makes of fp32."""
    changes = {"steps": 60, "optimizer": {"use": "adamw", "lr": 3e-3}}
    curves = {
        name: [row["loss"] for row in run(tmp_path, plan, name, **changes)[0]]
        for name, plan in (("wide", {"precision": "bf16"}), ("narrow", NARROW), ("fp32", {"precision": "fp32"}))
    }
    assert curves["narrow"] != curves["wide"]
    assert curves["narrow"][-1] < 0.9 * curves["narrow"][0]
    for found, wide, exact in zip(curves["narrow"], curves["wide"], curves["fp32"], strict=True):
        assert found == pytest.approx(exact, rel=0.01)
        assert found == pytest.approx(wide, rel=0.01)


def test_checkpoints_are_in_fp32_and_a_resumed_run_is_the_same_run(tmp_path):
    rows, weights = run(tmp_path, NARROW, "whole", steps=6)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    directory = RunDirectory.create(tmp_path, "stopped")
    recipe = recipe_for("gpt", plan=NARROW, steps=6)
    first = trained(alone(CPU), str(directory.path), recipe, 1, 3)
    assert first["state"] == "stopped"
    assert CheckpointStore(directory.checkpoints).steps() == [first["step"]]
    assert 0 < first["step"] < 6
    directory.stop_file.unlink()
    second = trained(alone(CPU), str(directory.path), recipe, 2)
    assert second["step"] == 6
    assert all(torch.equal(second["weights"][name], weight) for name, weight in weights.items())
    assert [row["loss"] for row in read_metrics(directory)] == [row["loss"] for row in rows]


def test_accumulation_adds_up_in_fp32(tmp_path):
    whole, _ = run(tmp_path, {**NARROW, "micro_batch": 24}, "whole", steps=3)
    parts, _ = run(tmp_path, {**NARROW, "micro_batch": 6, "accumulate": 4}, "parts", steps=3)
    for found, expected in zip(parts, whole, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=3e-3)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-2)


def test_a_forward_pass_without_a_backward_leaves_the_parameters_in_place(tmp_path):
    """As a loop does that ends with `break`, after which it is saved."""
    live = live_run(alone(CPU), str(RunDirectory.create(tmp_path, "left").path), recipe_for("gpt", plan=NARROW))
    tokens = torch.zeros(1, 8, dtype=torch.long)
    with live.step.forward(MicroBatch((tokens, tokens), 1, 0), 0):
        assert {parameter.dtype for parameter in live.model.parameters()} == {torch.bfloat16}
    live.step.abandon()
    assert {parameter.dtype for parameter in live.model.parameters()} == {torch.float32}
    live.recorder.close(state="stopped")


TOGETHER: dict[str, dict[str, Any]] = {
    "recomputed": {"plan": {"recompute": "full"}},
    "recomputed in part": {"plan": {"recompute": "selective"}},
    "activations on the host": {"plan": {"activation_offload": True}},
    "loss in chunks": {"plan": {"loss_chunks": 4}},
    "adapters": {"lora": {"rank": 2}},
    "an average of weights": {"hooks": ["ema"]},
    "steps that may be skipped": {"on_nan": "skip"},
    "loss scaling": {"plan": {"precision": "fp16"}},
    "a model of Hugging Face": {"model": {"use": f"{HERE}:llama"}, "data": {"use": f"{HERE}:Sentences"}},
}


@pytest.mark.parametrize("name", TOGETHER)
def test_they_go_together_with_all_else_that_one_rank_may_do(tmp_path, name):
    changes = {"steps": 3, **TOGETHER[name]}
    plan = {"precision": "bf16", **changes.pop("plan", {})}
    wide, _ = run(tmp_path, plan, "wide", **changes)
    narrow, weights = run(tmp_path, {**plan, "narrow_weights": True}, "narrow", **changes)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert [row["loss"] for row in narrow] == pytest.approx([row["loss"] for row in wide], rel=5e-3)
