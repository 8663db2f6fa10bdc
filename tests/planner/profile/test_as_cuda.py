"""A model on fake tensors runs CUDA's operators: its autocast, its kernels for dropout, norms and recurrent layers."""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fake_runs import AMPERE, HOPPER, Trace, on_fake_gpu, traced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradus.models.experts import Experts, MixtureOfExperts, Router
from gradus.planner.profile import cuda_autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# --- autocast


def test_lists_are_those_of_the_installed_torch() -> None:
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    text = header.read_text()

    def names(macro: str) -> set[str]:
        body = re.search(rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n", text, re.DOTALL)
        assert body is not None
        return set(re.findall(r"\b_\((?:ADD_NS\()?(\w+)", body.group(1)))

    inside = {"_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_scaled_dot_product_flash_attention"}
    assert names("LOWER_PRECISION_FP") - inside <= cuda_autocast.LOWER_PRECISION
    assert names("FP32") <= cuda_autocast.FLOAT32
    assert names("FP32_SET_OPT_DTYPE") <= cuda_autocast.FLOAT32_RESULT
    assert names("PROMOTE") == cuda_autocast.WIDEST


SQUARE: dict[str, Callable[[Tensor], Tensor]] = {
    "x @ x": lambda x: x @ x,
    "matmul": lambda x: torch.matmul(x, x),
    "linear": lambda x: F.linear(x, x, x[0]),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    "exp": lambda x: x.exp(),
    "x ** 2": lambda x: x**2,
    "2 ** x": lambda x: 2**x,
    "square": lambda x: x.square(),
    "softmax": lambda x: F.softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "group_norm": lambda x: F.group_norm(x[None], 4),
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: x.norm(),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.empty(8, dtype=torch.int64)),
    "smoothed cross_entropy": lambda x: F.cross_entropy(x, torch.empty(8, dtype=torch.int64), label_smoothing=0.1),
    "upsample": lambda x: F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    "gelu": lambda x: F.gelu(x),
    "mean": lambda x: x.mean(),
    "add": lambda x: x + x,
    "relu": lambda x: x.relu(),
    "dropout": lambda x: F.dropout(x, 0.1),
}
IN_16_BIT = {"x @ x", "matmul", "linear", "einsum", "baddbmm", "conv2d"}
AS_GIVEN = {"gelu", "mean", "add", "relu", "dropout"}


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("given", [FP32, "16 bit"])
def test_results_have_the_dtypes_of_cuda_autocast(dtype: torch.dtype, given: Any) -> None:
    given = dtype if given == "16 bit" else given
    with on_fake_gpu(dtype) as (_, as_cuda):
        x = torch.empty(8, 8, dtype=given)
        with as_cuda.forward():
            found = {name: function(x).dtype for name, function in SQUARE.items()}
    expected = {name: dtype if name in IN_16_BIT else given if name in AS_GIVEN else FP32 for name in SQUARE}
    assert found == expected


def test_the_widest_of_two_formats_is_taken_where_cuda_does() -> None:
    with on_fake_gpu(BF16) as (_, as_cuda), as_cuda.forward():
        narrow, wide = torch.empty(8, dtype=BF16), torch.empty(8)
        assert torch.addcmul(narrow, narrow, wide).dtype == FP32
        assert torch.dot(narrow, wide).dtype == FP32
        assert torch.dot(narrow, narrow).dtype == BF16


def test_float64_and_a_dtype_that_was_asked_for_are_left_alone() -> None:
    with on_fake_gpu(BF16) as (_, as_cuda), as_cuda.forward():
        x = torch.empty(8, 8, dtype=torch.float64)
        assert (x @ x).dtype == torch.float64
        assert F.softmax(torch.empty(8, dtype=BF16), 0, dtype=BF16).dtype == BF16


def test_fp16_softmax_goes_to_float32_in_one_kernel_and_bf16_in_two() -> None:
    copies = {}
    for dtype in (FP16, BF16):
        with on_fake_gpu(dtype) as (operators, as_cuda):
            with as_cuda.forward():
                assert torch.empty(8, 8, dtype=dtype).softmax(-1).dtype == FP32
            copies[dtype] = operators.names.count("_to_copy")
    assert copies == {FP16: 0, BF16: 1}


