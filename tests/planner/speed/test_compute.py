"""Times of single operators: rooflines, shapes that suit a device or do not, and shares of a layer."""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradus.planner.profile.program import Amount, Operator
from gradus.planner.speed.compute import Setting, host_seconds, matmul_seconds, seconds
from gradus.planner.speed.device import device_of
from gradus.schema.cluster import Cluster

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
H200 = device_of(Cluster(name="c", gpus_per_node=8, gpu="H200", cpu_cores=8, memory_gib=64.0))
assert H200 is not None
TERA = 1e12


def matmul(m: int, n: int, k: int, divides: str = "tensor") -> Operator:
    """m tokens for each sample."""
    return Operator(
        "mm",
        "matmul",
        flops=Amount(0, 2.0 * m * n * k),
        read=Amount(2.0 * n * k, 2.0 * m * k),
        written=Amount(0, 2.0 * m * n),
        dtype="bfloat16",
        shape=(Amount(1), Amount(0, m), Amount(n), Amount(k)),
        divides=divides,  # type: ignore[arg-type]
    )


def pointwise(size: float, name: str = "add", **facts: object) -> Operator:
    return Operator(name, "pointwise", Amount(), Amount(0, 2 * size), Amount(0, size), "bfloat16", **facts)  # type: ignore[arg-type]


def rate(m: int, n: int, k: int, precision: str = "bf16") -> float:
    return 2.0 * m * n * k / matmul_seconds(1, m, n, k, precision, H200) / TERA


def test_a_large_product_runs_at_the_share_of_the_peak_that_large_ones_reach():
    assert rate(8192, 8192, 8192) == pytest.approx(989 * H200.speeds.matmul["bf16"], rel=0.06)
    assert rate(8192, 8192, 8192, "fp32") == pytest.approx(67 * H200.speeds.matmul["fp32"], rel=0.06)


def test_products_that_leave_multiprocessors_idle_are_slower():
    assert rate(256, 256, 512) < 0.2 * rate(8192, 8192, 8192)
    assert rate(4096, 4096, 64) < 0.4 * rate(4096, 4096, 4096)  # too short an inner dimension


def test_one_row_takes_as_long_as_its_weights_take_to_be_read():
    weights = 2.0 * 4096 * 4096
    assert matmul_seconds(1, 1, 4096, 4096, "bf16", H200) == pytest.approx(
        weights / (H200.bytes_per_second * H200.speeds.bandwidth["matmul"]), rel=0.01
    )


def test_rows_that_are_not_aligned_cost_more():
    assert matmul_seconds(384, 197, 64, 197, "bf16", H200) > 2 * matmul_seconds(384, 200, 64, 200, "bf16", H200)


def test_a_pointwise_operator_takes_its_bytes_over_the_bandwidth_and_a_launch():
    one = Setting(H200, 1.0)
    large, nothing = pointwise(2.0**30), pointwise(8.0)
    moved = 3 * 2.0**30 / (H200.bytes_per_second * H200.speeds.bandwidth["pointwise"])
    assert seconds(large, one) == pytest.approx(moved + H200.speeds.kernel_seconds)
    assert seconds(nothing, one) == pytest.approx(H200.speeds.kernel_seconds, rel=0.01)
    assert seconds(replace(nothing, kernels=6), one) == pytest.approx(6 * H200.speeds.kernel_seconds, rel=0.01)


def test_time_grows_with_the_micro_batch():
    operator = matmul(2048, 8192, 8192)
    assert seconds(operator, Setting(H200, 8.0)) == pytest.approx(8 * seconds(operator, Setting(H200, 1.0)), rel=0.1)


def test_a_tensor_group_shares_its_layers_and_nothing_else():
    whole, shared = Setting(H200, 8.0), Setting(H200, 8.0, tensor=4)
    divided = matmul(2048, 16384, 4096)
    assert seconds(divided, shared) == pytest.approx(seconds(divided, whole) / 4, rel=0.1)
    stays = replace(divided, divides="whole")
    assert seconds(stays, shared) == seconds(stays, whole)


def test_between_divided_layers_only_slices_of_the_sequence_are_shared():
    between = pointwise(2.0**28)
    sliced = Setting(H200, 4.0, tensor=4)
    assert seconds(between, sliced) == pytest.approx(seconds(between, Setting(H200, 4.0)) / 4, rel=0.02)
    whole = replace(sliced, sequence_parallel=False)
    assert seconds(between, whole) == seconds(between, Setting(H200, 4.0))


def test_context_parallelism_shares_the_tokens():
    operator = matmul(8192, 8192, 8192)
    assert seconds(operator, Setting(H200, 2.0, context=2)) == pytest.approx(seconds(operator, Setting(H200, 1.0)))


