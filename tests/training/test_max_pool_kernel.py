"""The kernel for max pooling: what it computes is torch's own backward, and it is in the code that we compile.

Without a GPU the kernel is interpreted (conftest.py).
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowered_graphs import graphs_looked_at
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradus.training import compilation, max_pooling
from gradus.training.max_pooling import DEVICES

pytest.importorskip("triton")

from gradus.training import max_pool_kernel
from gradus.training.max_pool_kernel import max_pool_backward

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OURS = torch.ops.gradus.max_pool_backward.default
LAST = torch.channels_last
# The relative error of a number that is rounded. Triton's interpreter cuts off the digits that bf16 has not.
ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2**-7 if DEVICE.type == "cpu" else 2**-8, torch.float16: 2**-11}

Pair = list[int]
POOLINGS: dict[str, tuple[Pair, Pair, Pair, Pair, bool]] = {  # of what size, then kernel, stride, padding, ceil_mode
    "halves": ([8, 8], [2, 2], [2, 2], [0, 0], False),
    "halves of odd sizes": ([9, 7], [2, 2], [2, 2], [0, 0], False),
    "halves of odd sizes, with the rest": ([9, 7], [2, 2], [2, 2], [0, 0], True),
    "ResNet's": ([12, 12], [3, 3], [2, 2], [1, 1], False),
    "ResNet's, of odd sizes": ([13, 11], [3, 3], [2, 2], [1, 1], False),
    "every pixel": ([6, 7], [3, 3], [1, 1], [1, 1], False),
    "overlapping, with the rest": ([8, 10], [3, 3], [2, 2], [0, 0], True),
    "padding as wide as a step": ([9, 9], [5, 5], [2, 2], [2, 2], False),
    "other rows than columns": ([9, 6], [3, 2], [2, 1], [1, 0], True),
    "one window": ([3, 3], [3, 3], [3, 3], [0, 0], False),
}


def pooled(name: str, channels: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """A gradient, offsets as the compiler has them, and the gradient in float64 by what was pooled."""
    size, kernel, stride, padding, ceil_mode = POOLINGS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((3, channels, *size), generator=generator).to(DEVICE, torch.float64)
    y, indices = F.max_pool2d(x.requires_grad_(), kernel, stride, padding, ceil_mode=ceil_mode, return_indices=True)
    gradient = torch.randn(y.shape, generator=generator).to(DEVICE, dtype).to(memory_format=LAST)
    (expected,) = torch.autograd.grad(y, x, gradient.double())
    rows, columns = (torch.arange(count, device=DEVICE) for count in y.shape[2:])
    down = indices // size[1] - (rows * stride[0] - padding[0])[:, None]
    right = indices % size[1] - (columns * stride[1] - padding[1])
    offsets = (down * kernel[1] + right).to(torch.int8)
    return gradient, offsets.to(memory_format=LAST), expected


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("channels", [8, 24, 64])
@pytest.mark.parametrize("name", POOLINGS)
def test_the_gradient_is_that_of_torch(name: str, channels: int, dtype: torch.dtype) -> None:
    size, kernel, stride, padding, _ = POOLINGS[name]
    gradient, offsets, expected = pooled(name, channels, dtype)
    found = max_pool_backward(gradient, offsets, size, kernel, stride, padding)
    assert found.dtype == dtype
    assert found.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(found.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)


def test_more_channels_than_a_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pool_kernel, "MOST_CHANNELS", 16)
    size, kernel, stride, padding, _ = POOLINGS["ResNet's"]
    gradient, offsets, expected = pooled("ResNet's", 40, torch.float32)
    found = max_pool_backward(gradient, offsets, size, kernel, stride, padding)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_another_layout_is_put_right() -> None:
    size, kernel, stride, padding, _ = POOLINGS["ResNet's"]
    gradient, offsets, expected = pooled("ResNet's", 8, torch.float32)
    found = max_pool_backward(gradient.contiguous(), offsets.contiguous(), size, kernel, stride, padding)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_without_values_it_has_the_shape_and_the_layout_that_it_has() -> None:
    size, kernel, stride, padding, _ = POOLINGS["ResNet's, of odd sizes"]
    gradient, offsets, _ = pooled("ResNet's, of odd sizes", 24, torch.bfloat16)
    found = OURS(gradient, offsets, size, kernel, stride, padding)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(tensor) for tensor in (gradient, offsets)]
        fake = OURS(*given, size, kernel, stride, padding)
    assert (fake.shape, fake.stride(), fake.dtype) == (found.shape, found.stride(), found.dtype)


# --- in compiled code


class Pools(nn.Module):
    """Two poolings in what is around them in networks: the gradient of the first is a sum."""

    def __init__(self, channels: int = 8, dilation: int = 1, flat: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.pool = nn.MaxPool2d(3, 2, 1, dilation)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.halves = nn.MaxPool2d(2)
        self.third = nn.Linear(channels * 5 * 4, 4) if flat else nn.Conv2d(channels, 4, 1)
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.norm(self.first(x)).relu())
        x = self.halves((x + self.second(x)).relu())
        y: Tensor = self.third(x.flatten(1) if self.flat else x)
        return y


Seen = list[tuple[Any, list[Any]]]  # operators of a graph, each with the formats of what goes in


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Seen]]:
    """Each graph that is compiled during a test, after our passes, which take a CPU for a device with the kernel."""
    seen: list[Seen] = []

    def look(calls: list[fx.Node]) -> None:
        formats = [[getattr(of.meta["val"], "dtype", None) for of in node.all_input_nodes] for node in calls]
        seen.append([(node.target, inputs) for node, inputs in zip(calls, formats, strict=True)])

    with graphs_looked_at(monkeypatch, max_pooling, look):
        yield seen


def compiled_and_eager(**settings: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(1)
    eager, x = Pools(**settings).to(DEVICE, memory_format=LAST), torch.randn(4, 3, 22, 18, device=DEVICE)
    x = x.to(memory_format=LAST)
    compiled = copy.deepcopy(eager)
    compilation.compile_model(compiled)
    return compiled, eager, x


def gradients(model: nn.Module, x: Tensor, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        y = model(x)
    y.float().square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def furthest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of a gradient, relative to the largest of its numbers."""
    return max(float((one - g).abs().max() / g.abs().max()) for one, g in zip(found, expected, strict=True))


