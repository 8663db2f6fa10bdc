"""A kernel for the loss of some tokens: cross-entropy, and its gradient by the logits in their place.

The compiler makes two passes over logits for the loss, and two for the gradient, which it writes beside them. Here a
program has one row, which stays in the cache between its two passes, and the gradient takes the logits' memory.

    python benchmarks/loss_kernel.py      # is it right? On a machine without a GPU with TRITON_INTERPRET=1
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from gradus.models.output import IGNORED

BLOCK, WARPS = 8192, 16


@triton.jit
def _row(logits, targets, losses, columns, ignored, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    valid = target != ignored
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    normaliser = largest + tl.log(total)
    wanted = tl.load(logits + tl.where(valid, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(valid, normaliser - wanted, 0.0))
    for start in range(0, columns, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(logits + at, mask=at < columns, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - normaliser) - tl.where(at == target, 1.0, 0.0)
        gradient = tl.where(valid, gradient, 0.0)
        tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < columns)


def loss_and_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each row (rows, columns); `logits` become its gradient."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(columns))
    _row[(rows,)](logits, targets, losses, columns, IGNORED, logits.stride(0), BLOCK=block, num_warps=WARPS)
    return losses


class KernelOfLoss(nn.Module):
    """In place of gradus's `PartOfLoss`."""

    def forward(self, rows: Tensor, matrix: Tensor, offset: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(rows, matrix, offset)
        return loss_and_gradient(logits, targets).sum(), logits


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right in one product that adds in fp32."""
    torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, out=total)


def check(device: torch.device, columns: int, dtype: torch.dtype) -> float:
    """How far the kernel is from torch, relative to the largest gradient."""
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(6, columns, generator=generator)).to(device, dtype)
    targets = torch.randint(0, columns, (6,), generator=generator).to(device)
    targets[2] = IGNORED
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, targets, ignore_index=IGNORED, reduction="none")
    expected.sum().backward()
    assert exact.grad is not None
    losses = loss_and_gradient(logits, targets)
    assert torch.allclose(losses.double(), expected, rtol=1e-5, atol=1e-6)
    return float((logits.double() - exact.grad).abs().max() / exact.grad.abs().max())


if __name__ == "__main__":
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for columns in (17, 4096, 50257):
        for dtype in (torch.float32, torch.bfloat16):
            print(f"{columns} columns, {dtype}: {check(where, columns, dtype):.1e} from torch")
