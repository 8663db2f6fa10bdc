"""The kernels that bring a matrix into 8 bits: what they write is what torch's own operators write.

Without a GPU the kernels are interpreted (conftest.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradus.training import float8_matmul
from gradus.training.float8_matmul import E4M3, E5M2, LEAST_AMAX, Float8Product, Scaled, rescaled, scaled

pytest.importorskip("triton")

from gradus.training import float8_kernel
from gradus.training.float8_kernel import MOST_PARTS, to_float8

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
# One that is smaller than a tile, whole tiles, tiles and a bit, more numbers than a round of all parts takes.
SHAPES = [(16, 16), (128, 256), (208, 144), (2176, 2000)]


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def are_those(found: Tensor, expected: Scaled, of: Tensor) -> bool:
    """Bit for bit on a GPU.

    Triton's interpreter does not round to the nearest number everywhere, and loses what rounding carries into the
    exponent: there it is the number on either side, or one of which the digits are right and the exponent is not.
    """
    bits, wanted, dtype = found.view(torch.uint8), expected.values.view(torch.uint8), expected.values.dtype
    if not INTERPRETED:
        return torch.equal(bits, wanted)
    exact, digits = of.float() / expected.scales, {E4M3: 3, E5M2: 2}[dtype]
    step = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal) * 2.0**-digits
    beside = (found.float() - exact).abs() <= step
    carried = (wanted & (2**digits - 1) == 0) | (exact.abs() < torch.finfo(dtype).smallest_normal)
    return bool((beside | carried).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_values_transposed_values_and_scale_are_those_of_torch(
    shape: tuple[int, int], dtype: torch.dtype, of: torch.dtype
) -> None:
    matrix = drawn(*shape, dtype=of)
    values, turned, scale, _ = to_float8(matrix, None, dtype, LEAST_AMAX, across=True, down=True)
    # On a GPU torch divides by a number in multiplying by its reciprocal, which is off by a digit now and then.
    torch.testing.assert_close(scale, scaled(matrix, shape, dtype).scales, rtol=2e-7, atol=0.0)
    assert are_those(values, rescaled(matrix, scale, dtype), matrix)
    assert torch.equal(turned.view(torch.uint8), values.view(torch.uint8).t())


@pytest.mark.parametrize("shape", [(64, 96), (256, 272)])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float32])
def test_with_a_known_scale_only_what_is_wanted_is_written(shape: tuple[int, int], of: torch.dtype) -> None:
    matrix, scale = drawn(*shape, dtype=of), torch.full((1, 1), 0.02, device=DEVICE)
    values, turned, same, _ = to_float8(matrix, scale, E4M3, LEAST_AMAX, across=False, down=True)
    assert values.numel() == 0
    assert same is scale
    assert are_those(turned, rescaled(matrix, scale, E4M3).T, matrix.t())


def test_a_view_of_columns_is_read_as_it_is() -> None:
    matrix = drawn(96, 64)
    values, turned, scale, _ = to_float8(matrix.t(), None, E4M3, LEAST_AMAX, across=True, down=True)
    assert torch.equal(values.view(torch.uint8), turned.view(torch.uint8).t())
    assert are_those(turned, rescaled(matrix, scale, E4M3), matrix)


def test_zeros_stay_zeros_and_what_is_not_finite_is_not_hidden() -> None:
    zeros, _, scale, _ = to_float8(drawn(32, 32) * 0, None, E4M3, LEAST_AMAX, across=True, down=True)
    assert not zeros.float().any()
    assert bool(scale.isfinite().all())
    if INTERPRETED:
        return  # numbers that are none have no meaning in its 8 bits
    for broken in (torch.nan, torch.inf):
        matrix = drawn(32, 32)
        matrix[3, 5] = broken
        for dtype in (E4M3, E5M2):
            values, turned, *_ = to_float8(matrix, None, dtype, LEAST_AMAX, across=True, down=True)
            assert bool(values.float().isnan()[3, 5])
            assert bool(turned.float().isnan()[5, 3])


@pytest.mark.parametrize("shape", [*SHAPES[:3], (16, 1000), (400, 272)])
@pytest.mark.parametrize("of", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_summed_in_float32_beside_the_search(shape: tuple[int, int], of: torch.dtype) -> None:
    """Numbers that do not cancel out, so that a rounded sum would be told from one that is not."""
    matrix = drawn(*shape, dtype=of) + 1
    plain = to_float8(matrix, None, E5M2, LEAST_AMAX, across=True, down=True)
    values, turned, scale, sums = to_float8(matrix, None, E5M2, LEAST_AMAX, across=True, down=True, summed=True)
    assert (sums.dtype, sums.shape) == (torch.float32, (shape[1],))
    torch.testing.assert_close(sums.double(), matrix.double().sum(0), rtol=1e-6, atol=1e-4)
    assert torch.equal(scale, plain[2])
    for found, expected in ((values, plain[0]), (turned, plain[1])):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    again = to_float8(matrix, None, E5M2, LEAST_AMAX, across=True, down=True, summed=True)[3]
    assert torch.equal(again, sums), "no sum depends on who is first"


def test_the_largest_number_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every part of the search that sums, also where a part has several rounds."""
    monkeypatch.setattr(float8_kernel, "MOST_PARTS", 4)
    for place in ((0, 0), (15, 255), (16, 256), (47, 271), (63, 300), (99, 303)):
        matrix = drawn(100, 304)
        matrix[place] = -1000.0
        _, _, scale, sums = to_float8(matrix, None, E4M3, LEAST_AMAX, across=True, down=False, summed=True)
        torch.testing.assert_close(scale, torch.full_like(scale, 1000 / 448))
        torch.testing.assert_close(sums.double(), matrix.double().sum(0), rtol=1e-6, atol=1e-4)


