"""Compiled code keeps for backward what torch's own partitioner keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch_partitioner import saved_by_torch
from traced_parts import (
    IMAGE,
    SAMPLES,
    WORDS,
    Attention,
    Gated,
    Head,
    InPlace,
    Perceptron,
    PlainAttention,
    Residual,
    Skipping,
    traced_whole,
)

from gradus.planner.profile.program import Part
from gradus.planner.rewritten.compiling import compiled


def saved_by_us(part: Part) -> float:
    """Bytes that backward reads and forward had."""
    now = compiled(part)
    ends = len(now.forward)
    read = {number for operator in now.backward for number in operator.reads}
    ours = [s for number, s in enumerate(now.storages) if number in read and s.made < ends <= s.last]
    return sum(storage.bytes.at(SAMPLES) for storage in ours)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (Perceptron, WORDS),
        (lambda: Perceptron(dropout=0.1), WORDS),
        (Attention, WORDS),
        (lambda: Attention(mixed=True, dropout=0.1), WORDS),
        (lambda: nn.Sequential(*(Attention(mixed=True) for _ in range(3))), WORDS),
        (PlainAttention, WORDS),
        (Gated, WORDS),
        (Head, WORDS),
        (Residual, IMAGE),
        (lambda: nn.Sequential(Residual(), Residual(), Residual()), IMAGE),
        (lambda: nn.Sequential(InPlace(), nn.Linear(16, 4)), IMAGE),
        (Skipping, IMAGE),
    ],
    ids=[
        "perceptron",
        "dropout",
        "attention",
        "mixed",
        "three blocks",
        "plain attention",
        "gated",
        "cross-entropy",
        "residual",
        "three residual blocks",
        "in place",
        "u-net",
    ],
)
def test_the_bytes_kept_for_backward_are_those_that_torch_keeps(make, shape):
    true = saved_by_torch(make(), torch.randn(SAMPLES, *shape, requires_grad=True))
    assert saved_by_us(traced_whole(make(), shape)) == pytest.approx(true, rel=0.02)


def test_what_a_maximum_was_taken_of_is_kept_as_on_an_h200():
    """Torch 2.11 keeps it; later ones, only a bit of each number."""
    pooled = nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 8, 1))
    true = saved_by_torch(pooled, torch.randn(SAMPLES, *IMAGE, requires_grad=True))
    numbers = SAMPLES * 16 * 10 * 10
    assert saved_by_us(traced_whole(pooled, IMAGE)) - true == pytest.approx(4 * numbers - numbers, rel=0.01)
