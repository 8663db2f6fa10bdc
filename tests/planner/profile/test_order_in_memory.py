"""A trace says which inputs lie in another order than a kernel reads them, and where the host waits for a value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradus.planner.profile.expected import as_expected
from gradus.planner.profile.recording import Call, Recorder, Step


def recorded(run: Callable[[], object]) -> tuple[list[Step], Call]:
    call = Call("all", block=False)
    with torch._subclasses.FakeTensorMode(), Recorder(as_expected, lambda *_: ()) as recorder:
        recorder.enter(call)
        run()
    return recorder.steps, call


def turned(run: Callable[[], object], name: str) -> list[int]:
    return [step.turned for step in recorded(run)[0] if step.name == name]


def rows() -> Tensor:
    return torch.empty(8, 16, 32)


def test_a_copy_that_makes_columns_of_rows_is_told_from_one_that_moves_rows():
    assert turned(lambda: rows().transpose(1, 2).contiguous(), "clone") == [4 * 8 * 16 * 32]
    assert turned(lambda: rows().transpose(0, 1).contiguous(), "clone") == [0]


def test_a_sum_of_two_that_lie_differently_reads_one_of_them_across():
    assert turned(lambda: rows() + torch.empty(8, 32, 16).transpose(1, 2), "add") == [4 * 8 * 16 * 32]
    assert turned(lambda: rows() + rows(), "add") == [0]
    assert turned(lambda: rows() + torch.empty(16, 1), "add") == [0]  # what is expanded has no order of its own


def test_a_norm_copies_what_does_not_lie_row_by_row():
    def norm(x: Tensor) -> Tensor:
        return torch.layer_norm(x, (32,))

    assert turned(lambda: norm(torch.empty(8, 32, 16).transpose(1, 2)), "native_layer_norm") == [4 * 8 * 16 * 32]
    assert turned(lambda: norm(rows()), "native_layer_norm") == [0]


def test_of_the_products_of_a_layer_only_the_gradient_of_its_weights_has_both_factors_turned():
    x, weight, grad = (lambda: torch.empty(64, 32)), (lambda: torch.empty(48, 32)), (lambda: torch.empty(64, 48))
    assert turned(lambda: torch.mm(x(), weight().t()), "mm") == [0]
    assert turned(lambda: torch.mm(grad(), weight()), "mm") == [4 * 48 * 32]
    assert turned(lambda: torch.mm(grad().t(), x()), "mm") == [4 * 64 * (48 + 32)]


def test_a_convolution_with_channels_last_copies_images_that_lie_otherwise():
    def convolution(layout: torch.memory_format) -> Tensor:
        weight = torch.empty(8, 4, 3, 3).to(memory_format=torch.channels_last)
        return torch.conv2d(torch.empty(2, 4, 16, 16).to(memory_format=layout), weight)

    assert turned(lambda: convolution(torch.contiguous_format), "convolution") == [4 * 2 * 4 * 16 * 16]
    assert turned(lambda: convolution(torch.channels_last), "convolution") == [0]


def test_the_host_waits_where_it_reads_a_value():
    assert recorded(lambda: rows().sum().item())[1].waits == 1
    assert recorded(lambda: (rows() > 0).nonzero())[1].waits == 1
    assert recorded(lambda: rows().sum())[1].waits == 0