def test_the_operator_has_its_sums_from_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8_matmul, "_has_kernel", lambda device: True)
    matrix = drawn(64, 96)
    values, turned, scale, sums = torch.ops.gradus.to_float8(matrix, True, True, True)
    assert are_those(values, rescaled(matrix, scale, E5M2), matrix)
    assert torch.equal(turned.view(torch.uint8), values.view(torch.uint8).t())
    torch.testing.assert_close(sums.double(), matrix.double().sum(0), rtol=1e-6, atol=1e-4)
    assert torch.ops.gradus.to_float8(matrix, True, True)[3].numel() == 0


@pytest.mark.parametrize("shape", [(16384, 8192), (16384, 2048), (16384, 6144), (16, 16), (16, 2**20)])
def test_a_search_that_sums_keeps_a_gpu_busy_and_leaves_few_numbers(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, int]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int, int]) -> Any:
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(float8_kernel, "_largest_and_sums_of_parts", Launched())
    found, sums = float8_kernel._searched(torch.empty(shape, device="meta"), True)
    ((blocks, groups),) = grids
    assert found.numel() == blocks * groups
    assert sums.shape == shape[1:]
    if min(shape) > 16:
        assert 500 <= found.numel() <= MOST_PARTS


@pytest.mark.skipif(INTERPRETED, reason="a GPU's product of 8-bit matrices")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_and_its_gradients_are_those_without_the_kernels(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained() -> tuple[Tensor, ...]:
        x, weight, bias, g = drawn(256, 512), drawn(384, 512, seed=1), drawn(384, seed=3), drawn(256, 384, seed=2)
        for leaf in (x, weight, bias):
            leaf.requires_grad_()
        torch._dynamo.reset()
        apply = torch.compile(Float8Product.apply) if compiled else Float8Product.apply
        y = apply(x, weight, bias, "tensor")
        return (y.detach(), *torch.autograd.grad(y, (x, weight, bias), g))

    found = trained()
    monkeypatch.setattr(float8_matmul, "_has_kernel", lambda device: False)
    for one, expected in zip(found, trained(), strict=True):
        # A scale that is off by a digit rounds a few numbers of 8 bits the other way.
        assert (one - expected).float().norm() <= 0.01 * expected.float().norm()
