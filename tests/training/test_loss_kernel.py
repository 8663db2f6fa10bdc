"""The loss kernel: what it computes is what torch computes in float64, and a loss in chunks with it is the same loss.

Without a GPU the kernel is interpreted (conftest.py).
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.models.output import IGNORED
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.resolve import resolved
from gradus.schema.recipe import Recipe
from gradus.training.chunked_loss import ALIGNED_ROWS, ChunkedLoss, added_product, padded, work_of
from gradus.training.loss_placement import chunk_loss

pytest.importorskip("triton")

from gradus.training.loss_kernel import loss_and_gradient, scaled

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INTERPRETED = DEVICE.type == "cpu"
# The relative error of a number that is rounded. Triton's interpreter cuts off the digits that bf16 has not.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-11}


def drawn(rows: int, columns: int, padding: int, dtype: torch.dtype, ignored: bool = True) -> tuple[Tensor, Tensor]:
    """Logits, with what is no number where there is padding, and targets, one of which is not predicted."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(rows, columns + padding, generator=generator)).to(dtype)
    logits[:, columns:] = float("nan")
    targets = torch.randint(0, columns, (rows,), generator=generator)
    if ignored:
        targets[rows // 2] = IGNORED
    return logits.to(DEVICE), targets.to(DEVICE)


def exactly(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), exact)
    return losses.detach(), gradient


# Less than a block of the kernel, whole ones, whole ones and a bit, and a last one that is padding but for a number.
@pytest.mark.parametrize(
    ("columns", "padding"), [(1, 0), (2, 62), (17, 0), (101, 27), (8192, 0), (16384, 0), (16385, 63), (20001, 31)]
)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_losses_and_gradients_are_those_of_torch(columns: int, padding: int, dtype: torch.dtype) -> None:
    logits, targets = drawn(7, columns, padding, dtype)
    losses, gradient = exactly(logits[:, :columns], targets)
    found = loss_and_gradient(logits, targets, columns)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits[:, :columns].double(), gradient, rtol=ROUNDING[dtype] + 1e-6, atol=1e-6)
    assert not logits[:, columns:].any(), "padding has no gradient"
    assert not logits[3].any(), "nor has what is not predicted"
    assert found[3] == 0


