"""Initialisation: the weights are the same whether one rank draws all of them or many draw their own rows."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from state_cases import drawn_along, drawn_in_parts, drawn_whole
from torch import nn

from gradus.models import initialise
from gradus.models.initialise import draw, reset_layers


@pytest.mark.parametrize(("kind", "ranks", "chunk"), [("gpt", 2, 240), ("gpt", 4, 240), ("resnet", 2, 20_000)])
def test_ranks_that_hold_some_rows_draw_what_one_rank_draws(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, kind: str, ranks: int, chunk: int
) -> None:
    monkeypatch.setattr(initialise, "CHUNK", chunk)  # several to a parameter
    expected = drawn_whole(kind, seed=5)
    total = sum(p.numel() for p in expected.values())
    for weights, drawn in pool.run(ranks, drawn_in_parts, kind, 5, chunk):
        assert weights.keys() == expected.keys()
        for name, weight in expected.items():
            assert torch.equal(weights[name], weight), name
        assert drawn < 0.75 * total, "a rank draws its own part, and the chunks that it shares with a neighbour"


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (-1, 1), (1, 1)])
def test_a_matrix_that_is_cut_along_any_dimension(pool: Pool, dims: tuple[int, int]) -> None:
    expected = torch.zeros(7, 5)
    draw(expected, "matrix", "normal", 1.0, seed=3)
    assert expected.std() > 0.5
    for found in pool.run(4, drawn_along, dims):
        assert torch.equal(found, expected)


def test_weights_depend_on_seed_and_name_and_on_nothing_drawn_before() -> None:
    def drawn(name: str, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        torch.rand(seed)
        tensor = torch.zeros(40, 30)
        draw(tensor, name, "normal", 1.0)
        return tensor

    assert torch.equal(drawn("a", 1), drawn("a", 1))
    assert not torch.equal(drawn("a", 1), drawn("a", 2))
    assert not torch.equal(drawn("a", 1), drawn("b", 1))


def test_a_wider_format_holds_the_same_weights() -> None:
    narrow, wide = torch.zeros(40, 30), torch.zeros(40, 30, dtype=torch.float64)
    for tensor in (narrow, wide):
        draw(tensor, "a", "uniform", 0.5, seed=1)
    assert torch.equal(wide, narrow.double())
    assert narrow.abs().max() <= 0.5


def test_layers_start_as_torch_starts_them() -> None:
    model = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(400, 300))
    model[1].running_mean.fill_(7)  # type: ignore[union-attr,operator]
    theirs = {name: p.detach().std().item() for name, p in model.named_parameters() if "1." not in name}
    reset_layers(model)
    for name, parameter in model.named_parameters():
        if name in theirs:
            assert parameter.std().item() == pytest.approx(theirs[name], rel=0.2), name
    assert (model[1].running_mean == 0).all()  # type: ignore[comparison-overlap,union-attr]
