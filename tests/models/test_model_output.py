"""Sums of losses over valid targets, in at least float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gradus.models.output import IGNORED, classification_loss


def test_the_sum_over_the_count_is_the_usual_mean() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 11), torch.randint(0, 11, (3, 5))
    output = classification_loss(logits, targets, training=True)
    torch.testing.assert_close(output.loss_sum / output.count, F.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def test_ignored_targets_count_for_nothing() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 5, 11, requires_grad=True), torch.randint(0, 11, (3, 5))
    targets[0] = IGNORED
    output = classification_loss(logits, targets, training=False)
    kept = classification_loss(logits[1:], targets[1:], training=False)
    assert output.count == 10
    torch.testing.assert_close(output.loss_sum, kept.loss_sum)
    assert output.correct == kept.correct
    output.loss_sum.backward()
    assert logits.grad is not None
    assert not logits.grad[0].any()


def test_a_batch_with_only_ignored_targets_is_zero_and_not_nan() -> None:
    output = classification_loss(torch.randn(2, 11), torch.full((2,), IGNORED), training=False)
    assert (output.loss_sum, output.count, output.correct) == (0, 0, 0)


@pytest.mark.parametrize(
    ("found", "summed_in"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_are_float32_or_wider(found: torch.dtype, summed_in: torch.dtype) -> None:
    logits, targets = torch.randn(4, 11).to(found), torch.arange(4)
    output = classification_loss(logits, targets, training=False)
    assert [tensor.dtype for tensor in output if tensor is not None] == [summed_in] * 3
    torch.testing.assert_close(
        output.loss_sum, F.cross_entropy(logits.to(summed_in), targets, reduction="sum"), rtol=0, atol=0
    )


def test_correct_is_only_counted_in_evaluation() -> None:
    logits = torch.eye(4)
    assert classification_loss(logits, torch.tensor([0, 1, 3, IGNORED]), training=False).correct == 2
    assert classification_loss(logits, torch.arange(4), training=True).correct is None