def test_logits_may_be_large_or_infinitely_small() -> None:
    logits, targets = drawn(4, 300, 0, torch.float32, ignored=False)
    logits *= 1e4
    logits[1, 7:] = float("-inf")
    logits[2, targets[2]] = logits[2].max() + 1
    targets[1] = 3
    losses, gradient = exactly(logits, targets)
    found = loss_and_gradient(logits, targets, 300)
    torch.testing.assert_close(found.double(), losses, rtol=1e-5, atol=1e-2)
    torch.testing.assert_close(logits.double(), gradient, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("target", [-1, 300, 301])
def test_a_target_that_is_no_column_makes_a_loss_that_is_no_number(target: int) -> None:
    logits, targets = drawn(3, 300, 20, torch.float32)
    targets[2] = target
    assert loss_and_gradient(logits, targets, 300).isnan().tolist() == [False, False, True]


def test_logits_that_are_no_numbers_make_such_a_loss() -> None:
    logits, targets = drawn(3, 300, 20, torch.float32, ignored=False)
    logits[1, 7] = float("nan")
    assert loss_and_gradient(logits, targets, 300).isnan().tolist() == [False, True, False]


def test_targets_need_not_lie_side_by_side() -> None:
    logits, targets = drawn(5, 40, 0, torch.float32)
    apart = torch.stack([targets, targets + 1], dim=1)[:, 0]
    assert torch.equal(loss_and_gradient(logits.clone(), apart, 40), loss_and_gradient(logits, targets, 40))


@pytest.mark.parametrize(("of", "to"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_gradients_are_scaled_and_rounded_once(of: torch.dtype, to: torch.dtype) -> None:
    tensor = torch.randn(67, 45, generator=torch.Generator().manual_seed(2)).to(DEVICE, of)
    factor = torch.tensor(1 / 3, device=DEVICE)
    found = scaled(tensor, factor, to)
    assert found.dtype == to
    torch.testing.assert_close(found.double(), tensor.double() * factor.double(), rtol=ROUNDING[to], atol=0.0)
    rows = scaled(tensor[:, :20], factor, to)  # which do not lie side by side
    assert torch.equal(rows, found[:, :20])


# --- a loss in chunks

SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 12, "vocabulary": 101}


def text(vocabulary: int = 101) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, vocabulary, (2, 13), generator=torch.Generator().manual_seed(0))
    targets = tokens[:, 1:].clone()
    targets[0, 3:5] = IGNORED
    return tokens[:, :-1].to(DEVICE), targets.to(DEVICE)


def three_ways(use: str, frozen: bool = False, **settings: Any) -> list[nn.Module]:
    """A model with the whole loss in float64, and in float32 in chunks, compiled by torch or with the kernel."""
    torch.manual_seed(0)
    whole = catalogue.build(use, {**SMALL, **settings}).to(DEVICE)
    if frozen:
        whole.head.output.requires_grad_(False)
    parts, kernel = copy.deepcopy(whole), copy.deepcopy(whole)
    chunk_loss(parts, 3, None, None, kernel=False)
    chunk_loss(kernel, 3, None, None, kernel=True)
    return [whole.double(), parts, kernel]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def furthest(found: nn.Module, expected: nn.Module) -> float:
    """The largest error of a gradient, relative to the largest of its numbers; that of keys' biases is nothing."""
    assert gradients(found).keys() == gradients(expected).keys()
    largest = max(g.abs().max() for g in gradients(expected).values())
    errors = [
        (gradients(found)[name] - g).abs().max() / g.abs().max().clamp(min=1e-3 * largest)
        for name, g in gradients(expected).items()
    ]
    return max(float(error) for error in errors)


@pytest.mark.parametrize(
    ("use", "settings"),
    [
        ("gpt", {}),
        ("gpt", {"tied": False}),
        ("bert", {}),  # with a bias
        ("gpt", {"tied": False, "frozen": True}),
    ],
)
def test_a_model_learns_the_same_with_the_kernel(use: str, settings: dict[str, Any]) -> None:
    torch.set_float32_matmul_precision("highest")  # a run in this process may have allowed less
    exact, parts, kernel = three_ways(use, **settings)
    for model in (exact, parts, kernel):
        output = model(*text())
        (output.loss_sum / output.count).backward()
        assert output.loss_sum.item() == pytest.approx(exact(*text()).loss_sum.item(), rel=1e-6)
    assert furthest(parts, exact) < 2e-5
    assert furthest(kernel, exact) < 2e-5


@pytest.mark.parametrize("use", ["gpt", "bert"])
def test_in_16_bits_with_an_odd_vocabulary_it_is_as_near_to_the_truth(use: str) -> None:
    """509 columns: the matrix and its gradient have three more rows on the way."""
    models = three_ways(use, width=64, vocabulary=509)
    for model in models:
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=model is not models[0]):
            output = model(*text(509))
        (output.loss_sum / output.count).backward()

    def error(model: nn.Module) -> float:
        truth = gradients(models[0])
        squares = [
            ((g - truth[n]) ** 2).sum() / (truth[n] ** 2).sum().clamp(min=1e-12) for n, g in gradients(model).items()
        ]
        return float(torch.stack(squares).median().sqrt())

    _, parts, kernel = models
    assert error(kernel) < 1.1 * error(parts)
    assert all(g.dtype == torch.float32 for g in gradients(kernel).values())


def layer_of(columns: int, dtype: torch.dtype, bias: bool = True) -> tuple[nn.Linear, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    layer = nn.Linear(16, columns, bias=bias)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = torch.randn(4, 6, 16, generator=generator).to(DEVICE, dtype).requires_grad_()
    targets = torch.randint(0, columns, (4, 6), generator=generator).to(DEVICE)
    return layer.to(DEVICE, dtype), x, targets


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [False, True])
def test_gradients_have_the_format_of_what_they_are_of_and_a_factor_keeps_its_digits(
    dtype: torch.dtype, kernel: bool
) -> None:
    layer, x, targets = layer_of(301, dtype)
    (ChunkedLoss(3, kernel)(layer, x, targets).loss_sum / 3).backward()
    wide = copy.deepcopy(layer).double()
    for parameter in wide.parameters():
        parameter.grad = None
    exact = x.detach().double().requires_grad_()
    (F.cross_entropy(wide(exact).flatten(0, 1), targets.flatten(), reduction="sum") / 3).backward()
    pairs = [(x, exact), (layer.weight, wide.weight), (layer.bias, wide.bias)]
    for narrow, truth in pairs:
        assert narrow.grad is not None
        assert truth.grad is not None
        assert narrow.grad.dtype == dtype
        # What every number is wrong by, beside what each is: a third, in bf16, is wrong by 0.2 %.
        common = float((narrow.grad.double() * truth.grad).sum() / (truth.grad**2).sum()) - 1
        assert abs(common) < (ROUNDING[dtype] / 2 if kernel and INTERPRETED else 1e-3)