def test_refuses_what_cuda_refuses() -> None:
    with on_fake_gpu(BF16) as (_, as_cuda), as_cuda.forward():
        x = torch.empty(8)
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            F.binary_cross_entropy(x, x)


def test_regions_without_autocast_are_honoured_and_regions_for_cuda_need_no_gpu() -> None:
    with warnings.catch_warnings(), on_fake_gpu(BF16) as (_, as_cuda):
        warnings.simplefilter("error")
        x = torch.empty(8, 8)
        assert (x @ x).dtype == FP32
        with as_cuda.forward():
            assert torch.is_autocast_enabled("cuda")
            for device in ("cpu", "cuda"):
                with torch.autocast(device, enabled=False):
                    assert (x @ x).dtype == FP32
                with torch.autocast(device, dtype=FP16):
                    assert (x @ x).dtype == FP16
            with torch.autocast("cuda"):  # the format of the region around it
                assert (x @ x).dtype == BF16
        with torch.autocast("cuda"):
            assert (x @ x).dtype == FP16
        assert (x @ x).dtype == FP32
        assert not torch.is_autocast_enabled("cuda")


def test_nothing_of_it_stays_when_it_is_left() -> None:
    before = torch.autocast.__init__, torch.clear_autocast_cache
    with on_fake_gpu(BF16) as (_, as_cuda), as_cuda.forward():
        assert torch.autocast.__init__ is not before[0]
    assert (torch.autocast.__init__, torch.clear_autocast_cache) == before
    with pytest.raises(ZeroDivisionError), on_fake_gpu(BF16) as (_, as_cuda), as_cuda.forward():
        torch.empty(1 // 0)
    assert (torch.autocast.__init__, torch.clear_autocast_cache) == before
    assert not torch.is_autocast_enabled("cpu")


def test_parameters_are_cast_once_in_a_region_and_the_copies_go_with_it() -> None:
    with on_fake_gpu(BF16) as (operators, as_cuda):
        layer = nn.Linear(8, 8, bias=False)
        x = torch.empty(4, 8, dtype=BF16)
        with as_cuda.forward():
            with torch.no_grad():
                layer(x)
            copy = weakref.ref(as_cuda._casts._copies[id(layer.weight)][1].untyped_storage())
            layer(layer(x))
            assert operators.names.count("_to_copy") == 1
            assert copy() is not None
        assert copy() is None
        with as_cuda.forward():
            layer(x)
        assert operators.names.count("_to_copy") == 2


def test_frozen_parameters_and_activations_are_cast_each_time() -> None:
    with on_fake_gpu(BF16) as (operators, as_cuda):
        weight, x = torch.empty(8, 8), torch.empty(4, 8, requires_grad=True)
        with as_cuda.forward():
            x = x * 1
            x @ weight, x @ weight
        assert operators.names.count("_to_copy") == 4


def test_what_is_recomputed_in_backward_runs_as_on_cuda_too() -> None:
    def loss(model: nn.Module) -> Tensor:
        y = checkpoint(model, torch.empty(2, 16, 64, requires_grad=True), use_reentrant=False)
        return y.float().mean()

    kept = traced(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), lambda m: m(torch.empty(2, 16, 64)).mean())
    trace = traced(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), loss)
    for name in ("_scaled_dot_product_cudnn_attention", "native_dropout", "addmm"):
        assert trace.backward.count(name) == trace.forward.count(name) == kept.forward.count(name) > 0
        assert kept.backward.count(name) == 0
    # Parameters are cast again: the region of forward is over.
    casts = trace.forward.count("_to_copy")
    assert trace.backward.count("_to_copy") >= kept.backward.count("_to_copy") + casts - 1


# --- kernels


def test_dropout_is_one_kernel_that_keeps_a_mask_of_bytes() -> None:
    with on_fake_gpu() as (operators, _):
        x = torch.empty(8, 8, requires_grad=True)
        F.dropout(x, 0.1)
        nn.Dropout(0.1)(x)
        assert operators.names.count("native_dropout") == 2
        _, mask = next(results for name, results in operators.ran if name == "native_dropout")
        assert mask.dtype == torch.bool
        for nothing_to_drop in (F.dropout(x, 0.1, training=False), F.dropout(x, 0.0)):
            assert nothing_to_drop.shape == x.shape
        assert operators.names.count("native_dropout") == 2
        F.dropout2d(torch.empty(2, 3, 8, 8), 0.5)  # a mask of channels, made step by step as on the CPU
        assert operators.names.count("native_dropout") == 2