def test_looking_up_rows_does_not_read_the_table():
    rows = 2.0**24
    lookup = Operator("embedding", "lookup", Amount(), Amount(2.0**34, 0), Amount(0, rows), "bfloat16")
    assert seconds(lookup, Setting(H200, 1.0)) < 2.0**34 / H200.bytes_per_second / 10


def test_causal_attention_costs_little_more_than_half_for_long_sequences():
    def attention(tokens: int, causal: bool) -> Operator:
        flops = 4.0 * 16 * tokens * tokens * 128 / (2 if causal else 1)
        shape = (Amount(0, 1), Amount(16), Amount(16), Amount(tokens), Amount(tokens), Amount(128))
        size = Amount(0, 2.0 * 16 * tokens * 128)
        name = "_scaled_dot_product_flash_attention"
        work = Operator(name, "attention", Amount(0, flops), size.times(3), size, "bfloat16", shape)
        return replace(work, causal=causal)

    def share(tokens: int) -> float:
        setting = Setting(H200, 16.0)
        return seconds(attention(tokens, True), setting) / seconds(attention(tokens, False), setting)

    assert 0.5 < share(16384) < 0.54
    assert share(512) > 0.6


def test_a_compiled_graph_costs_the_host_less_than_its_operators():
    operator = matmul(128, 128, 128)
    eager, compiled = Setting(H200, 1.0), Setting(H200, 1.0, compiled=True)
    assert host_seconds(operator, compiled) < host_seconds(operator, eager) / 2


def test_the_host_takes_longer_for_layers_and_lookups_than_for_other_operators():
    lookup = Operator("index", "lookup", Amount(), Amount(0, 8.0), Amount(0, 8.0), "bfloat16")
    layer, picked, other = (
        host_seconds(operator, Setting(H200, 1.0)) for operator in (matmul(8, 8, 8), lookup, pointwise(8))
    )
    assert layer == picked
    assert layer > 5 * other


# How far the model may be off what was measured of single operators, at the median: products run more slowly for
# minutes, as training has them, than for milliseconds.
AT_MOST = {"matmul": 0.15, "attention": 0.06, "bmm": 0.12, "convolution": 0.3, "fp8": 0.25}


@pytest.mark.parametrize("section", AT_MOST)
def test_the_model_is_near_what_was_measured_of_single_operators(section, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "speeds_check", raising=False)
    import speeds_check

    rows = json.loads((BENCHMARKS / "measured" / "h200_speeds.json").read_text())["rows"]
    found = [(row, speeds_check.modelled(row, H200)) for row in rows if row["section"] == section]
    errors = [abs(modelled / row["seconds"] - 1) for row, modelled in found if modelled is not None]
    assert len(errors) > 10
    assert statistics.median(errors) <= AT_MOST[section]


def convolution(groups: int, m: int, n: int, k: int, *, bias: bool = False, channels_last: bool = False) -> Operator:
    weights = 2.0 * groups * n * k
    return Operator(
        "convolution",
        "convolution",
        Amount(0, 2.0 * groups * m * n * k),
        Amount(weights + (2.0 * groups * n if bias else 0), 2.0 * groups * m * n),
        Amount(0, 2.0 * groups * m * n),
        "bfloat16",
        (Amount(groups), Amount(0, m), Amount(n), Amount(k)),
        channels_last=channels_last,
    )


@pytest.mark.parametrize("shape", [(1, 3136, 128, 1152), (96, 3136, 1, 49)])
def test_tensor_cores_want_channels_last(shape):
    many = Setting(H200, 64.0)
    assert seconds(convolution(*shape), many) > 1.5 * seconds(convolution(*shape, channels_last=True), many)


def test_compiled_in_16_bits_an_image_s_first_convolution_has_a_kernel_of_its_own():
    """ResNet's, as measured on an H200: 1.78 ms by cuDNN, 0.41 by ours."""
    first = convolution(1, 112 * 112, 64, 147, channels_last=True)
    plain, compiled = (Setting(H200, 256.0, compiled=on) for on in (False, True))
    assert seconds(first, plain) == pytest.approx(1.78e-3, rel=0.25)
    assert seconds(first, compiled) == pytest.approx(0.41e-3, rel=0.25)
    assert seconds(replace(first, channels_last=False), compiled) > 1.5e-3
    assert seconds(replace(first, dtype="float32"), compiled) > 1.5e-3
    bands = convolution(1, 112 * 112, 64, 13 * 9, channels_last=True)  # of a satellite: too many
    assert seconds(bands, compiled) == seconds(bands, plain)


