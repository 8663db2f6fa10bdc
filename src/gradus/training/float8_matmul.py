"""Matrix products in 8-bit floating point: each operand is scaled into the small range of the format, and back.

A product here is always a @ b.T: both operands are rows of what is summed over, the one layout that every GPU with FP8
takes. A Linear layer needs three: y = x @ w.T, dx = g @ (w.T).T and dw = g.T @ (x.T).T. What shares one scale:

| scaling | activations and gradients | weights   | gradients are |
|---------|---------------------------|-----------|---------------|
| tensor  | the whole matrix          | the same  | e5m2          |
| row     | a row                     | a row     | e4m3          |
| block   | 128 of a row              | 128 × 128 | e4m3          |
| mx      | 32 of a row, power of two | the same  | e4m3          |

One scale for a whole matrix of gradients has to span more than e4m3 can (2**-9 to 448): they are in e5m2, with more
exponents and fewer digits. Scales are of the present values (current scaling); nothing is kept from step to step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradus.schema.plan import Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MX_BLOCK = 128, 32
LEAST_AMAX = 1e-30  # of a matrix of zeros: its scale must be a number, too
_POWERS_OF_TWO = torch.float8_e8m0fnu


class Scaled(NamedTuple):
    """A matrix as 8-bit values times scales; each scale is for an equal rectangle of it."""

    values: Tensor
    scales: Tensor  # float32, two dimensions: how many rectangles there are down and across

    def whole(self) -> Tensor:
        """What it stands for, in float32."""
        return (_rectangles(self.values.float(), self.scales.shape) * self.scales[:, None, :, None]).reshape(
            self.values.shape
        )

    @property
    def T(self) -> Scaled:
        """The transposed matrix; of use only if its rectangles are as good for the other direction."""
        return Scaled(self.values.t().contiguous(), self.scales.t().contiguous())


def scaled(matrix: Tensor, rectangle: tuple[int, int], dtype: torch.dtype, *, powers_of_two: bool = False) -> Scaled:
    """The matrix in an 8-bit format, with the largest value of each rectangle at the format's largest."""
    cut = _rectangles(matrix, (matrix.shape[0] // rectangle[0], matrix.shape[1] // rectangle[1]))
    scales = cut.abs().amax(dim=(1, 3)).float().clamp(min=LEAST_AMAX) / torch.finfo(dtype).max
    if powers_of_two:  # the next one above, so that nothing is beyond the format
        scales = torch.exp2(torch.ceil(torch.log2(scales)).clamp(min=-127.0))
    return rescaled(matrix, scales, dtype)


def rescaled(matrix: Tensor, scales: Tensor, dtype: torch.dtype) -> Scaled:
    """The same with scales that are known."""
    largest = torch.finfo(dtype).max
    divided = _rectangles(matrix, scales.shape).float() * scales.reciprocal()[:, None, :, None]
    # A cast alone would turn what rounding lifts beyond the largest into not-a-number. In rows, also if the matrix is a
    # transposed view: no kernel takes columns.
    return Scaled(divided.clamp(-largest, largest).to(dtype).reshape(matrix.shape).contiguous(), scales)


def _rectangles(matrix: Tensor, parts: tuple[int, int] | torch.Size) -> Tensor:
    rows, columns = matrix.shape
    return matrix.reshape(parts[0], rows // parts[0], parts[1], columns // parts[1])


def rectangle_of(scaling: Scaling, matrix: Tensor, *, is_weight: bool) -> tuple[int, int]:
    """What shares one scale in this matrix."""
    if scaling == "tensor":
        return matrix.shape[0], matrix.shape[1]
    if scaling == "row":
        return 1, matrix.shape[1]
    if scaling == "block":
        return (BLOCK, BLOCK) if is_weight else (1, BLOCK)
    return 1, MX_BLOCK


def multiple_needed(scaling: Scaling) -> int:
    """What the sizes of all matrices have to be multiples of."""
    return {"tensor": 16, "row": 16, "block": BLOCK, "mx": BLOCK}[scaling]


def product(a: Scaled, b: Scaled, scaling: Scaling, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """a @ b.T. `fast` adds up in the fewer digits of the tensor core, which is enough for a result that is rounded.

    CPUs have no such product of blocks: there, for tests, the matrices are multiplied as they are.
    """
    device = a.values.device.type
    assert a.values.is_contiguous(), a.values.stride()
    assert b.values.is_contiguous(), b.values.stride()  # a CPU would take anything, a GPU does not
    with torch.autocast(device, enabled=False):  # which would reach into what the CPU does in place of a kernel
        if device == "cpu" and scaling in ("block", "mx"):
            return (a.whole() @ b.whole().T).to(dtype)
        # torch.nn.functional.scaled_mm, the public name, is newer than what inductor of torch 2.11 compiles.
        return torch._scaled_mm(
            a.values,
            b.values.t(),
            _laid_out(a.scales, a.values, scaling),
            _laid_out(b.scales, b.values, scaling).t(),
            out_dtype=dtype,
            use_fast_accum=fast and scaling != "block",  # whose kernels add up in fp32 only
        )


def _laid_out(scales: Tensor, values: Tensor, scaling: Scaling) -> Tensor:
    """The scales as the kernels want them in memory; those of the second operand are transposed afterwards."""
    if scaling == "tensor":
        return scales.reshape(())
    if scaling == "row":
        return scales.contiguous()
    if scaling == "mx":
        return _swizzled(scales.to(_POWERS_OF_TWO))
    if scales.shape[0] == values.shape[0]:  # 1 × 128: neighbouring rows lie side by side
        return scales.t().contiguous().t()
    # 128 × 128: each row of scales begins at a multiple of 16 bytes
    columns = scales.shape[1]
    return F.pad(scales, (0, -columns % 4))[:, :columns]


def _swizzled(scales: Tensor) -> Tensor:
    """The order in which Blackwell reads scales: tiles of 128 × 4, each as 32 rows of 4 times 4."""
    rows, columns = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128)).view(_POWERS_OF_TWO)
    tiles = padded.view(-(-rows // 128), 128, -(-columns // 4), 4).permute(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1)


class Float8Product(torch.autograd.Function):
    """x @ weight.T with all three products of a training step in 8 bits. Rows of x are a multiple of what is needed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: Scaling) -> Tensor:
        x8, w8 = _in_rows(x, scaling), _of_weight(weight, scaling)
        # With one scale, the 8-bit x serves the backward product too, in half the memory. Rows are scaled anew there,
        # in the other direction, from the values themselves.
        kept = tuple(x8) if scaling == "tensor" else (x,)
        ctx.scaling, ctx.dtype = scaling, x.dtype
        ctx.save_for_backward(weight, w8.scales, *kept)
        return product(x8, w8, scaling, x.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (g,) = gradients
        weight, w_scales, *kept = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        g8 = _in_rows(g, scaling, E5M2 if scaling == "tensor" else E4M3)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            # The rectangles of a weight are as good for its transpose, unless they are rows.
            is_symmetric = scaling in ("tensor", "block")
            w8_t = rescaled(weight, w_scales, E4M3).T if is_symmetric else _in_rows(weight.t(), scaling)
            dx = product(g8, w8_t, scaling, ctx.dtype)
        if ctx.needs_input_grad[1]:
            if scaling == "tensor":
                g8_t, x8_t = g8.T, Scaled(*kept).T
            else:
                g8_t, x8_t = _in_rows(g.t(), scaling), _in_rows(kept[0].t(), scaling)
            dw = product(g8_t, x8_t, scaling, ctx.dtype).to(weight.dtype)
        return dx, dw, None


def _in_rows(matrix: Tensor, scaling: Scaling, dtype: torch.dtype = E4M3) -> Scaled:
    return scaled(matrix, rectangle_of(scaling, matrix, is_weight=False), dtype, powers_of_two=scaling == "mx")


def _of_weight(weight: Tensor, scaling: Scaling) -> Scaled:
    return scaled(weight, rectangle_of(scaling, weight, is_weight=True), E4M3, powers_of_two=scaling == "mx")
