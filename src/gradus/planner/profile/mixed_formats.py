"""Mixed formats: operands that differ in their number format, which a device refuses and fake tensors let pass.

Where a function is called with autocast off, nobody casts its arguments: a product of float32 and bfloat16 then ends a
run in its first step. What is refused here is refused by the kernels of the CPU and of CUDA alike (torch 2.11 to 2.13).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Of each operator, the arguments whose formats are one, by position: those that are named in the message first.
_ALIKE = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "mv": (0, 1),
    "addmm": (1, 2, 0),
    "addbmm": (1, 2, 0),
    "baddbmm": (1, 2, 0),
    "addmv": (1, 2, 0),
    "convolution": (0, 1, 2),
    "index_add": (0, 3),
    "index_copy": (0, 3),
    "index_put": (0, 2),
}
# What is normalised and its weights, which may be wider, on a CPU at least, but not narrower.
_NO_NARROWER = {"native_layer_norm": (0, 2, 3), "native_group_norm": (0, 1, 2)}


def check_formats(func: Any, name: str, args: tuple[Any, ...]) -> None:
    """Fail as the kernel would. `name` is that of the operator, without namespace and overload."""
    base = name.removesuffix("_")
    if (places := _ALIKE.get(base)) is not None:
        if base == "index_put" and isinstance(args[2], Tensor) and args[2].numel() == 1:
            return  # a number that is filled in
        if func._overloadname.startswith("dtype"):  # sums in a wider format than the products
            places = places[:2]
        _check_alike(func, args, places)
    elif (places := _NO_NARROWER.get(base)) is not None:
        of = args[places[0]]
        wide = [n for n in places[1:] if isinstance(args[n], Tensor) and args[n].itemsize >= of.itemsize]
        _check_alike(func, args, (places[0], *(n for n in places[1:] if n not in wide)))


def check_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    """As `scaled_dot_product_attention` looks at its arguments, before it chooses a kernel."""
    if not q.dtype == k.dtype == v.dtype:
        raise RuntimeError(
            "Expected query, key, and value to have the same dtype, but got query.dtype: "
            f"{_said(q)} key.dtype: {_said(k)} and value.dtype: {_said(v)} instead."
        )
    if mask is not None and mask.is_floating_point() and mask.itemsize < q.itemsize:
        raise RuntimeError(
            "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: "
            f"{_said(mask)} and query.dtype: {_said(q)} instead."
        )


def _check_alike(func: Any, args: tuple[Any, ...], places: tuple[int, ...]) -> None:
    names = [argument.name for argument in func._schema.arguments]
    given = [(names[n], args[n]) for n in places if n < len(args) and isinstance(args[n], Tensor)]
    given = [(name, tensor) for name, tensor in given if tensor.is_floating_point()]
    for name, tensor in given[1:]:
        first, leading = given[0]
        if tensor.dtype != leading.dtype:
            raise RuntimeError(
                f"{first} and {name} must have the same dtype, but got {_said(leading)} and {_said(tensor)}"
            )


def _said(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
