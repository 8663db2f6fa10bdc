"""A compiled part has fewer kernels, keeps less, and every piece of memory is there when a kernel uses it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from traced_parts import SAMPLES, WORDS, Attention, Head, PlainAttention, Residual, peak, traced, traced_whole

from gradus.planner.profile.program import Amount, Operator, Part, Storage
from gradus.planner.rewritten.compiling import compiled
from gradus.planner.rewritten.recomputing import recomputed
from gradus.planner.rewritten.rewriting import compiled as remembered

WEIGHT, NO_WEIGHT = Amount(1000, 0), Amount()


def operator(name, kind, reads, writes, sizes, beside=NO_WEIGHT) -> Operator:
    """One that reads and writes whole storages, and parameters beside them."""
    read = sum((sizes[n].per_sample for n in reads), 0.0)
    written = sum((sizes[n].per_sample for n in writes), 0.0)
    fixed = sum((sizes[n].fixed for n in writes), 0.0)
    return Operator(
        name,
        kind,
        Amount(),
        Amount(beside.fixed, read + beside.per_sample),
        Amount(fixed, written),
        "float32",
        reads=reads,
        writes=writes,
    )


def perceptron() -> Part:
    """x → a = mm(x) → b = gelu(a) → c = b · 2 → out = mm(c), and back from g; sizes in hundreds tell them apart."""
    sizes = [Amount(0, n) for n in (100, 400, 400, 400, 200, 200, 400, 400, 400, 100)]
    x, a, b, c, out, g, grad_c, grad_b, grad_a, grad_x = range(10)
    forward = (
        operator("mm", "matmul", (x,), (a,), sizes, WEIGHT),
        operator("gelu", "pointwise", (a,), (b,), sizes),
        operator("mul", "pointwise", (b,), (c,), sizes),
        operator("mm", "matmul", (c,), (out,), sizes, WEIGHT),
    )
    backward = (
        operator("mm", "matmul", (g,), (grad_c,), sizes, WEIGHT),
        operator("mul", "pointwise", (grad_c,), (grad_b,), sizes),
        operator("gelu_backward", "pointwise", (grad_b, a), (grad_a,), sizes),
        operator("mm", "matmul", (grad_a,), (grad_x,), sizes, WEIGHT),
    )
    made = [(-1, 4), (0, 6), (1, 2), (2, 3), (3, 4), (4, 4), (4, 5), (5, 6), (6, 7), (7, 7)]
    storages = tuple(Storage(size, *lifetime) for size, lifetime in zip(sizes, made, strict=True))
    return Part("p", True, forward, backward, storages)


def test_what_is_done_element_by_element_is_one_kernel_that_reads_and_writes_once():
    part = compiled(perceptron())
    assert [op.name for op in part.forward] == ["mm", "fused_mul_gelu", "mm"]
    assert [op.name for op in part.backward] == ["mm", "fused_gelu_backward_mul", "mm"]
    fused = part.forward[1]
    assert (fused.kind, fused.kernels) == ("pointwise", 1)
    assert (fused.read.per_sample, fused.written.per_sample) == (400, 400), "b is nowhere in memory"
    assert part.forward[0].read == perceptron().forward[0].read, "a library's kernel stays as it is"


def test_a_result_takes_the_place_of_an_input_that_nobody_reads_any_more():
    part = compiled(perceptron())
    fused = part.backward[1]
    assert set(fused.writes) < set(fused.reads)
    (place,) = fused.writes
    assert part.storages[place].last == len(part.operators) - 1
    kept = part.forward[1]
    assert not set(kept.writes) & set(kept.reads), "backward still reads what gelu was given"


def test_logits_are_kept_once_in_16_bit_and_their_gradient_takes_their_place():
    before = traced_whole(Head(vocabulary=5000), WORDS)
    part = compiled(before)
    samples = 100  # so that nothing else counts
    logits = samples * WORDS[0] * 5000
    assert peak(before, 0, len(before.operators), samples) > 12 * logits, "three times in fp32"
    assert peak(part, 0, len(part.operators), samples) == pytest.approx(2 * logits, rel=0.1)


def parts() -> list[Part]:
    made = [*traced(nn.Sequential(*(Attention(dropout=0.1) for _ in range(3))), WORDS, torch.bfloat16)]
    made += [traced_whole(Residual(), (16, 12, 12)), traced_whole(PlainAttention(), WORDS)]
    return made + [recomputed(part, policy) for part in made for policy in ("selective", "full") if part.backward]


def test_every_piece_of_memory_is_there_when_it_is_used():
    for part in map(compiled, parts()):
        for number, kernel in enumerate(part.operators):
            for storage in (part.storages[n] for n in (*kernel.reads, *kernel.writes)):
                assert storage.made <= number <= storage.last, f"{part.name}, {kernel.name}: {storage}"
        assert all(storage.last <= len(part.operators) for storage in part.storages)


def test_compiling_changes_no_product_and_no_gradient():
    def products(part: Part) -> list[tuple[str, Amount]]:
        return sorted((op.name, op.flops) for op in part.operators if op.kind in ("matmul", "attention", "convolution"))

    def gradients(part: Part) -> float:
        return sum(s.bytes.fixed for s in part.storages if s.role == "gradient")

    for part in parts():
        now = compiled(part)
        assert products(now) == products(part)
        assert gradients(now) == gradients(part)
        assert sum(op.kernels for op in now.operators) <= sum(op.kernels for op in part.operators) + 4
        moved = sum(op.read.at(SAMPLES) + op.written.at(SAMPLES) for op in now.operators)
        before = sum(op.read.at(SAMPLES) + op.written.at(SAMPLES) for op in part.operators)
        assert moved <= 1.01 * before  # a batch norm reads its input twice: for its statistics, and to use them


def test_a_compiled_block_needs_no_more_memory_than_before():
    for part in parts():
        assert peak(compiled(part), 0, len(compiled(part).operators)) <= 1.02 * peak(part, 0, len(part.operators))


def test_a_compiled_part_keeps_what_a_recompute_policy_left_and_needs_no_checkpoint():
    block = [part for part in traced(nn.Sequential(*(Attention() for _ in range(3))), WORDS) if part.block][-1]
    for policy in ("selective", "full"):
        before = recomputed(block, policy)
        now = compiled(before)
        kept = [sum(s.bytes.at(SAMPLES) for s in part.kept()) for part in (now, before)]
        assert kept[0] <= kept[1]
    assert not [op for op in compiled(recomputed(block, "selective")).recompute if op.kind != "matmul"]


def test_the_same_part_is_compiled_once():
    part = perceptron()
    assert remembered(part) is remembered(part)
    assert remembered(part) == compiled(part)


def test_what_is_cast_twice_is_cast_and_kept_once():
    """As queries, keys and values of one input are, under autocast."""
    sizes = [Amount(0, n) for n in (400, 200, 200, 100, 100, 100, 10)]
    x, narrow, again, q, k, g, grad = range(7)
    forward = (
        operator("_to_copy", "copy", (x,), (narrow,), sizes),
        operator("mm", "matmul", (narrow,), (q,), sizes, WEIGHT),
        operator("_to_copy", "copy", (x,), (again,), sizes),
        operator("mm", "matmul", (again,), (k,), sizes, WEIGHT),
    )
    backward = (
        operator("mm", "matmul", (g, narrow), (grad,), sizes),
        operator("mm", "matmul", (g, again), (grad,), sizes),
    )
    made = [(-1, 4), (0, 4), (2, 5), (1, 4), (3, 4), (4, 5), (4, 6)]
    part = Part("p", True, forward, backward, tuple(Storage(s, *m) for s, m in zip(sizes, made, strict=True)))
    now = compiled(part)
    assert [op.name for op in now.forward] == ["to_copy", "mm", "mm"]
    assert [storage.bytes.per_sample for storage in now.storages].count(200) == 1


def test_what_is_in_no_compiled_module_runs_as_it_is_written():
    """A loss that a library's model computes outside its modules: logits are written out in float32."""
    part = perceptron()
    eager = replace(part, forward=tuple(replace(op, eager=op.name in ("gelu", "mul")) for op in part.forward))
    now = compiled(eager)
    assert [op.name for op in now.forward] == ["mm", "gelu", "mul", "mm"]
    assert now.forward[1].written == part.forward[1].written


def test_products_of_odd_sizes_are_done_with_zeros_around_them():
    def extra(width: int) -> float:
        shape = (Amount(1, 0), Amount(0, 16), Amount(width, 0), Amount(64, 0))
        part = perceptron()
        first = replace(part.forward[0], dtype="bfloat16", shape=shape)
        now = compiled(replace(part, forward=(first, *part.forward[1:])))
        return sum(s.bytes.fixed for s in now.storages if s.role == "workspace")

    assert extra(64) == 0
    assert extra(30_522) == 2 * 64 * 30_522
