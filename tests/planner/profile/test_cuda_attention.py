"""The kernel that torch would choose on CUDA is chosen, and what it keeps for backward is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_runs import AMPERE, HOPPER, VOLTA, on_fake_gpu
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from gradus.planner.profile.cuda_attention import Attention, chosen_kernel

ADA, BLACKWELL = (8, 9), (10, 0)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def attention(
    dtype: torch.dtype = BF16,
    *,
    width: int = 64,
    value_width: int | None = None,
    heads: int = 8,
    key_value_heads: int | None = None,
    queries: int = 128,
    keys: int = 128,
    mask: tuple[int, ...] | None = None,
    learned_mask: bool = False,
    **options: Any,
) -> Attention:
    groups = key_value_heads or heads
    q = torch.empty(2, heads, queries, width, dtype=dtype, requires_grad=True)
    k = torch.empty(2, groups, keys, width, dtype=dtype, requires_grad=True)
    v = torch.empty(2, groups, keys, value_width or width, dtype=dtype, requires_grad=True)
    added = None if mask is None else torch.empty(mask, dtype=dtype, requires_grad=learned_mask)
    return Attention(q, k, v, added, grouped=groups != heads, **options)


@pytest.mark.parametrize(
    ("kernel", "capability", "case"),
    [
        # cuDNN first on Hopper and Blackwell, flash attention elsewhere
        ("cudnn", HOPPER, {"causal": True}),
        ("cudnn", BLACKWELL, {"dtype": FP16}),
        ("flash", AMPERE, {"causal": True}),
        ("flash", ADA, {}),
        ("efficient", VOLTA, {"dtype": FP16}),
        ("math", VOLTA, {}),  # bf16 is for Ampere and later
        # dtype
        ("efficient", HOPPER, {"dtype": FP32}),
        ("math", HOPPER, {"dtype": FP64}),
        # width
        ("flash", HOPPER, {"width": 256}),
        ("flash", HOPPER, {"width": 20}),  # padded
        ("math", HOPPER, {"width": 260}),
        ("efficient", HOPPER, {"width": 264}),
        ("cudnn", HOPPER, {"width": 192, "value_width": 128}),
        ("efficient", AMPERE, {"width": 192, "value_width": 128}),
        ("math", HOPPER, {"dtype": FP32, "width": 30}),
        ("flash", AMPERE, {"width": 224}),
        ("efficient", ADA, {"width": 224}),  # too much for its shared memory in backward
        # masks
        ("cudnn", HOPPER, {"mask": (2, 1, 128, 128)}),
        ("efficient", AMPERE, {"mask": (2, 1, 128, 128)}),
        ("efficient", HOPPER, {"mask": (1, 8, 128, 128), "learned_mask": True}),
        # dropout: as torch 2.11 chose on an H200
        ("cudnn", HOPPER, {"dropout": 0.1}),
        ("cudnn", HOPPER, {"dropout": 0.1, "mask": (2, 1, 128, 128)}),
        # heads that share keys and values
        ("cudnn", HOPPER, {"key_value_heads": 2}),
        ("flash", AMPERE, {"key_value_heads": 2}),
        ("math", AMPERE, {"key_value_heads": 2, "mask": (2, 1, 128, 128)}),
        ("math", HOPPER, {"dtype": FP32, "key_value_heads": 2}),
        # lengths
        ("efficient", AMPERE, {"causal": True, "keys": 256}),
        ("cudnn", HOPPER, {"causal": True, "keys": 256}),
        ("flash", HOPPER, {"queries": 128, "keys": 1}),
    ],
)
def test_kernel_is_the_one_that_torch_chooses(kernel: str, capability: tuple[int, int], case: dict[str, Any]) -> None:
    with FakeTensorMode():
        assert chosen_kernel(attention(**case), capability) == kernel


def test_choice_heeds_layout_number_of_dimensions_and_what_the_user_allows() -> None:
    with FakeTensorMode():
        a = attention()
        across = a._replace(q=torch.empty(2, 8, 64, 128, dtype=BF16).transpose(-2, -1))
        assert chosen_kernel(across, AMPERE) == "math"
        flat = a._replace(q=a.q[0], k=a.k[0], v=a.v[0])
        assert chosen_kernel(flat, AMPERE) == "math"
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            assert chosen_kernel(a, HOPPER) == "efficient"
        torch.use_deterministic_algorithms(True)
        try:
            assert chosen_kernel(a, HOPPER) == "flash"
        finally:
            torch.use_deterministic_algorithms(False)


def kept_bytes(a: Attention, capability: tuple[int, int], fused: bool = True) -> tuple[int, list[str], list[str]]:
    """Of what backward needs; and the names of the operators of forward and backward."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    with on_fake_gpu(None, capability, fused_attention=fused) as (operators, _):
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = F.scaled_dot_product_attention(
                a.q, a.k, a.v, a.mask, a.dropout, a.causal, scale=a.scale, enable_gqa=a.grouped
            )
        forward = operators.names
        out.backward(torch.empty_like(out))
        return sum(kept.values()), forward, operators.names[len(forward) :]


