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

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gradus.schema.plan import Scaling
from gradus.training.device import has_triton

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK, MX_BLOCK = 128, 32
LEAST_AMAX = 1e-30  # of a matrix of zeros: its scale must be a number, too
_POWERS_OF_TWO = torch.float8_e8m0fnu
_TAKES_A_BIAS = (torch.bfloat16, torch.float16)  # what a product with one scale can be in, and add a bias itself


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


def product(
    a: Scaled, b: Scaled, scaling: Scaling, dtype: torch.dtype, *, bias: Tensor | None = None, fast: bool = False
) -> Tensor:
    """a @ b.T, and a bias for each column, where the kernel takes one before its result is rounded.

    `fast` adds up in the fewer digits of the tensor core, which is enough for a result that is rounded.

    CPUs have no such product of blocks: there, for tests, the matrices are multiplied as they are.
    """
    device = a.values.device.type
    assert a.values.is_contiguous(), a.values.stride()
    assert b.values.is_contiguous(), b.values.stride()  # a CPU would take anything, a GPU does not
    after = bias = None if bias is None else bias.to(dtype)
    with torch.autocast(device, enabled=False):  # which would reach into what the CPU does in place of a kernel
        if device == "cpu" and scaling in ("block", "mx"):
            y = (a.whole() @ b.whole().T).to(dtype)
        else:
            inside, after = (bias, None) if scaling == "tensor" and dtype in _TAKES_A_BIAS else (None, bias)
            # torch.nn.functional.scaled_mm, the public name, is newer than what inductor of torch 2.11 compiles.
            y = torch._scaled_mm(
                a.values,
                b.values.t(),
                _laid_out(a.scales, a.values, scaling),
                _laid_out(b.scales, b.values, scaling).t(),
                bias=inside,
                out_dtype=dtype,
                use_fast_accum=fast and scaling != "block",  # whose kernels add up in fp32 only
            )
    return y if after is None else y + after


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


