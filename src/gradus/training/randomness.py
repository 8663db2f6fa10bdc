"""Randomness that derives from (seed, step, sample position), so that nothing about it has to be saved."""

from __future__ import annotations

import random

import numpy as np
import torch

from gradus.schema.stable_hash import stable_hash


def seed_for_construction(what: str, seed: int) -> None:
    """Before the model or the data is built: the same initial weights and splits on every rank, in every attempt."""
    value = stable_hash("construction", what, seed)
    torch.manual_seed(value & (2**63 - 1))
    np.random.seed(value & (2**32 - 1))
    random.seed(value)


def seed_for_micro_batch(seed: int, step: int, position: int, device: torch.device, *part: int) -> None:
    """Before each forward pass: dropout depends on the step and on the global position of the first sample.

    `part` tells apart what works on the same samples, such as the stages of a pipeline and slices of the sequence: from
    the same numbers, all would drop the same places.
    The generators are set directly: `torch.manual_seed` also visits devices that are not there, which takes 0.3 ms.
    """
    value = stable_hash("micro-batch", seed, step, position, *(part if any(part) else ())) & (2**63 - 1)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)