def error_in_16_bits(model: nn.Module, eager: nn.Module, x: Tensor) -> float:
    """Not from an eager one in 16 bits: which of two numbers is the largest there often depends on rounding."""
    exact = [g.clone() for g in gradients(eager, x)]
    return furthest(gradients(model, x, torch.bfloat16), exact)


def times(lowered: list[Seen], operator: Any) -> int:
    return sum(target is operator for seen in lowered for target, _ in seen)


@pytest.fixture(params=[False, True], ids=["as torch likes", "deterministic"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[bool]:
    """If it is, every torch has backward as one operator."""
    torch.use_deterministic_algorithms(request.param, warn_only=True)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_a_compiled_model_has_the_kernel_and_learns_the_same(lowered: list[Seen]) -> None:
    compiled, eager, x = compiled_and_eager()
    assert furthest(gradients(compiled, x), gradients(eager, x)) < 1e-5
    assert times(lowered, OURS) == 2
    assert times(lowered, torch.ops.aten.max_pool2d_with_indices_backward.default) == 0
    assert times(lowered, torch.ops.aten.scatter_add.default) == 0


@pytest.mark.usefixtures("deterministic")
def test_in_16_bits_it_gets_bytes_and_not_indices(lowered: list[Seen]) -> None:
    compiled, eager, x = compiled_and_eager()
    assert error_in_16_bits(compiled, eager, x) < 2 * error_in_16_bits(eager, eager, x)
    inputs = [inputs for seen in lowered for target, inputs in seen if target is OURS]
    assert inputs == [[torch.bfloat16, torch.int8]] * 2, "and nothing of what was pooled"
    assert not any(torch.int64 in inputs for _, inputs in lowered[-1]), "which nobody computes then"


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, device=DEVICE))
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.pool(x * self.scale)
        return y


def test_of_equal_numbers_the_first_gets_the_gradient(lowered: list[Seen]) -> None:
    compiled, eager = Scaled(), Scaled()
    compilation.compile_model(compiled)
    x = torch.randint(0, 2, (2, 8, 13, 11), generator=torch.Generator().manual_seed(1)).float()
    found, expected = (x.to(DEVICE, memory_format=LAST, copy=True).requires_grad_() for _ in range(2))
    for model, given in ((compiled, found), (eager, expected)):
        (model(given) + 1).square().sum().backward()
    assert times(lowered, OURS) == 1
    assert found.grad is not None
    assert expected.grad is not None
    assert torch.equal(found.grad, expected.grad)


def test_the_number_of_images_may_change(lowered: list[Seen]) -> None:
    """From the second number on, code is compiled for any."""
    compiled, eager, x = compiled_and_eager()
    for images in (4, 3, 2):
        assert furthest(gradients(compiled, x[:images]), gradients(eager, x[:images])) < 1e-5
    assert times(lowered, OURS) == 4


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        ({"channels": 12}, 0),
        ({"dilation": 2}, 1),  # the other is replaced
        ({"flat": True}, 1),  # the gradient has the layout of a row of a matrix
    ],
)
def test_what_the_kernel_is_not_for_is_left_alone(lowered: list[Seen], settings: dict[str, Any], kernels: int) -> None:
    compiled, eager, x = compiled_and_eager(**settings)
    assert furthest(gradients(compiled, x), gradients(eager, x)) < 1e-5
    assert times(lowered, OURS) == kernels


def test_channels_that_lie_apart_are_left_alone(lowered: list[Seen]) -> None:
    compiled, eager, x = (of.to(memory_format=torch.contiguous_format) for of in compiled_and_eager())
    assert furthest(gradients(compiled, x), gradients(eager, x)) < 1e-5
    assert times(lowered, OURS) == 0


def test_in_64_bits_it_is_left_alone(lowered: list[Seen]) -> None:
    compiled, eager, x = (of.double() for of in compiled_and_eager())
    assert furthest(gradients(compiled, x), gradients(eager, x)) < 1e-6
    assert times(lowered, OURS) == 0


@pytest.mark.skipif(DEVICE.type != "cpu", reason="needs to be without a GPU")
def test_a_cpu_has_no_kernel(lowered: list[Seen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_pooling, "DEVICES", DEVICES)
    compiled, eager, x = compiled_and_eager()
    assert furthest(gradients(compiled, x), gradients(eager, x)) < 1e-5
    assert times(lowered, OURS) == 0


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_on_a_gpu_a_compiled_network_in_bf16_learns_as_an_eager_one() -> None:
    torch._dynamo.reset()
    compiled, eager, x = compiled_and_eager(channels=64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        error = error_in_16_bits(compiled, eager, x)
    assert error < 2 * error_in_16_bits(eager, eager, x)
    ran = [event.key for event in profile.key_averages() if "_gradient_of_tiles" in event.key]
    assert ran, "the kernel ran"


def test_triton_is_loaded_by_nothing_but_the_kernel() -> None:
    code = """
import sys, gradus.training.graph_passes
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