SAMPLES, HEADS, LENGTH, WIDTH = 2, 8, 128, 64
SCORES = SAMPLES * HEADS * LENGTH * LENGTH
TOKENS = SAMPLES * HEADS * LENGTH * WIDTH  # numbers in the queries, and in the output


@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_fused_kernels_keep_inputs_output_and_one_number_per_row(capability: tuple[int, int]) -> None:
    with FakeTensorMode():
        a = attention(causal=True)
    kept, forward, backward = kept_bytes(a, capability)
    rows = 4 * SAMPLES * HEADS * LENGTH
    assert 0 <= kept - (4 * TOKENS * 2 + rows) < 64  # and the state of a random generator
    name = "_scaled_dot_product_cudnn_attention" if capability == HOPPER else "_scaled_dot_product_flash_attention"
    assert name in forward
    assert f"{name}_backward" in backward


def test_flash_attention_takes_shared_heads_as_they_are() -> None:
    with FakeTensorMode():
        a = attention(key_value_heads=2, causal=True)
    kept, _, _ = kept_bytes(a, AMPERE)
    assert 0 <= kept - (2 * TOKENS * 2 + 2 * TOKENS * 2 // 4 + 4 * SAMPLES * HEADS * LENGTH) < 64


def test_without_a_fused_kernel_all_scores_are_kept_in_float32() -> None:
    with FakeTensorMode():
        a = attention(BF16, causal=True)
    kept, forward, _ = kept_bytes(a, VOLTA)
    # The scores' softmax, and queries, keys and values, all in float32.
    assert 0 <= kept - (4 * SCORES + 3 * 4 * TOKENS) < 64
    assert {"tril", "bmm", "_safe_softmax"} <= set(forward)
    with FakeTensorMode():
        a = attention(BF16, causal=True, dropout=0.5)
    more, _, _ = kept_bytes(a, VOLTA)
    assert more - kept == 4 * SCORES + SCORES  # what is left of them, and a mask


@pytest.mark.parametrize("key_value_heads", [8, 2])
def test_software_of_2021_keeps_five_bytes_of_each_score(key_value_heads: int) -> None:
    """Korthikanti et al. 2022: softmax and its dropout in 16 bit, and a mask; and queries, keys and values."""
    with FakeTensorMode():
        a = attention(FP16, causal=True, dropout=0.1, key_value_heads=key_value_heads)
    kept, forward, backward = kept_bytes(a, AMPERE, fused=False)
    assert kept == 5 * SCORES + 3 * 2 * TOKENS
    assert [n for n in forward if n in ("baddbmm", "bmm", "scaled_masked_softmax", "native_dropout")] == [
        "baddbmm",
        "scaled_masked_softmax",
        "native_dropout",
        "bmm",
    ]
    assert backward.count("bmm") == 4
    assert ("clone" in forward) == (key_value_heads != HEADS)  # only to repeat keys and values


def test_a_mask_of_yes_and_no_becomes_numbers_that_backward_keeps() -> None:
    with on_fake_gpu(torch.bfloat16, AMPERE) as (operators, as_cuda):
        a = attention(BF16)
        with as_cuda.forward():
            F.scaled_dot_product_attention(a.q, a.k, a.v, attn_mask=torch.empty(2, 1, 128, 128, dtype=torch.bool))
        made = [results[0] for name, results in operators.ran if name == "where"]
    assert [(tuple(t.shape), t.dtype) for t in made] == [((2, 1, 128, 128), BF16)]
    assert "_scaled_dot_product_efficient_attention" in operators.names


def test_odd_widths_are_padded_for_flash_attention() -> None:
    with FakeTensorMode():
        a = attention(width=20)
    with on_fake_gpu(None, AMPERE) as (operators, _):
        out = F.scaled_dot_product_attention(a.q, a.k, a.v)
    assert operators.names.count("constant_pad_nd") == 3
    assert out.shape == a.q.shape
