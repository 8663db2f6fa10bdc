"""Number formats: what rounding to a narrow floating-point format does to numbers, emulated bit for bit on any device.

A format has an exponent of so many bits and a mantissa of so many; below its smallest normal number it goes on with
fewer digits (subnormal numbers). Rounding is to the nearest, ties to even, as torch converts. TF32, which is no type of
torch, is rounded the same way; what tensor cores do with its last bit is the device's own business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 128  # numbers in a row that share a scale, as Hopper and DeepSeek-V3 have it

Shared = Literal["none", "tensor", "row", "block"]  # what shares one scale


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format. `largest` is given where the top exponent is not, or not wholly, left to infinities."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    scalings: tuple[Shared, ...] = ("none",)

    @property
    def smallest_exponent(self) -> int:
        """Of normal numbers."""
        return 1 - self.bias

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.smallest_exponent)

    @property
    def smallest(self) -> float:
        """Above 0."""
        return math.ldexp(1.0, self.smallest_exponent - self.mantissa_bits)

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def digits(self) -> float:
        """The relative distance of neighbours: half of it is the largest rounding error of a normal number."""
        return math.ldexp(1.0, -self.mantissa_bits)

    def rounded(self, values: Tensor) -> Tensor:
        """The nearest numbers of the format, as float64. What lies beyond the largest one is infinite."""
        exact = values.double()
        _, exponents = torch.frexp(exact)  # of a mantissa in [0.5, 1)
        exponents = (exponents - 1).clamp(min=self.smallest_exponent) - self.mantissa_bits
        steps = torch.ldexp(torch.ones_like(exact), exponents)
        nearest = torch.round(exact / steps) * steps  # ties to even
        infinite = torch.full_like(nearest, math.inf).copysign(nearest)
        return torch.where(nearest.abs() > self.largest, infinite, nearest)


def _standard(
    name: str, exponent_bits: int, mantissa_bits: int, scalings: tuple[Shared, ...] = ("none",)
) -> NumberFormat:
    """With IEEE's bias, and the top exponent for infinities."""
    bias = 2 ** (exponent_bits - 1) - 1
    return NumberFormat(
        name, exponent_bits, mantissa_bits, bias, (2 - math.ldexp(1.0, -mantissa_bits)) * 2.0**bias, scalings
    )


SCALED: tuple[Shared, ...] = ("none", "tensor", "row", "block")
FORMATS = {
    each.name: each
    for each in (
        _standard("tf32", 8, 10),
        _standard("bf16", 8, 7),
        _standard("fp16", 5, 10),
        # Of E4M3 only the very last code is no number; FP6 and FP4 have no infinities at all.
        NumberFormat("e4m3", 4, 3, 7, 448.0, SCALED),
        _standard("e5m2", 5, 2, SCALED),
        NumberFormat("e3m2", 3, 2, 3, 28.0, SCALED[1:]),
        NumberFormat("e2m3", 2, 3, 1, 7.5, SCALED[1:]),
        NumberFormat("e2m1", 2, 1, 1, 6.0, SCALED[1:]),
    )
}


@dataclass(frozen=True)
class Damage:
    """What a format does to some numbers."""

    elements: int
    underflow: float  # share of the numbers that are not 0 and become 0
    overflow: float  # share that lies beyond the largest number; it counts as that in the error
    relative_error: float  # root of the mean square of the error, over that of the numbers
    snr_db: float  # the same in decibels: about 6 for each bit of a mantissa


def damage(values: Tensor, to: NumberFormat, shared: Shared = "none", factor: float = 1.0) -> Damage:
    """Of numbers in rows. With a scale, the largest number among those that share it becomes the format's largest.

    `factor` is what all are multiplied with first, as a loss scale does to gradients.
    """
    exact = values.detach().double()
    scales = scales_of(exact, to, shared) / factor
    rounded = to.rounded(exact / scales)
    beyond = rounded.isinf()
    kept = rounded.clamp(-to.largest, to.largest) * scales
    nonzero = exact != 0
    lost = (kept == 0) & nonzero
    error, power = (kept - exact).square().sum(), exact.square().sum()
    relative = math.sqrt(float(error / power)) if float(power) > 0 else 0.0
    return Damage(
        elements=exact.numel(),
        underflow=float(lost.sum()) / max(1.0, float(nonzero.sum())),
        overflow=float(beyond.sum()) / max(1, exact.numel()),
        relative_error=relative,
        snr_db=-20 * math.log10(relative) if relative > 0 else math.inf,
    )


def scales_of(values: Tensor, to: NumberFormat, shared: Shared) -> Tensor:
    """What numbers are divided by before they are rounded; it can be broadcast over them. Scales are fp32 numbers."""
    if shared == "none":
        return torch.ones((), dtype=torch.float64, device=values.device)
    if shared == "tensor":
        largest = values.abs().amax()
    elif shared == "row":
        largest = values.abs().amax(dim=-1, keepdim=True)
    else:
        width = values.shape[-1]
        padded = torch.nn.functional.pad(values, (0, -width % BLOCK))
        blocks = padded.abs().reshape(*values.shape[:-1], -1, BLOCK).amax(dim=-1, keepdim=True)
        largest = blocks.expand(*blocks.shape[:-1], BLOCK).flatten(-2)[..., :width]
    scales = (largest / to.largest).float().double()
    # What is all 0 needs no scale; and a scale that is rounded down must not push its largest number over the edge.
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    return torch.where(largest / scales > to.largest, scales * (1 + 2.0**-23), scales)


def format_rows() -> list[dict[str, object]]:
    """What each format can express, for a table."""
    return [
        {
            "format": each.name,
            "bits": each.bits,
            "exponent_bits": each.exponent_bits,
            "mantissa_bits": each.mantissa_bits,
            "largest": each.largest,
            "smallest_normal": each.smallest_normal,
            "smallest": each.smallest,
            "rounding_error_at_most": each.digits / 2,
        }
        for each in FORMATS.values()
    ]
