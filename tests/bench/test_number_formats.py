"""Emulated formats are those of torch, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from gradus.bench.number_formats import BLOCK, FORMATS, damage, scales_of

TYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


def every_magnitude() -> torch.Tensor:
    """Of all exponents of fp32, with mantissas on, beside and between what narrow formats have."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    anything = bits.view(torch.float32)
    ties = torch.arange(0, 1 << 16, dtype=torch.int32) << 16
    halves = ties | (1 << 15)
    usual = torch.randn(100_000, generator=generator)
    found = torch.cat(
        [anything, ties.view(torch.float32), halves.view(torch.float32), usual, usual * 1e-6, usual * 400]
    )
    return found[found.isfinite()]


@pytest.mark.parametrize("name", TYPES)
def test_rounding_is_that_of_torch(name: str) -> None:
    values = every_magnitude()
    mine, theirs = FORMATS[name].rounded(values), values.to(TYPES[name]).double()
    beyond = mine.isinf()
    # Beyond the largest number torch has an infinity or a NaN; E4M3 ends at its largest one in newer versions.
    assert bool((~theirs[beyond].isfinite() | (theirs[beyond].abs() == FORMATS[name].largest)).all())
    assert bool(theirs[~beyond].isfinite().all())
    assert torch.equal(mine[~beyond], theirs[~beyond])
    assert bool((torch.signbit(mine) == torch.signbit(theirs))[~beyond].all())


@pytest.mark.parametrize("name", TYPES)
def test_limits_are_those_of_torch(name: str) -> None:
    limits, found = torch.finfo(TYPES[name]), FORMATS[name]
    assert (found.largest, found.smallest_normal) == (limits.max, limits.tiny)
    assert found.digits == limits.eps
    assert found.bits == limits.bits


def test_tf32_has_the_range_of_bf16_and_the_digits_of_fp16() -> None:
    tf32 = FORMATS["tf32"]
    assert tf32.smallest_exponent == FORMATS["bf16"].smallest_exponent
    assert tf32.digits == FORMATS["fp16"].digits
    values = torch.randn(1000)
    below = (values.view(torch.int32) & ~0x1FFF).view(torch.float32).double()
    steps = torch.ldexp(torch.ones(1000, dtype=torch.float64), torch.frexp(values.double())[1] - 11)
    assert bool(((tf32.rounded(values) == below) | (tf32.rounded(values).abs() == below.abs() + steps)).all())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("e2m1", [0, 0.5, 1, 1.5, 2, 3, 4, 6]),
        ("e2m3", [n / 8 for n in range(17)] + [2.25 + n / 4 for n in range(8)][:7] + [4 + n / 2 for n in range(8)]),
        ("e3m2", [n / 16 for n in range(9)] + [0.625, 0.75, 0.875] + [1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5]),
    ],
)
def test_small_formats_have_the_numbers_of_their_standard(name: str, numbers: list[float]) -> None:
    """OCP Microscaling Formats 1.0, section 5.3."""
    found = FORMATS[name].rounded(torch.linspace(0, max(numbers), 10_001)).unique()
    assert found.tolist() == sorted(set(numbers))


def test_a_scale_for_each_block_saves_what_one_for_all_loses() -> None:
    rows = torch.randn(64, 4 * BLOCK, generator=torch.Generator().manual_seed(2)) * 1e-6
    rows[0, 0] = 448.0  # one number that is far from the rest
    shared = {scope: damage(rows, FORMATS["e4m3"], scope) for scope in FORMATS["e4m3"].scalings}
    assert shared["tensor"].underflow > 0.99
    assert shared["row"].underflow < 0.02 < shared["tensor"].underflow
    assert shared["block"].underflow < shared["row"].underflow


def test_no_scaled_number_overflows() -> None:
    rows = torch.randn(50, 300, generator=torch.Generator().manual_seed(3)) * 1e7
    for name, each in FORMATS.items():
        for scope in set(each.scalings) - {"none"}:
            assert damage(rows, each, scope).overflow == 0, (name, scope)
    assert damage(rows, FORMATS["e4m3"]).overflow > 0.9
    assert damage(rows, FORMATS["bf16"]).overflow == 0


def test_each_bit_of_a_mantissa_is_worth_six_decibels() -> None:
    rows = torch.rand(100, 100, generator=torch.Generator().manual_seed(4)) + 1  # one exponent: rounding errors only
    ratios = {name: damage(rows, FORMATS[name]).snr_db for name in ("tf32", "bf16", "e4m3", "e5m2")}
    for one, other, bits in (("tf32", "bf16", 3), ("bf16", "e4m3", 4), ("e4m3", "e5m2", 1)):
        assert ratios[one] - ratios[other] == pytest.approx(20 * math.log10(2) * bits, abs=0.6)


def test_a_loss_scale_lifts_gradients_into_the_range_of_fp16() -> None:
    gradients = torch.randn(10, 1000, generator=torch.Generator().manual_seed(5)) * 1e-9
    assert damage(gradients, FORMATS["fp16"]).underflow > 0.99
    assert damage(gradients, FORMATS["fp16"], factor=2.0**16).underflow < 0.001


def test_zeros_have_no_error_and_no_scale() -> None:
    zeros = torch.zeros(3, 10)
    assert bool((scales_of(zeros.double(), FORMATS["e4m3"], "row") == 1).all())
    found = damage(zeros, FORMATS["e4m3"], "row")
    assert (found.underflow, found.overflow, found.relative_error) == (0, 0, 0)