@pytest.mark.parametrize("kernel", [False, True])
def test_backward_a_second_time_gives_the_same(kernel: bool) -> None:
    layer, x, targets = layer_of(301, torch.float32)
    loss = ChunkedLoss(3, kernel)(layer, x, targets).loss_sum
    asked = (x, *layer.parameters())
    first = [g.clone() for g in torch.autograd.grad(loss * 2, asked, retain_graph=True)]
    assert all(map(torch.equal, first, torch.autograd.grad(loss * 2, asked, retain_graph=True)))
    (only,) = torch.autograd.grad(loss, [layer.weight])
    assert torch.equal(2 * only, first[1])


def test_rows_that_a_matrix_gets_are_zeros_and_there_is_one_copy_at_most() -> None:
    matrix = torch.randn(101, 8)
    found = padded(matrix, 64, torch.bfloat16)
    assert found.shape == (128, 8)
    assert torch.equal(found[:101], matrix.bfloat16())
    assert not found[101:].any()
    assert padded(matrix[0], 64, torch.float32).shape == (64,)
    assert padded(matrix[:64], 64, torch.float32).data_ptr() == matrix.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "kernel", "rows"),
    [
        (torch.bfloat16, True, 320),
        (torch.float16, True, 320),
        (torch.bfloat16, False, 301),  # the compiler pads what it multiplies by itself
        (torch.float32, True, 301),  # it is the parameter itself
    ],
)
def test_in_16_bits_the_kernel_gets_aligned_rows(dtype: torch.dtype, kernel: bool, rows: int) -> None:
    layer, x, targets = layer_of(301, dtype)
    work = work_of(x, layer.weight, layer.bias, targets, kernel)
    assert (len(work.matrix), work.columns, work.kernel) == (rows, 301, kernel)
    assert work.offset is not None
    assert len(work.offset) == rows
    assert ALIGNED_ROWS == 64


def test_without_a_gpu_and_in_float64_there_is_no_kernel() -> None:
    layer, x, targets = layer_of(301, torch.float64)
    assert not work_of(x, layer.weight, None, targets, True).kernel
    layer, x, targets = layer_of(301, torch.float32)
    assert work_of(x, layer.weight, None, targets, None).kernel == (DEVICE.type == "cuda")
    assert not work_of(x.cpu(), layer.weight.cpu(), None, targets.cpu(), None).kernel


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_products_are_added_up_in_32_bits_or_more_where_the_sum_is(dtype: torch.dtype) -> None:
    left, right = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((8, 24), (24, 8)))
    total = added_product(None, left, right)
    assert total.dtype == torch.promote_types(dtype, torch.float32)
    again = added_product(total, left, right)
    assert again.data_ptr() == total.data_ptr()
    torch.testing.assert_close(again.double(), 2 * left.double() @ right.double(), rtol=2e-2, atol=5e-2)


def test_a_plan_knows_that_the_gradient_takes_the_place_of_the_logits() -> None:
    """And that products of 16 bits are added to what has 32 as fast as any of 16."""
    document = {"model": {"use": "gpt", **SMALL}, "data": {"use": "synthetic-tokens", "samples": 8, "context": 12}}
    rest = {"name": "small", "batch": 4, "steps": 1, "optimizer": {"lr": 0.1}}
    recipe = resolved(Recipe.from_document({**rest, **document}))
    profile = profile_of(recipe, precision="bf16", capability=(9, 0), loss_chunks=3)
    (part,) = [part for part in profile.parts if any("loss" in op.module for op in part.forward)]
    ours = [operator for operator in part.forward if operator.module.endswith("chunked_loss")]
    assert [operator.name for operator in ours].count("loss_and_gradient_") == 3
    assert all(operator.eager for operator in ours)
    assert {operator.dtype for operator in ours if operator.kind == "matmul"} == {"bfloat16"}
    logits = 2 * 12 / 3 * 128 * 2  # bytes of a chunk of two samples, in 16 bits, with padding
    chunks = [s for s in part.storages if s.bytes.at(2) == logits and s.bytes.per_sample > 0]
    assert len(chunks) == 3
    assert all(first.last < second.made for first, second in pairwise(chunks)), "one at a time"


def test_triton_is_loaded_by_nothing_but_the_kernel() -> None:
    """Not even where a loss is computed, if that is not on a GPU."""
    code = """
import sys, gradus, torch
from gradus.training.chunked_loss import ChunkedLoss
ChunkedLoss(2)(torch.nn.Linear(4, 9), torch.randn(6, 4, requires_grad=True), torch.arange(6)).loss_sum.backward()
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
