"""AdamW with moments in bf16: rounded by chance, it is right on average, and goes on from a checkpoint as it was.

Without a GPU the kernel is interpreted (conftest.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradus.schema.errors import InputError
from gradus.schema.recipe import OptimizerBlock, Recipe
from gradus.training import narrow_moments
from gradus.training.narrow_moments import NarrowMomentsAdamW, chance, places_of, rounded
from gradus.training.optimizers import build_optimizer
from gradus.training.own_optimizer import check_optimizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
STEP = torch.tensor(3.0, device=DEVICE)


def test_numbers_are_rounded_to_either_side_and_right_on_average() -> None:
    value = 1.0 + 2**-7 * 0.25  # a quarter of the way to the next number of bf16
    found = rounded(
        torch.full((65536,), value, device=DEVICE), chance(torch.arange(65536, device=DEVICE), STEP) >> 16
    ).float()
    assert sorted(set(found.tolist())) == [1.0, 1.0 + 2**-7]
    assert float(found.mean()) == pytest.approx(value, abs=2**-7 * 0.01)
    assert torch.equal(
        rounded(-torch.full((9,), value, device=DEVICE), chance(torch.arange(9, device=DEVICE), STEP) >> 16).float(),
        -found[:9],
    )


def test_what_bf16_has_stays_and_what_is_not_finite_too() -> None:
    most = torch.full((5,), 65535, device=DEVICE)
    exact = torch.tensor([0.0, -1.5, 3.0e38, 2.0**-126, 256.0], device=DEVICE).bfloat16().float()
    assert torch.equal(rounded(exact, most).float(), exact)
    bits = torch.tensor([0x7F800000, -0x00800000, 0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32, device=DEVICE)
    broken = rounded(bits.view(torch.float32), most).float()
    assert broken[:2].tolist() == [float("inf"), float("-inf")]
    assert broken[2:].isnan().all()


def test_both_moments_have_chances_of_their_own_and_so_has_each_step() -> None:
    places = torch.arange(100_000, device=DEVICE)
    noise = chance(places, STEP)
    high, low = (noise >> 16).double(), (noise & 0xFFFF).double()
    other = (chance(places, STEP + 1) >> 16).double()
    for one, two in ((high, low), (high, other), (high[1:], high[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < 0.02


def test_places_count_the_numbers_of_a_tensor() -> None:
    assert places_of(torch.zeros(2, 3, 4)).tolist() == torch.arange(24).view(2, 3, 4).tolist()
    assert int(places_of(torch.tensor(1.0))) == 0


def trained(optimizer: type[torch.optim.Optimizer], steps: int, **settings: Any) -> tuple[list[nn.Parameter], Any]:
    """With gradients whose squares change little from step to step: far less than the last digit of bf16."""
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator).to(DEVICE)) for size in ((64, 33), (50,))]
    built = optimizer(parameters, lr=1e-3, weight_decay=0.1, betas=(0.9, 0.999), **settings)
    for _ in range(steps):
        for parameter in parameters:
            drawn = torch.randn(parameter.shape, generator=generator).to(DEVICE)
            parameter.grad = 0.1 + 0.02 * drawn
        built.step()
    return parameters, built


def test_it_follows_torchs_where_rounding_to_the_nearest_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 1200  # until the mean of squares has come to where it stays: 1 - 0.999**1200 is 0.7
    expected, torchs = trained(torch.optim.AdamW, steps)

    def apart() -> float:
        found, ours = trained(NarrowMomentsAdamW, steps)
        assert ours.state[found[0]]["exp_avg_sq"].dtype == torch.bfloat16
        squares = (ours.state[found[0]]["exp_avg_sq"].double(), torchs.state[expected[0]]["exp_avg_sq"].double())
        return abs(float(squares[0].mean() / squares[1].mean()) - 1)

    assert apart() < 0.002
    monkeypatch.setattr(narrow_moments, "rounded", lambda values, noise: values.bfloat16())
    assert apart() > 0.05, "they stop where a step adds less than half of a digit"


def test_pieces_of_a_tensor_are_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = trained(NarrowMomentsAdamW, 3)
    monkeypatch.setattr(narrow_moments, "PIECE", 100)
    pieces, _ = trained(NarrowMomentsAdamW, 3)
    assert all(torch.equal(one, two) for one, two in zip(whole, pieces, strict=True))


def test_the_kernel_does_the_same() -> None:
    pytest.importorskip("triton")
    from gradus.training.one_pass_adamw import OnePassNarrowMoments

    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(size, generator=generator).to(DEVICE) for size in ((7, 1300), (5,))]
    ours, theirs = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    one_pass, plain = OnePassNarrowMoments(ours, lr=1e-2), NarrowMomentsAdamW(theirs, lr=1e-2)
    narrow = {p: torch.empty_like(p, dtype=torch.bfloat16) for p in ours}
    for _ in range(4):
        drawn = [torch.randn(value.shape, generator=generator).to(DEVICE, torch.bfloat16) for value in start]
        one_pass.update(dict(zip(ours, drawn, strict=True)), narrow, torch.tensor(0.5, device=DEVICE))
        for parameter, gradient in zip(theirs, drawn, strict=True):
            parameter.grad = gradient.float() * 0.5
        plain.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        for moment in ("exp_avg", "exp_avg_sq"):
            found, expected = one_pass.state[mine][moment], plain.state[other][moment]
            assert found.dtype == torch.bfloat16
            # A last digit of fp32 decides now and then to which side a number goes.
            assert float((found != expected).float().mean()) < 0.01
            torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=1e-6)


def test_a_number_of_steps_that_lies_elsewhere_is_brought_to_its_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer = NarrowMomentsAdamW([parameter], lr=0.1)
    optimizer.state[parameter] |= {**optimizer._new_state(parameter), "step": torch.tensor(2.0)}  # as restored
    assert optimizer._state_of(parameter)["step"].device == parameter.device


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [optimizer.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]


def test_a_recipe_names_the_format() -> None:
    model = nn.Linear(4, 3)
    optimizer = build_optimizer(model, OptimizerBlock(use="adamw", lr=0.1, moments="bf16", weight_decay=0.01))
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    assert {moment.dtype for moment in moments(model, optimizer)} == {torch.bfloat16}


def test_only_adamw_has_it_and_not_with_everything() -> None:
    with pytest.raises(ValueError, match="only adamw has"):
        OptimizerBlock(use="sgd", lr=0.1, moments="bf16")
    block = OptimizerBlock.model_validate({"use": "adamw", "lr": 0.1, "moments": "bf16", "amsgrad": True})
    with pytest.raises(InputError, match="do not go with amsgrad"):
        build_optimizer(nn.Linear(4, 3), block)
    with pytest.raises(ValueError, match="do not go with fused"):  # which would skip no step that is to be skipped
        NarrowMomentsAdamW([nn.Parameter(torch.zeros(2))], lr=0.1, fused=True)


def test_an_optimizer_of_the_script_has_the_moments_that_it_has() -> None:
    model, recipe = nn.Linear(4, 3), Recipe.from_document({"name": "own", "batch": 2, "steps": 1})
    optimizer = torch.optim.AdamW(model.parameters())
    check_optimizer(optimizer, model, recipe)
    narrow = recipe.model_copy(update={"optimizer": OptimizerBlock(use="adamw", lr=0.1, moments="bf16")})
    with pytest.raises(InputError, match="the script has an optimizer of its own"):
        check_optimizer(optimizer, model, narrow)
