"""What kernels refuse because formats differ, a trace refuses; what they take, it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gradus.planner.profile.expected import as_expected
from gradus.planner.profile.mixed_formats import check_attention
from gradus.planner.profile.recording import Call, Recorder

BF16, FP32 = torch.bfloat16, torch.float32
N = 8


def of(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype)


def rows() -> Tensor:
    return torch.arange(N)


Two = Callable[[torch.dtype, torch.dtype], Any]
CASES: dict[str, Two] = {
    "mm": lambda a, b: of(N, N, dtype=a) @ of(N, N, dtype=b),
    "matmul": lambda a, b: of(2, 2, N, N, dtype=a) @ of(2, 2, N, N, dtype=b),
    "mv": lambda a, b: of(N, N, dtype=a) @ of(N, dtype=b),
    "dot": lambda a, b: of(N, dtype=a) @ of(N, dtype=b),
    "einsum": lambda a, b: torch.einsum("bij,bjk->bik", of(2, N, N, dtype=a), of(2, N, N, dtype=b)),
    "linear": lambda a, b: F.linear(of(2, N, N, dtype=a), of(N, N, dtype=b), of(N, dtype=b)),
    "bias": lambda a, b: F.linear(of(2, N, N, dtype=a), of(N, N, dtype=a), of(N, dtype=b)),
    "bias that is added": lambda a, b: F.linear(
        of(N, 2, N, dtype=a).transpose(0, 1), of(N, N, dtype=a), of(N, dtype=b)
    ),
    "addmm": lambda a, b: torch.addmm(of(N, dtype=a), of(N, N, dtype=a), of(N, N, dtype=b)),
    "addmm_": lambda a, b: of(N, N, dtype=b).addmm_(of(N, N, dtype=a), of(N, N, dtype=a)),
    "baddbmm": lambda a, b: torch.baddbmm(of(1, N, N, dtype=a), of(2, N, N, dtype=a), of(2, N, N, dtype=b)),
    "addbmm": lambda a, b: torch.addbmm(of(N, N, dtype=a), of(2, N, N, dtype=a), of(2, N, N, dtype=b)),
    "addmv": lambda a, b: torch.addmv(of(N, dtype=a), of(N, N, dtype=a), of(N, dtype=b)),
    "conv1d": lambda a, b: F.conv1d(of(2, N, N, dtype=a), of(N, N, 3, dtype=b)),
    "conv2d": lambda a, b: F.conv2d(of(2, N, N, N, dtype=a), of(N, 1, 3, 3, dtype=b), groups=N),
    "bias of conv2d": lambda a, b: F.conv2d(of(2, N, N, N, dtype=a), of(N, N, 3, 3, dtype=a), of(N, dtype=b)),
    "conv_transpose2d": lambda a, b: F.conv_transpose2d(of(2, N, N, N, dtype=a), of(N, N, 3, 3, dtype=b)),
    "layer_norm": lambda a, b: F.layer_norm(of(N, N, dtype=a), (N,), of(N, dtype=b), of(N, dtype=b)),
    "layer_norm without bias": lambda a, b: F.layer_norm(of(N, N, dtype=a), (N,), of(N, dtype=b)),
    "group_norm": lambda a, b: F.group_norm(of(2, N, N, dtype=a), 2, of(N, dtype=b), of(N, dtype=b)),
    "rms_norm": lambda a, b: F.rms_norm(of(N, N, dtype=a), (N,), of(N, dtype=b)),
    "index_add": lambda a, b: of(N, N, dtype=a).index_add(0, rows(), of(N, N, dtype=b)),
    "index_copy_": lambda a, b: of(N, N, dtype=a).index_copy_(0, rows(), of(N, N, dtype=b)),
    "rows that are set": lambda a, b: of(N, N, dtype=a).__setitem__(rows(), of(N, N, dtype=b)),
    "a slice that is set": lambda a, b: of(N, N, dtype=a).__setitem__(slice(4), of(4, N, dtype=b)),
    "add": lambda a, b: of(N, dtype=a) + of(N, dtype=b),
    "cat": lambda a, b: torch.cat((of(N, dtype=a), of(N, dtype=b))),
    "where": lambda a, b: torch.where(of(N, dtype=FP32) > 0, of(N, dtype=a), of(N, dtype=b)),
    "outer": lambda a, b: torch.outer(of(N, dtype=a), of(N, dtype=b)),
}


def outcome(function: Two, *dtypes: torch.dtype) -> str:
    try:
        function(*dtypes)
    except RuntimeError:
        return "refused"
    return "taken"


def traced(function: Two, *dtypes: torch.dtype) -> str:
    recorder = Recorder(as_expected, lambda *_: ())
    recorder.enter(Call("all", False))
    with FakeTensorMode(), recorder:
        return outcome(function, *dtypes)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, FP32), (BF16, BF16), (FP32, FP32)])
def test_a_trace_refuses_what_kernels_refuse(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    assert traced(CASES[name], *dtypes) == outcome(CASES[name], *dtypes)


def test_a_refusal_names_both_operands() -> None:
    recorder = Recorder(as_expected, lambda *_: ())
    recorder.enter(Call("all", False))
    said = "mat1 and mat2 must have the same dtype, but got float32 and bfloat16"
    with FakeTensorMode(), recorder, pytest.raises(RuntimeError, match=said):
        CASES["addmm"](FP32, BF16)


ADDS_UP = pytest.param(
    FP32, marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot do it without values")
)


@pytest.mark.parametrize("out", [None, ADDS_UP])
def test_products_of_16_bits_may_be_added_up_in_32(out: torch.dtype | None) -> None:
    def product(a: torch.dtype, b: torch.dtype) -> Tensor:
        dtype = {} if out is None else {"out_dtype": out}
        return torch.addmm(of(N, N, dtype=a), of(N, N, dtype=b), of(N, N, dtype=b), **dtype)

    assert traced(product, FP32, BF16) == ("refused" if out is None else "taken")


@pytest.mark.parametrize("dtypes", [(FP32, BF16), (BF16, FP32), (BF16, BF16)])
@pytest.mark.parametrize("odd", ["query", "value", "attn_mask"])
def test_attention_refuses_what_torch_does(odd: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    def given(a: torch.dtype, b: torch.dtype) -> dict[str, Tensor]:
        shapes = {"query": (2, 2, N, N), "key": (2, 2, N, N), "value": (2, 2, N, N), "attn_mask": (N, N)}
        return {name: of(*shape, dtype=b if name == odd else a) for name, shape in shapes.items()}

    found = outcome(lambda a, b: check_attention(*given(a, b).values()), *dtypes)
    assert found == outcome(lambda a, b: F.scaled_dot_product_attention(**given(a, b)), *dtypes)
