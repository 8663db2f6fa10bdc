"""AdamW in one pass: its weights and its state are those of torch's AdamW, whose state it can take over and hand on.

Without a GPU the kernel is interpreted (conftest.py).
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

pytest.importorskip("triton")

from gradus.training.one_pass_adamw import BLOCK, PART, OnePassAdamW
from gradus.training.own_optimizer import let_update_in_one_pass

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# In programs of the kernel: one, a bit of one, whole ones, whole ones and a bit, and a block and a number.
SIZES = ((1,), (7, 11), (2, PART), (PART // 4, 5), (BLOCK + 1,))
FACTOR = 0.37


def drawn_parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator).to(DEVICE)) for size in SIZES]


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Those that decay and those that do not, with rates, betas and an epsilon of their own."""
    decaying = {"params": parameters[:3], "weight_decay": 0.1, "lr": 3e-3}
    return [decaying, {"params": parameters[3:], "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-6}]


class Pair:
    """torch's optimizer and ours, each with parameters of its own that begin alike, and gradients for both."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.theirs, self.ours = drawn_parameters(), drawn_parameters()
        self.torchs = torch.optim.AdamW(groups_of(self.theirs), lr=1e-2)
        self.one_pass = OnePassAdamW(groups_of(self.ours), lr=1e-2)
        self.narrow = {p: torch.empty_like(p, dtype=dtype) for p in self.ours}
        self.generator = torch.Generator().manual_seed(2)

    def gradients(self) -> list[Tensor]:
        return [torch.randn(size, generator=self.generator).to(DEVICE, self.dtype) for size in SIZES]

    def step(self, without: int | None = None) -> None:
        """With gradients for all parameters but one."""
        found = {number: gradient for number, gradient in enumerate(self.gradients()) if number != without}
        for number, parameter in enumerate(self.theirs):
            parameter.grad = found[number].float() * FACTOR if number in found else None
        self.torchs.step()
        factor = torch.tensor(FACTOR, device=DEVICE)
        self.one_pass.update({self.ours[n]: gradient for n, gradient in found.items()}, self.narrow, factor)

    def assert_alike(self) -> None:
        for theirs, ours in zip(self.theirs, self.ours, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
            expected, found = self.torchs.state[theirs], self.one_pass.state[ours]
            assert expected.keys() == found.keys()
            assert float(found["step"]) == float(expected["step"])
            for moment in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(found[moment], expected[moment], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_norm_is_that_of_all_gradients_as_one(dtype: torch.dtype) -> None:
    """Also of those that have no narrow weights, and without those of parameters that have no gradient."""
    pair = Pair(dtype)
    found = dict(zip(pair.ours[:4], pair.gradients(), strict=False))
    exact = torch.cat([gradient.double().flatten() for gradient in found.values()]).norm()
    some = {p: narrow for p, narrow in pair.narrow.items() if p is not pair.ours[1]}
    assert float(pair.one_pass.norm(found, some)) == pytest.approx(float(exact), rel=1e-6)
    assert float(pair.one_pass.norm({}, {})) == 0.0


def test_a_beta_may_be_zero() -> None:
    pair = Pair(torch.float32)
    for optimizer in (pair.torchs, pair.one_pass):
        optimizer.param_groups[0]["betas"] = (0.0, 0.95)
        optimizer.param_groups[1]["betas"] = (0.9, 0.0)
    for _ in range(3):
        pair.step()
    pair.assert_alike()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_and_state_are_those_of_torch(dtype: torch.dtype) -> None:
    pair = Pair(dtype)
    for _ in range(5):
        pair.step()
    pair.assert_alike()
    # Triton's interpreter cuts off the digits that bf16 has not, where a GPU rounds.
    last_digit = 2**-7 if dtype == torch.bfloat16 else 2**-10
    for weight, narrow in pair.narrow.items():
        assert narrow.dtype == dtype
        torch.testing.assert_close(narrow.float(), weight.detach(), rtol=last_digit, atol=1e-6)


def test_rates_may_change_from_step_to_step() -> None:
    pair = Pair(torch.bfloat16)
    for number in range(3):
        for optimizer in (pair.torchs, pair.one_pass):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (number + 1)
        pair.step()
    pair.assert_alike()


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    pair = Pair(torch.float32)
    pair.step()
    pair.step(without=3)
    pair.step(without=4)  # as many of its group, of other sizes
    pair.step()
    pair.assert_alike()
    assert [int(pair.one_pass.state[p]["step"]) for p in pair.ours] == [4, 4, 4, 3, 3]


@pytest.mark.parametrize("fused", [False, True])
def test_torch_goes_on_with_its_state_and_it_with_that_of_torch(fused: bool) -> None:
    pair = Pair(torch.float32)
    pair.step()
    pair.step()
    # Torch takes over what ours has, and ours what torch's had.
    taken = torch.optim.AdamW(groups_of(pair.theirs), lr=1e-2, fused=fused)
    given = OnePassAdamW(groups_of(pair.ours), lr=1e-2)
    theirs, ours = (copy.deepcopy(optimizer.state_dict()) for optimizer in (pair.torchs, pair.one_pass))
    assert theirs["state"].keys() == ours["state"].keys()
    taken.load_state_dict(ours)
    given.load_state_dict(theirs)
    for group in taken.param_groups:  # which a state dict says too
        group["fused"] = fused
    pair.torchs, pair.one_pass = taken, given
    pair.step()
    pair.step()
    pair.assert_alike()
    assert all(int(state["step"]) == 4 for state in pair.one_pass.state.values())


# --- torch's own, turned into it


def turned(optimizer: torch.optim.Optimizer) -> bool:
    let_update_in_one_pass(optimizer)
    return isinstance(optimizer, OnePassAdamW)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"fused": False}], ids=str)
def test_an_adamw_of_torch_that_has_taken_steps_goes_on_in_one_pass(options: dict[str, Any]) -> None:
    pair = Pair(torch.bfloat16)
    pair.one_pass = torch.optim.AdamW(groups_of(pair.ours), lr=1e-2, **options)  # type: ignore[assignment]
    for _ in range(2):
        for theirs, ours, gradient in zip(pair.theirs, pair.ours, pair.gradients(), strict=True):
            theirs.grad = ours.grad = gradient.float()
        pair.torchs.step()
        pair.one_pass.step()
    assert turned(pair.one_pass)
    assert all(group["fused"] for group in pair.one_pass.param_groups), "others would ask the device for step numbers"
    pair.step()
    for theirs, ours, gradient in zip(pair.theirs, pair.ours, pair.gradients(), strict=True):
        theirs.grad = ours.grad = gradient.float()
    pair.torchs.step()
    pair.one_pass.step()  # which somebody may call
    pair.step()
    pair.assert_alike()
    assert all(int(state["step"]) == 5 for state in pair.one_pass.state.values())


def test_a_scheduler_of_it_goes_on_and_has_nothing_to_complain_about() -> None:
    parameter = nn.Parameter(torch.ones(8, device=DEVICE))
    optimizer = torch.optim.AdamW([parameter], lr=1.0, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    assert turned(optimizer)
    moved = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            before = parameter.detach().clone()
            optimizer.update({parameter: torch.ones_like(parameter)}, {}, torch.ones((), device=DEVICE))
            scheduler.step()
            moved.append(float((before - parameter.detach()).mean()))
    assert moved == pytest.approx([1.0, 0.5, 0.25], rel=1e-4)


def test_hooks_upon_its_steps_are_called_and_find_gradients() -> None:
    pair = Pair(torch.bfloat16)
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        norms.append(float(sum(p.grad.norm() for group in optimizer.param_groups for p in group["params"])))

    pair.one_pass.register_step_pre_hook(note)
    pair.step()
    pair.step()
    pair.assert_alike()
    assert len(norms) == 2
    for weight, narrow in pair.narrow.items():
        assert torch.equal(narrow, weight.bfloat16())


def test_hooks_upon_the_steps_of_all_optimizers_are_called_too() -> None:
    pair, called = Pair(torch.bfloat16), []
    hook = register_optimizer_step_post_hook(lambda optimizer, *_: called.append(optimizer))
    try:
        pair.step()
    finally:
        hook.remove()
    assert called == [pair.torchs, pair.one_pass]


class Own(torch.optim.AdamW):
    """Which may do anything."""


def test_what_the_kernel_does_not_do_is_left_to_torch() -> None:
    def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(torch.zeros(4, 4, dtype=dtype))

    assert turned(torch.optim.AdamW([parameter()]))
    assert not turned(Own([parameter()]))
    assert not turned(torch.optim.Adam([parameter()]))
    assert not turned(torch.optim.AdamW([parameter()], amsgrad=True))
    assert not turned(torch.optim.AdamW([parameter()], maximize=True))
    assert not turned(torch.optim.AdamW([parameter()], differentiable=True))
    assert not turned(torch.optim.AdamW([parameter()], lr=torch.tensor(0.1)))
    assert not turned(torch.optim.AdamW([parameter(), parameter(torch.bfloat16)]))
    assert not turned(torch.optim.AdamW([nn.Parameter(torch.zeros(4, 4)[:, ::2])]))
    replaced = torch.optim.AdamW([parameter()])
    replaced.step = lambda: None  # type: ignore[method-assign, assignment]
    assert not turned(replaced)