@pytest.mark.parametrize(
    ("autocast", "dtype", "operator"),
    [
        (None, FP32, "cudnn_batch_norm"),
        (FP16, FP32, "cudnn_batch_norm"),
        (BF16, FP32, "native_batch_norm"),
        (None, BF16, "native_batch_norm"),
    ],
)
def test_batch_norm_is_cudnns_unless_in_bf16(autocast: Any, dtype: torch.dtype, operator: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(dtype)
    trace = traced(model, lambda m: m(torch.empty(2, 3, 8, 8, dtype=dtype)).float().mean(), autocast)
    assert operator in trace.forward
    assert f"{operator}_backward" in trace.backward
    assert not trace.without_gradient


def test_batch_norm_of_vectors_is_torchs_own() -> None:
    trace = traced(nn.BatchNorm1d(8), lambda m: m(torch.empty(4, 8)).mean(), None)
    assert "native_batch_norm" in trace.forward


def test_rms_norm_is_one_kernel_each_way() -> None:
    trace = traced(nn.RMSNorm(8), lambda m: m(torch.empty(4, 8, requires_grad=True)).mean(), None)
    assert "_fused_rms_norm" in trace.forward
    assert "_fused_rms_norm_backward" in trace.backward
    assert not trace.without_gradient
    _, rstd = next(results for name, results in trace.operators.ran if name == "_fused_rms_norm")
    assert rstd.shape == (4, 1)


RECURRENT: dict[str, tuple[Callable[[], nn.Module], float, int]] = {
    # the layer, numbers that cuDNN keeps for a unit, units of all layers and directions; between two layers, one more
    "lstm": (lambda: nn.LSTM(8, 16, 2), 5.5, 32),
    "gru": (lambda: nn.GRU(8, 16, bidirectional=True), 4, 32),
    "rnn": (lambda: nn.RNN(8, 16), 1, 16),
}


@pytest.mark.parametrize("layer", RECURRENT)
@pytest.mark.parametrize("autocast", [None, BF16])
def test_recurrent_layers_are_one_operator_of_cudnn(layer: str, autocast: torch.dtype | None) -> None:
    make, numbers, units = RECURRENT[layer]
    trace = traced(make(), lambda m: m(torch.empty(5, 3, 8))[0].float().mean(), autocast)
    assert trace.forward.count("_cudnn_rnn") == 1
    assert trace.backward.count("_cudnn_rnn_backward") == 1
    assert not trace.without_gradient
    output, *_, reserve = next(results for name, results in trace.operators.ran if name == "_cudnn_rnn")
    assert output.dtype == (FP32 if autocast is None else FP16)  # CUDA's autocast knows no other format for these
    assert reserve.bytes == 5 * 3 * units * numbers * output.dtype.itemsize


def test_an_lstm_keeps_what_was_measured_on_an_h200() -> None:
    layer = nn.LSTM(1024, 1024, 2, batch_first=True, dropout=0.2)
    trace = traced(layer, lambda m: m(torch.empty(128, 256, 1024))[0].float().mean(), BF16)
    *_, reserve = next(results for name, results in trace.operators.ran if name == "_cudnn_rnn")
    assert reserve.bytes == pytest.approx(742_392_064, abs=1024)


def test_recurrent_layers_take_packed_sequences_and_give_their_last_state() -> None:
    def loss(model: nn.Module) -> Tensor:
        packed = nn.utils.rnn.PackedSequence(torch.empty(9, 8), torch.tensor([3, 3, 2, 1]))
        state: Tensor = model(packed)[1][0]
        return state.mean()

    trace = traced(nn.LSTM(8, 16), loss, None)
    assert trace.forward.count("_cudnn_rnn") == 1
    assert trace.backward.count("_cudnn_rnn_backward") == 1


def test_a_step_of_an_lstm_is_two_products_and_a_kernel() -> None:
    def loss(model: nn.Module) -> Tensor:
        h, c = model(torch.empty(3, 8), model(torch.empty(3, 8)))
        return (h + c).mean()

    trace = traced(nn.LSTMCell(8, 16), loss, None)
    assert trace.forward.count("_thnn_fused_lstm_cell") == trace.backward.count("_thnn_fused_lstm_cell_backward") == 2
    assert trace.forward.count("mm") == 4
    assert not trace.without_gradient


def test_a_model_may_name_the_gpu_itself() -> None:
    with on_fake_gpu():
        x = torch.empty(4, device="cuda")
        for moved in (x.to("cuda"), x.to(torch.device("cuda", 0)), x.to(0), x.to(device="cuda"), x.cuda(0)):
            assert (moved + x).shape == (4,)


def test_group_norm_copies_images_whose_channels_lie_side_by_side() -> None:
    def trace_of(layout: torch.memory_format) -> Trace:
        def loss(model: nn.Module) -> Tensor:
            return model(torch.empty(2, 8, 4, 4, requires_grad=True).to(memory_format=layout)).mean()  # type: ignore[no-any-return]

        return traced(nn.GroupNorm(2, 8), loss, None)

    plain, turned = (trace_of(layout) for layout in (torch.contiguous_format, torch.channels_last))
    assert Counter(turned.forward)["clone"] == Counter(plain.forward)["clone"] + 1


@pytest.mark.parametrize("dtype", [FP16, BF16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_narrow_until_something_is_picked_from_it(dtype: torch.dtype, smoothing: float) -> None:
    """As on an H200: a log-softmax in the logits' format, which is kept, and a copy of it in float32."""
    with on_fake_gpu(dtype) as (operators, as_cuda):
        logits = torch.empty(8, 100, dtype=dtype, requires_grad=True)
        with as_cuda.forward():
            target = torch.empty(8, dtype=torch.int64)
            loss = F.cross_entropy(logits, target, ignore_index=-1, label_smoothing=smoothing)
        assert loss.dtype == FP32
        assert loss.shape == ()
        made = {name: results[0].dtype for name, results in operators.ran if name in ("_log_softmax", "_to_copy")}
        assert made == {"_log_softmax": dtype, "_to_copy": FP32}
        loss.backward()
        assert logits.grad is not None
        assert logits.grad.dtype == dtype
        assert operators.names.count("_to_copy") == (3 if smoothing else 2)


# --- whole models


def test_multi_head_attention_that_returns_weights_is_made_step_by_step() -> None:
    def loss(model: nn.Module) -> Tensor:
        x = torch.empty(2, 16, 64)
        result: Tensor = model(x, x, x)[0].mean()
        return result

    trace = traced(nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True), loss)
    assert {"bmm", "_softmax", "native_dropout"} <= set(trace.forward)
    scores = next(results[0] for name, results in trace.operators.ran if name == "_softmax")
    assert scores.dtype == FP32


def test_convolutions_and_linear_layers_are_as_on_cuda() -> None:
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2), nn.Flatten(), nn.Linear(8 * 49, 4))
    trace = traced(nn.Sequential(*layers), lambda m: m(torch.empty(2, 3, 8, 8)).float().mean())
    assert Counter(trace.forward)["convolution"] == 2
    assert Counter(trace.forward)["addmm"] == 1
    assert not [name for name in trace.forward + trace.backward if "mkldnn" in name]


