"""Freezing: parameters that stay as they are. They get no gradient, and so no optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gradus.schema.errors import InputError
from gradus.schema.patterns import matching


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Stop training the parameters whose names match one of the patterns; a tied one goes by any of its names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    for name in matching(named, patterns, "freeze"):
        named[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in named.values()):
        raise InputError(
            f"freeze: {', '.join(patterns)} leaves none of {len(named)} parameters to train",
            hint="freeze fewer, or train small matrices beside the frozen ones: lora: {rank: 8}",
            field="freeze",
            found=list(patterns),
        )