# With one scale for all of a matrix. As operators, they are kernels of their own on a GPU, whoever compiles the model.
_library: Any = torch.library.Library("gradus", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "to_float8(Tensor matrix, bool gradient, bool turned, bool summed=False) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define("turned_float8(Tensor matrix, Tensor scale) -> Tensor")


def _to_float8(
    matrix: Tensor, gradient: bool, turned: bool, summed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The matrix in 8 bits, the same transposed (or nothing, unless it is `turned`), the scale of both, and the sum of
    its rows in float32 (or nothing, unless it is `summed`)."""
    dtype = E5M2 if gradient else E4M3
    if _has_kernel(matrix.device):
        from gradus.training.float8_kernel import to_float8

        return to_float8(matrix, None, dtype, LEAST_AMAX, across=True, down=turned, summed=summed)
    small = scaled(matrix, (matrix.shape[0], matrix.shape[1]), dtype)
    of_turned = small.T.values if turned else small.values.new_empty((0, 0))
    sums = matrix.sum(0, dtype=torch.float32) if summed else small.scales.new_empty(0)
    return small.values, of_turned, small.scales, sums


def _turned_float8(matrix: Tensor, scale: Tensor) -> Tensor:
    """The transposed matrix in 8 bits, with a scale that is known."""
    if _has_kernel(matrix.device):
        from gradus.training.float8_kernel import to_float8

        return to_float8(matrix, scale, E4M3, LEAST_AMAX, across=False, down=True)[1]
    return rescaled(matrix, scale, E4M3).T.values


def _to_float8_without_values(
    matrix: Tensor, gradient: bool, turned: bool, summed: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtype = E5M2 if gradient else E4M3
    rows, columns = matrix.shape
    of_turned = (columns, rows) if turned else (0, 0)
    scale = matrix.new_empty((1, 1), dtype=torch.float32)
    sums = matrix.new_empty(columns if summed else 0, dtype=torch.float32)
    return matrix.new_empty((rows, columns), dtype=dtype), matrix.new_empty(of_turned, dtype=dtype), scale, sums


def _turned_without_values(matrix: Tensor, scale: Tensor) -> Tensor:
    return matrix.new_empty((matrix.shape[1], matrix.shape[0]), dtype=E4M3)


_library.impl("to_float8", _to_float8, "CompositeExplicitAutograd")
_library.impl("turned_float8", _turned_float8, "CompositeExplicitAutograd")
torch.library.register_fake("gradus::to_float8", _to_float8_without_values, lib=_library)
torch.library.register_fake("gradus::turned_float8", _turned_without_values, lib=_library)


@cache
def _has_kernel(device: torch.device) -> bool:
    """Elsewhere, tensors without values among them, it is what torch's own operators make of it."""
    return device.type == "cuda" and torch.version.hip is None and has_triton()


class Float8Product(torch.autograd.Function):
    """x @ weight.T + bias with all three products of a training step in 8 bits, and the bias as it is.

    Rows of x are a multiple of what is needed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, scaling: Scaling) -> Tensor:
        ctx.scaling, ctx.dtype, ctx.bias_dtype = scaling, x.dtype, None if bias is None else bias.dtype
        if scaling == "tensor":
            return _forward_with_one_scale(ctx, x, weight, bias)
        x8, w8 = _in_rows(x, scaling), _of_weight(weight, scaling)
        # Rows are scaled anew in backward, in the other direction, from the values themselves.
        ctx.save_for_backward(weight, w8.scales, x)
        return product(x8, w8, scaling, x.dtype, bias=bias, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (g,) = gradients
        scaling: Scaling = ctx.scaling
        if scaling == "tensor":
            return (*_backward_with_one_scale(ctx, g), None)
        weight, w_scales, x = ctx.saved_tensors
        g8 = _in_rows(g, scaling)
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            # The rectangles of a weight are as good for its transpose, unless they are rows.
            is_symmetric = scaling == "block"
            w8_t = rescaled(weight, w_scales, E4M3).T if is_symmetric else _in_rows(weight.t(), scaling)
            dx = product(g8, w8_t, scaling, ctx.dtype)
        if ctx.needs_input_grad[1]:
            g8_t, x8_t = _in_rows(g.t(), scaling), _in_rows(x.t(), scaling)
            dw = product(g8_t, x8_t, scaling, ctx.dtype).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            db = g.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, db, None


def _forward_with_one_scale(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The 8-bit x serves the backward product too, in half the memory, transposed as that wants it."""
    x8, x8_t, x_scale, _ = torch.ops.gradus.to_float8(x, False, ctx.needs_input_grad[1])
    w8, _, w_scale, _ = torch.ops.gradus.to_float8(weight, False, False)
    ctx.save_for_backward(weight, w_scale, x8_t, x_scale)
    return product(Scaled(x8, x_scale), Scaled(w8, w_scale), "tensor", x.dtype, bias=bias, fast=True)


def _backward_with_one_scale(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    weight, w_scale, x8_t, x_scale = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
    g8, g8_t, g_scale, sums = torch.ops.gradus.to_float8(g, True, of_weight, of_bias)
    dx = dw = None
    if of_x:
        w8_t = torch.ops.gradus.turned_float8(weight, w_scale)
        dx = product(Scaled(g8, g_scale), Scaled(w8_t, w_scale), "tensor", ctx.dtype)
    if of_weight:
        dw = product(Scaled(g8_t, g_scale), Scaled(x8_t, x_scale), "tensor", ctx.dtype).to(weight.dtype)
    return dx, dw, sums.to(ctx.bias_dtype) if of_bias else None


def _in_rows(matrix: Tensor, scaling: Scaling) -> Scaled:
    return scaled(matrix, rectangle_of(scaling, matrix, is_weight=False), E4M3, powers_of_two=scaling == "mx")


def _of_weight(weight: Tensor, scaling: Scaling) -> Scaled:
    return scaled(weight, rectangle_of(scaling, weight, is_weight=True), E4M3, powers_of_two=scaling == "mx")
