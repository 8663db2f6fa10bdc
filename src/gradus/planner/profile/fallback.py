"""Fallback: a profile from a model's parameters alone, for a model that cannot be traced.

State (parameters, gradients, optimizer) is as sure as ever. Work is two FLOPs for each parameter and token forward, and
twice that backward; no time follows from it, since a step is as much launching and moving as it is products: GPTs whose
traces were thrown away came out between a quarter and twice of what they take. Activations are those of a transformer
whose blocks have as many parameters: 12·h² of them and, with fused attention in 16 bit, 34·h bytes of activations for
each token (Korthikanti et al. 2022, arXiv:2205.05198). For samples without tokens nobody knows, and none are counted.
The profile says what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from gradus.parallel.blocks import repeated_blocks
from gradus.planner.profile.program import Amount, ModelProfile, Operator, Part, Storage, Weights

PARAMETERS_OF_A_BLOCK = 12  # times h²
BYTES_OF_A_BLOCK = 34  # times h, for each token in 16 bit; twice that in 32


def estimated(bare: ModelProfile, model: nn.Module, problem: str, *, narrow: bool) -> ModelProfile:
    """The profile with what can be said without running the model; `problem` is why it could not be run.

    `narrow`: products are computed in 16 bit.
    """
    blocks = repeated_blocks(model)
    within = {id(p) for block in blocks for p in block.parameters()}
    around = [p for p in model.parameters() if id(p) not in within]
    tokens = bare.tokens_per_sample or 1
    parts = [_part("around the blocks", False, around, tokens, narrow, kept=0.0)]
    calls = [0]
    known: dict[tuple[Weights, ...], int] = {}
    for block in blocks:
        kept = _kept(block, bare.tokens_per_sample, narrow)
        part = _part(type(block).__name__, True, block.parameters(), tokens, narrow, kept)
        if part.weights not in known:
            known[part.weights] = len(parts)
            parts.append(part)
        calls.append(known[part.weights])
    counted = "activations as in a transformer of that size"
    if not bare.tokens_per_sample:
        counted = "no activations but its batch and what libraries ask for"
    note = f"{problem}; it is estimated from its parameters alone, with {counted}, and no time is predicted"
    return replace(bare, parts=tuple(parts), calls=tuple(calls), traced=False, notes=(*bare.notes, note))


def _part(name: str, block: bool, parameters: Iterable[nn.Parameter], tokens: int, narrow: bool, kept: float) -> Part:
    weights: dict[bool, Weights] = {}
    for parameter in parameters:
        so_far = weights.get(parameter.requires_grad, Weights(0, parameter.requires_grad, tensors=0))
        weights[parameter.requires_grad] = Weights(
            so_far.elements + parameter.numel(), parameter.requires_grad, tensors=so_far.tensors + 1
        )
    elements = sum(kind.elements for kind in weights.values())
    side = Amount(math.sqrt(elements))
    product = Operator(
        name="all products",
        kind="matmul",
        flops=Amount(0.0, 2.0 * elements * tokens),
        read=Amount(elements * (2.0 if narrow else 4.0)),
        written=Amount(0.0, side.fixed * tokens * (2.0 if narrow else 4.0)),
        dtype="bfloat16" if narrow else "float32",
        shape=(Amount(1.0), Amount(0.0, float(tokens)), side, side),
    )
    trained = any(kind.trained for kind in weights.values())
    return Part(
        name=name,
        block=block,
        forward=(product,) if elements else (),
        backward=(product, product) if elements and trained else (),
        storages=(Storage(Amount(0.0, kept), made=0, last=1),) if kept and elements else (),
        weights=tuple(weights.values()),
    )


def _kept(block: nn.Module, tokens_per_sample: int | None, narrow: bool) -> float:
    """Bytes that a block keeps of a sample."""
    if tokens_per_sample is None:
        return 0.0
    width = math.sqrt(sum(p.numel() for p in block.parameters()) / PARAMETERS_OF_A_BLOCK)
    return BYTES_OF_A_BLOCK * width * tokens_per_sample * (1.0 if narrow else 2.0)