def test_a_convolution_s_bias_is_a_kernel_of_its_own():
    many = Setting(H200, 64.0)
    plain, biased = (convolution(1, 3136, 128, 1152, bias=bias) for bias in (False, True))
    moved = 2 * 2.0 * 3136 * 64 * 128 / (H200.bytes_per_second * H200.speeds.bandwidth["pointwise"])
    assert seconds(biased, many) - seconds(plain, many) == pytest.approx(moved + H200.speeds.kernel_seconds, rel=0.01)


def test_inputs_of_other_shapes_or_types_are_handled_one_by_one():
    one, size = Setting(H200, 1.0), 2.0**30
    alike = pointwise(size, reads=(0, 1))
    narrower = replace(alike, read=Amount(0, size))
    mixed = replace(alike, read=Amount(0, 1.5 * size))
    assert seconds(narrower, one) > seconds(alike, one)  # although it reads half as much
    assert seconds(mixed, one) > seconds(alike, one)


def test_norms_of_short_rows_and_few_channels_are_slow():
    def norm(name: str, weights: float) -> float:
        operator = Operator(name, "reduction", Amount(), Amount(weights, 2.0**28), Amount(0, 2.0**28), "float32")
        return seconds(operator, Setting(H200, 1.0))

    assert norm("native_layer_norm", 8.0 * 96) > 3 * norm("native_layer_norm", 8.0 * 768)
    assert norm("native_layer_norm", 8.0 * 4096) == pytest.approx(norm("native_layer_norm", 8.0 * 768), rel=0.01)
    assert norm("cudnn_batch_norm", 16.0 * 64) > 2 * norm("cudnn_batch_norm", 16.0 * 256)


def test_what_lies_in_another_order_takes_longer_unless_it_is_compiled():
    eager, compiled = Setting(H200, 1.0), Setting(H200, 1.0, compiled=True)
    size = Amount(0, 2.0**28)
    for name, kind in (("clone", "copy"), ("add", "pointwise"), ("native_layer_norm", "reduction")):
        straight = Operator(name, kind, Amount(), size, size, "bfloat16")  # type: ignore[arg-type]
        turned = replace(straight, turned=size)
        assert seconds(turned, eager) > 1.5 * seconds(straight, eager), name
        assert seconds(turned, compiled) == seconds(straight, compiled), name


def test_a_transposed_copy_moves_as_many_elements_in_16_bits_as_in_32():
    def copied(dtype: str, size: float) -> float:
        amount = Amount(0, size)
        return seconds(Operator("clone", "copy", Amount(), amount, amount, dtype, turned=amount), Setting(H200, 1.0))

    assert copied("bfloat16", 2.0**28) == pytest.approx(copied("float32", 2.0**29), rel=0.05)


def test_tf32_is_slow_where_neither_factor_lies_along_the_inner_dimension():
    in_tf32 = H200.running("tf32")
    sizes = (1, 8192, 8192, 8192)
    slow, fast = (matmul_seconds(*sizes, "tf32", in_tf32, turned=turned) for turned in (True, False))
    assert slow > 1.4 * fast
    assert matmul_seconds(*sizes, "bf16", H200, turned=True) == matmul_seconds(*sizes, "bf16", H200)
    # The gradient of weights: the trace says that both factors are turned.
    work = replace(matmul(8192, 8192, 8192), dtype="float32", read=Amount(0, 2.0**30))
    turned = replace(work, turned=Amount(0, 2.0**30))
    assert seconds(turned, Setting(in_tf32, 1.0)) == pytest.approx(slow, rel=0.01)
    assert seconds(work, Setting(in_tf32, 1.0)) == pytest.approx(fast, rel=0.01)


def test_a_vocabulary_that_is_no_multiple_of_eight_is_slow_unless_a_compiler_pads_it():
    even, odd, aligned = (matmul_seconds(1, 32768, n, 768, "bf16", H200) for n in (30522, 30521, 30528))
    assert odd > even > 2.5 * aligned
    assert matmul_seconds(1, 32768, 30522, 768, "bf16", H200, padded=True) < 1.1 * aligned
    # In the gradient of the weights, it is the rows of a factor that lies the other way.
    of_weights, of_padded = (matmul_seconds(1, m, 768, 32768, "bf16", H200, turned=True) for m in (30522, 30528))
    assert of_weights > 2.5 * of_padded
    # Nothing is padded where memory is what a product waits for.
    bound_by_memory = (1, 196608, 384, 196, "bf16", H200)
    assert matmul_seconds(*bound_by_memory, padded=True) == matmul_seconds(*bound_by_memory)
