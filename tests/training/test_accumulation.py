"""Gradients of 16-bit parameters are added up in fp32 over micro-batches."""

from __future__ import annotations

import torch
from torch import nn

from gradus.parallel.world import alone
from gradus.training.accumulation import WideGradients

CPU = alone(torch.device("cpu"))


def summed(wide: bool, gradients: list[float]) -> float:
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    sums = WideGradients([parameter])
    for gradient in gradients:
        (parameter * gradient).sum().backward()
        if wide:
            sums.take()
    if wide:
        sums.give(CPU)
    assert parameter.grad is not None
    return float(parameter.grad.item())


def test_small_gradients_are_not_lost_beside_large_ones() -> None:
    gradients = [256.0] + [1.0] * 64
    assert summed(wide=False, gradients=gradients) == 256.0, "bf16 has 8 bits: 256 + 1 is 256"
    assert summed(wide=True, gradients=gradients) == 320.0


def test_it_is_not_needed_for_wide_parameters() -> None:
    assert not WideGradients([nn.Parameter(torch.zeros(1))]).needed
    assert WideGradients([nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, dtype=torch.float16))]).needed


def test_a_parameter_without_gradient_keeps_none() -> None:
    used, unused = (nn.Parameter(torch.ones(1, dtype=torch.bfloat16)) for _ in range(2))
    sums = WideGradients([used, unused])
    (used * 2).sum().backward()
    sums.take()
    sums.give(CPU)
    assert used.grad is not None
    assert used.grad.item() == 2.0
    assert unused.grad is None
