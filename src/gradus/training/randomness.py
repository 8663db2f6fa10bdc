"""Randomness that derives from (seed, step, sample position), so that nothing about it has to be saved."""

from __future__ import annotations

import random

import numpy as np
import torch

from gradus.data.order import stable_hash


def seed_for_construction(seed: int) -> None:
    """Before the model is built: the same initial weights on every rank and in every attempt."""
    value = stable_hash("construction", seed)
    torch.manual_seed(value & (2**63 - 1))
    np.random.seed(value & (2**32 - 1))
    random.seed(value)


def seed_for_micro_batch(seed: int, step: int, position: int) -> None:
    """Before each forward pass: dropout depends on the step and on the global position of the first sample.

    Only torch's generators are set, and setting them does not wait for the device.
    """
    torch.manual_seed(stable_hash("micro-batch", seed, step, position) & (2**63 - 1))