def mixture() -> MixtureOfExperts:
    router = Router(8, 4, 2, scores="softmax", scale=1.0, biased=False)
    experts = Experts(4, 8, 16, "swiglu")
    return MixtureOfExperts(router, experts, None, capacity_factor=None, balance_weight=None, balance_rate=None)


def test_mixture_of_experts_is_grouped_in_bf16_and_looped_over_even_shares_elsewhere() -> None:
    def loss(model: nn.Module) -> Tensor:
        return model(torch.empty(2, 16, 8, requires_grad=True)).float().mean()

    grouped, looped = traced(mixture(), loss, BF16), traced(mixture(), loss, None)
    assert not grouped.without_gradient + looped.without_gradient
    assert grouped.forward.count("_grouped_mm") == 3
    assert grouped.backward.count("_grouped_mm") == 6
    products = [results[0].shape for name, results in looped.operators.ran if name == "mm"]
    assert products[1:5] == [(2 * 16 * 2 // 4, 16)] * 4  # after the router's


class RoutedByMask(nn.Module):
    """As routing is often written: for each expert, the tokens that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).topk(2, dim=-1).indices
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, _ = torch.where(chosen == number)
            if rows.numel():
                y = y.index_add(0, rows, expert(x[rows]).to(y.dtype))
        return y


def test_tokens_chosen_by_a_mask_are_their_even_share() -> None:
    trace = traced(RoutedByMask(), lambda m: m(torch.empty(32, 8)).float().mean())
    sizes = [tuple(r[0].shape) for name, r in trace.operators.ran if name == "addmm"]
    assert sizes == [(32, 4), *[(32 * 2 // 4, 8)] * 4]


def language(**extra: Any) -> Callable[[], dict[str, Tensor]]:
    def batch() -> dict[str, Tensor]:
        tokens = {name: torch.empty(2, 64, dtype=torch.int64) for name in ("input_ids", "labels")}
        return {**tokens, **{name: torch.empty(2, 64, dtype=torch.int64) for name in extra}}

    return batch


def pictures() -> dict[str, Tensor]:
    return {"pixel_values": torch.empty(2, 3, 32, 32), "labels": torch.empty(2, dtype=torch.int64)}


SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
WORDS = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**SMALL, **WORDS, "num_key_value_heads": 2}
T5 = {"num_layers": 2, "d_model": 64, "d_ff": 96, "num_heads": 4, "d_kv": 16, "decoder_start_token_id": 0, **WORDS}
GPT2 = {"n_layer": 2, "n_embd": 64, "n_head": 4, **WORDS}
HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Tensor]], dict[str, int]]] = {
    # model class, configuration class, settings, batch, operators of forward and how often
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, language(), {"_scaled_dot_product_cudnn_attention": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED, language(), {"_scaled_dot_product_cudnn_attention": 2}),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {**SMALL, **WORDS},
        language(attention_mask=True),
        {"_scaled_dot_product_cudnn_attention": 2, "native_dropout": 5},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        T5,
        language(),
        # Its positions are a mask that is learned, which cuDNN has no gradient for; between the stacks there is none.
        {"_scaled_dot_product_efficient_attention": 4, "_scaled_dot_product_cudnn_attention": 2},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**SMALL, "image_size": 32, "patch_size": 8},
        pictures,
        {"_scaled_dot_product_cudnn_attention": 2, "convolution": 1},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        {"hidden_sizes": [16, 32, 64, 64], "depths": [1, 1, 2, 1]},
        pictures,
        {"convolution": 9, "native_layer_norm": 10},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "output_router_logits": True},
        language(),
        {"_grouped_mm": 4},
    ),
    "mixtral, one expert after another": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**GROUPED, "num_local_experts": 4, "experts_implementation": "eager"},
        language(),
        {"_scaled_dot_product_cudnn_attention": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**GROUPED, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        language(),
        {"_grouped_mm": 4},
    ),
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_run_forward_and_backward(name: str) -> None:
    import transformers

    model_class, config_class, settings, batch, expected = HUGGING_FACE[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    trace: Trace = traced(model, lambda m: m(**batch()).loss)
    counted = Counter(trace.forward)
    assert {operator: counted[operator] for operator in expected} == expected
    assert all(Counter(trace.backward)[f"{op}_backward"] == n for op, n in expected.items() if "attention" in op)
    assert not trace.without_gradient


@pytest.mark.parametrize(("capability", "kernel"), [(HOPPER, "cudnn"), (AMPERE, "flash")])
def test_kernels_follow_the_gpu(capability: tuple[int, int], kernel: str) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    trace = traced(layer, lambda m: m(torch.empty(2, 16, 64)).mean(), BF16, capability)
    assert f"_scaled_dot_product_{kernel}_attention" in trace.forward


def test_parameters_that_are_narrow_already_are_not_cast() -> None:
    with on_fake_gpu(BF16) as (operators, as_cuda):
        layer = nn.Linear(8, 8, dtype=BF16)
        with as_cuda.forward():
            layer(torch.empty(4, 8, dtype=BF16))
        assert "_to_copy" not in operators.names
