"""Floating-point operations of training: the convolutional models count theirs by running on the meta device."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

FORWARD_AND_BACKWARD = 3  # the backward pass multiplies twice for each multiplication of the forward pass


def counted_training_flops(model: nn.Module, sample_shape: tuple[int, ...]) -> float:
    """FLOPs of forward and backward for one sample, of a model that is on the meta device."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(torch.empty(1, *sample_shape, device="meta"))
    return float(FORWARD_AND_BACKWARD * counter.get_total_flops())
