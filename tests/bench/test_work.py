"""The work of a benchmark is real training: of every kind of model, on random data."""

from __future__ import annotations

import pytest
import torch

from gradus.bench.work import SyntheticWork
from gradus.parallel.world import alone

CPU = torch.device("cpu")
SMALL = {
    "resnet18": {"image": 32, "classes": 5},
    "vit": {"layers": 1, "width": 16, "heads": 2, "image": 8},
    "simple-cnn": {},
    "mnist-cnn": {},
    "gpt": {"layers": 1, "width": 16, "heads": 2, "context": 8},
    "bert": {"layers": 1, "width": 16, "heads": 2, "context": 8},
}


def work_of(model: str, **asked) -> SyntheticWork:
    return SyntheticWork(
        {"model": model, "options": SMALL[model], "batch_size": 2, "precision": "fp32", **asked}, alone(CPU)
    )


@pytest.mark.parametrize("model", SMALL)
def test_a_step_changes_the_weights_of_any_model(model):
    work = work_of(model)
    before = [parameter.detach().clone() for parameter in work._model.parameters()]
    work.step()
    changed = [not torch.equal(old, new) for old, new in zip(before, work._model.parameters(), strict=True)]
    assert any(changed)
    assert work.samples == 2
    assert (work.unit, work.tokens) == (("seq", 8) if model in ("gpt", "bert") else ("img", None))
    assert work.parameters == sum(parameter.numel() for parameter in before)


def test_a_step_can_be_in_bf16_and_with_channels_last():
    work = work_of("simple-cnn", precision="bf16", channels_last=True)
    assert work._batch[0].is_contiguous(memory_format=torch.channels_last)
    work.step()
    assert all(parameter.dtype == torch.float32 for parameter in work._model.parameters())
