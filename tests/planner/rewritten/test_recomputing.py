"""A recomputed part is what a trace of the same blocks under real checkpoints shows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from traced_parts import IMAGE, SAMPLES, WORDS, Attention, Gated, Perceptron, PlainAttention, Residual, peak, traced

from gradus.parallel.recompute import apply_recompute
from gradus.planner.profile.program import Amount, Operator, Part, Storage
from gradus.planner.rewritten.recomputing import recomputed
from gradus.schema.plan import Plan

CASES = [
    (lambda: Attention(dropout=0.1), WORDS),
    (Perceptron, WORDS),
    (PlainAttention, WORDS),
    (Gated, WORDS),
    (Residual, IMAGE),
]
NAMES = ["attention", "perceptron", "plain attention", "gated", "residual"]


def blocks(make, shape, autocast, policy: str) -> Part:
    """One of four like blocks, as it is traced under checkpoints."""
    model = nn.Sequential(*(make() for _ in range(4)))
    apply_recompute(model, Plan(recompute=policy, micro_batch=1, accumulate=1))
    return next(part for part in traced(model, shape, autocast) if part.block and part.backward)


def names(operators) -> Counter[str]:
    # A norm's running statistics are set aside while it runs again: a copy of a few bytes.
    return Counter(op.name for op in operators if not (op.name == "clone" and op.read.per_sample == 0))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize(("make", "shape"), CASES, ids=NAMES)
def test_a_recomputed_block_runs_and_keeps_what_a_real_one_does(make, shape, policy, autocast):
    true = blocks(make, shape, autocast, policy)
    ours = recomputed(blocks(make, shape, autocast, "none"), policy)
    assert names(ours.recompute + ours.backward) == names(true.backward)
    # Copies of weights stay in autocast's cache until forward of the model ends; a trace counts those elsewhere.
    kept = sum(s.bytes.at(SAMPLES) for s in ours.kept() if s.role != "copy")
    assert kept == pytest.approx(sum(s.bytes.at(SAMPLES) for s in true.kept() if s.role != "copy"))
    # A gradient is cast before forward runs again, where ours has it cast afterwards: never less, hardly more.
    highest = peak(true, len(true.forward), len(true.operators))
    assert 0.99 * highest <= peak(ours, len(ours.forward), len(ours.operators)) <= 1.05 * highest


def operator(kind, reads, writes, name=None) -> Operator:
    size = Amount(0, 1)
    return Operator(name or kind, kind, size, size, size, "float32", reads=reads, writes=writes)


def three_steps() -> Part:
    """x → a = matmul(x) → b = gelu(a) → out = matmul(b), and its backward, which reads a and b and is given g."""
    forward = (operator("matmul", (0,), (1,)), operator("pointwise", (1,), (2,)), operator("matmul", (2,), (3,)))
    backward = (operator("matmul", (4, 2), (5,)), operator("pointwise", (5, 1), (6,)), operator("matmul", (6, 0), (7,)))
    storages = (
        Storage(Amount(0, 1), -1, 5),  # x
        Storage(Amount(0, 10), 0, 4),  # a
        Storage(Amount(0, 100), 1, 3),  # b
        Storage(Amount(0, 1000), 2, 3),  # out: goes when this part's backward begins
        Storage(Amount(0, 1000), 3, 3),  # g
        Storage(Amount(0, 100), 3, 4),
        Storage(Amount(0, 10), 4, 5),
        Storage(Amount(1, 0), 5, 6, "gradient"),
    )
    return Part("p", True, forward, backward, storages)


def test_full_recompute_keeps_nothing_but_the_output_and_stops_before_the_last_product():
    part = recomputed(three_steps(), "full")
    assert [s.bytes.per_sample for s in part.kept()] == [1000]
    assert [op.kind for op in part.recompute] == ["matmul", "pointwise"], "nobody needs the output again"
    a, b = part.recompute[0].writes[0], part.recompute[1].writes[0]
    assert (part.storages[a].made, part.storages[a].last) == (3, 6)
    assert (part.storages[b].made, part.storages[b].last) == (4, 5)
    assert part.backward[0].reads == (4, b)
    assert (part.storages[4].made, part.storages[4].last) == (3, 5), "the gradient waits while forward runs again"
    assert part.storages[7].last == len(part.operators), "gradients outlive the part"


def test_selective_recompute_keeps_what_products_gave_and_computes_the_rest_again():
    part = recomputed(three_steps(), "selective")
    assert sorted(s.bytes.per_sample for s in part.kept()) == [10, 1000]
    assert [op.kind for op in part.recompute] == ["pointwise"]
    output = part.storages[3]
    assert output.last == len(part.operators) - 1, "asked for by nobody, it stays until the checkpoint is done"


def test_no_recompute_leaves_a_part_as_it_is():
    part = three_steps()
    assert recomputed(part, "none") is part
    forward_only = replace(part, backward=())
    assert recomputed(forward_only, "full") is forward_only


def test_copies_of_weights_are_made_again_and_stay_until_the_second_run_is_over():
    forward = (operator("copy", (), (1,), "_to_copy"), operator("matmul", (0, 1), (2,)))
    forward += (operator("pointwise", (2,), (3,)), operator("matmul", (3,), (4,)))
    backward = (operator("matmul", (5, 3), (6,)), operator("matmul", (6, 1), (7,)))
    storages = (
        Storage(Amount(0, 1), -1, 5),
        Storage(Amount(7, 0), 0, 5, "copy"),
        Storage(Amount(0, 1), 1, 2),
        Storage(Amount(0, 1), 2, 4),
        Storage(Amount(0, 1), 3, 4),
        Storage(Amount(0, 1), 4, 4),
        Storage(Amount(0, 1), 4, 5),
        Storage(Amount(0, 1), 5, 5),
    )
    part = recomputed(Part("p", True, forward, backward, storages), "full")
    first, second = (s for s in part.storages if s.role == "copy")
    assert (first.made, first.last) == (0, 4), "until forward of the model ends"
    assert second.made == 4
    assert second.last == len(part.operators) - 1, "backward reads it last"
