"""Where results depend on numbers that are not there, they are what is to be expected."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from fake_runs import on_fake_gpu
from torch import Tensor


def test_a_scalar_is_one_and_a_condition_holds() -> None:
    with on_fake_gpu():
        assert torch.empty(()).item() == 1.0
        assert torch.empty((), dtype=torch.int64).item() == 1
        assert bool(torch.empty((), dtype=torch.bool))
        assert bool((torch.empty(4) > 0).any())
        assert torch.equal(torch.empty(4), torch.empty(4))
        assert torch.empty((), dtype=torch.complex64).item() == 1


def test_a_mask_is_true_everywhere_if_nothing_is_known_about_it() -> None:
    with on_fake_gpu():
        labels, x = torch.empty(4, 8, dtype=torch.int64), torch.empty(4, 8, 3)
        mask = labels != -100
        assert mask.nonzero().shape == (32, 2)
        assert x[mask].shape == (32, 3)
        assert torch.masked_select(x, mask[..., None]).shape == (96,)


def test_what_compares_an_index_with_one_of_many_is_true_for_its_share() -> None:
    with on_fake_gpu():
        scores = torch.empty(64, 8)
        for chosen in (scores.topk(2).indices, scores.argmax(-1), scores.max(dim=-1).indices, scores.sort(-1)[1]):
            rows = chosen.numel() // 8
            assert len((chosen == 3).nonzero()) == rows
            assert len((chosen != 3).nonzero()) == 7 * rows
            assert len(torch.where(chosen.flatten().to(torch.int32) == 3)[0]) == rows
            assert not bool((chosen == 3).flatten()[0])
            assert (chosen == 3).sum().item() == rows
        assert torch.empty(8, dtype=torch.int64).max().item() == 1  # a value, and no index
        assert len((torch.empty(64, 8, 3).argmax(1) == 2).nonzero()) == 64 * 3 // 8


def test_one_hot_vectors_have_one_element() -> None:
    with on_fake_gpu() as (operators, _):
        mask = F.one_hot(torch.empty(32, 2, dtype=torch.int64), num_classes=8)
        assert operators.names.count("scatter_") == 1  # as CUDA makes them
        assert mask.shape == (32, 2, 8)
        assert len(torch.where(mask.permute(2, 1, 0)[3])[0]) == 32 * 2 // 8
        hit = torch.greater(mask.permute(2, 1, 0).sum(dim=(-1, -2)), 0).nonzero()
        assert len(hit) == 8
        assert not any(expert[0] == 7 for expert in hit)


@pytest.mark.parametrize("count", [torch.bincount, lambda x, minlength: torch.histc(x.float(), bins=minlength)])
def test_counts_are_even_and_add_up(count: object) -> None:
    assert callable(count)
    with on_fake_gpu():
        chosen = torch.empty(64, 8).topk(1).indices.flatten()
        counts: Tensor = count(chosen[:62], minlength=8)
        assert [int(n) for n in counts.tolist()] == [8] * 6 + [7] * 2
        assert [int(n) for n in counts.cumsum(0).tolist()] == [8, 16, 24, 32, 40, 48, 55, 62]
        assert counts[3].item() == 62 // 8
        pieces = torch.split(torch.empty(62, 3), [int(n) for n in counts.tolist()])
        assert [len(piece) for piece in pieces] == [8] * 6 + [7] * 2


def test_there_are_no_more_different_numbers_than_to_choose_from() -> None:
    with on_fake_gpu():
        chosen = torch.empty(64, 8).argmax(-1)
        assert len(chosen.unique()) == 8
        assert len(torch.empty(64).unique()) == 64
        values, inverse, counts = torch.unique(chosen, return_inverse=True, return_counts=True)
        assert (values.shape, inverse.shape, counts.shape) == ((8,), (64,), (8,))


def test_a_scalar_is_compared_by_what_is_expected_of_it() -> None:
    with on_fake_gpu():
        labels = torch.empty(8, dtype=torch.int64)
        assert not bool(labels.max() >= 100)  # as in checks of input
        assert bool(labels.min() >= 0)
        assert not bool(torch.rand([]) < 0.1)  # as in layers that are left out at random
        assert bool(torch.rand(1) < 0.9)
        x = torch.empty(8)
        assert not bool(torch.isnan(x).any() | torch.isinf(x).any())
        assert bool(torch.isfinite(x).all())
        assert not bool((~torch.isfinite(x)).any())


def test_ctc_loss_goes_over_all_paths() -> None:
    with on_fake_gpu() as (operators, _):
        scores, lengths = torch.empty(50, 4, 32, requires_grad=True), torch.empty(4, dtype=torch.int64)
        F.ctc_loss(scores, torch.empty(4, 8, dtype=torch.int64), lengths, lengths).backward()
        paths = next(results[1] for name, results in operators.ran if name == "_ctc_loss")
        assert paths.shape == (4, 50, 2 * 8 + 1)
        assert scores.grad is not None


def test_what_was_marked_as_chosen_is_counted() -> None:
    with on_fake_gpu():
        chosen = torch.empty(64, 8).topk(2).indices
        marked = torch.zeros(64, 8).scatter(1, chosen, 1)
        assert marked.long().sum(0).tolist() == [64 * 2 // 8] * 8
        assert len(marked.nonzero()) == 64 * 2


def test_gradients_flow_through_what_a_mask_chooses() -> None:
    with on_fake_gpu() as (operators, _):
        x = torch.empty(64, 8, requires_grad=True)
        chosen = x.detach().argmax(-1)
        x[chosen == 2].sum().backward()
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert {"index", "index_put"} & set(operators.names)
