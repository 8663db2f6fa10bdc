"""The kernels for convolutions of a few channels: what they compute is torch's, and they are in what we compile.

Without a GPU the kernels are interpreted (conftest.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lowered_graphs import graphs_looked_at
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradus.training import compilation, thin_convolution
from gradus.training.thin_convolution import DEVICES

pytest.importorskip("triton")

from gradus.training import thin_convolution_kernel
from gradus.training.thin_convolution_kernel import convolution, gradient_by_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NARROW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # Triton's interpreter cannot multiply bf16
LAST = torch.channels_last
FORWARD = torch.ops.gradus.thin_convolution.default
BACKWARD = torch.ops.gradus.thin_convolution_weights.default

# Channels, outputs and the size of images, then kernel, stride and padding.
CASES: dict[str, tuple[int, int, list[int], list[int], list[int], list[int]]] = {
    "ResNet's": (3, 64, [20, 18], [7, 7], [2, 2], [3, 3]),
    "small images": (3, 32, [9, 11], [3, 3], [1, 1], [1, 1]),
    "one channel, no border": (1, 6, [12, 13], [5, 5], [1, 1], [0, 0]),
    "patches": (4, 96, [16, 16], [4, 4], [4, 4], [0, 0]),
    "other rows than columns": (2, 24, [8, 15], [3, 5], [1, 2], [0, 2]),
    "single pixels": (3, 16, [5, 4], [1, 1], [1, 1], [0, 0]),
}


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return values.to(memory_format=LAST)


def convolved(name: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Images, weights and a gradient of the result; in float64, the result and the gradient by the weights."""
    channels, outputs, size, kernel, stride, padding = CASES[name]
    x, weights = drawn(3, channels, *size, dtype=dtype), drawn(outputs, channels, *kernel, seed=1, dtype=dtype)
    exact = weights.double().requires_grad_()
    y = F.conv2d(x.double(), exact, None, stride, padding)
    gradient = drawn(*y.shape, seed=2, dtype=dtype)
    (by_weights,) = torch.autograd.grad(y, exact, gradient.double())
    return x, weights, gradient, y.detach(), by_weights


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Relative to the largest number: small ones are sums of larger ones."""
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert found.dtype == dtype
    assert float((found - expected).abs().max()) <= rounding * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, NARROW])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    *_, kernel, stride, padding = CASES[name]
    x, weights, gradient, y, by_weights = convolved(name, dtype)
    found = convolution(x, weights, stride, padding)
    assert found.is_contiguous(memory_format=LAST)
    assert_close(found, y, dtype)
    assert_close(gradient_by_weights(gradient, x, kernel, stride, padding), by_weights, dtype)


def test_more_outputs_and_pixels_than_a_program_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_convolution_kernel, "MOST_OUTPUTS", 16)
    monkeypatch.setattr(thin_convolution_kernel, "PIXELS", 16)
    monkeypatch.setattr(thin_convolution_kernel, "TILES", 2)
    *_, kernel, stride, padding = CASES["other rows than columns"]
    x, weights, gradient, y, by_weights = convolved("other rows than columns")
    assert_close(convolution(x, weights, stride, padding), y, torch.float32)
    assert_close(gradient_by_weights(gradient, x, kernel, stride, padding), by_weights, torch.float32)


def test_another_layout_is_put_right() -> None:
    *_, kernel, stride, padding = CASES["ResNet's"]
    x, weights, gradient, y, by_weights = convolved("ResNet's")
    assert_close(convolution(x.contiguous(), weights.contiguous(), stride, padding), y, torch.float32)
    found = gradient_by_weights(gradient.contiguous(), x.contiguous(), kernel, stride, padding)
    assert_close(found, by_weights, torch.float32)


@pytest.mark.parametrize("name", ["ResNet's", "one channel, no border"])
def test_without_values_they_have_the_shape_and_the_layout_that_they_have(name: str) -> None:
    *_, kernel, stride, padding = CASES[name]
    x, weights, gradient, *_ = convolved(name, NARROW)
    given = [(FORWARD, (x, weights), (stride, padding)), (BACKWARD, (gradient, x), (kernel, stride, padding))]
    for operator, tensors, window in given:
        found = operator(*tensors, *window)
        with FakeTensorMode() as mode:
            fake = operator(*(mode.from_tensor(tensor) for tensor in tensors), *window)
        assert (fake.shape, fake.stride(), fake.dtype) == (found.shape, found.stride(), found.dtype)


def test_more_images_than_can_be_counted_go_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_convolution, "MOST_ELEMENTS", 0)
    monkeypatch.setattr(thin_convolution_kernel, "convolution", None)
    monkeypatch.setattr(thin_convolution_kernel, "gradient_by_weights", None)
    *_, kernel, stride, padding = CASES["small images"]
    x, weights, gradient, y, by_weights = convolved("small images")
    assert_close(FORWARD(x, weights, stride, padding), y, torch.float32)
    found = BACKWARD(gradient, x, kernel, stride, padding)
    assert_close(found, by_weights, torch.float32)
    assert found.is_contiguous(memory_format=LAST)


# --- in compiled code


class Network(nn.Module):
    def __init__(self, channels: int = 3, bias: bool = True, **settings: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 16, 3, padding=1, stride=2, bias=bias, **settings)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.norm(self.first(x)).relu())
        return y


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The operators of the graphs that are compiled during a test, where a CPU counts as a device with the kernels."""
    seen: list[Any] = []
    with graphs_looked_at(monkeypatch, thin_convolution, lambda calls: seen.extend(node.target for node in calls)):
        yield seen


def compiled_and_eager(**settings: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(1)
    eager = Network(**settings).to(DEVICE, memory_format=LAST)
    compiled = copy.deepcopy(eager)
    compilation.compile_model(compiled)
    return compiled, eager, drawn(4, settings.get("channels", 3), 12, 10)


def gradients(model: nn.Module, x: Tensor, dtype: torch.dtype = NARROW) -> list[Tensor]:
    model.zero_grad()
    with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
        y = model(x)
    y.float().square().mean().backward()
    # A bias before a norm has no gradient but what rounding leaves.
    return [p.grad for name, p in model.named_parameters() if p.grad is not None and name != "first.bias"]


def furthest(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest error of a gradient, relative to the largest of its numbers."""
    return max(float((one - g).abs().max() / g.abs().max()) for one, g in zip(found, expected, strict=True))


def is_as_exact(compiled: nn.Module, eager: nn.Module, x: Tensor) -> bool:
    exact = [g.clone() for g in gradients(eager, x, torch.float32)]
    usual = max(furthest(gradients(eager, x), exact), torch.finfo(NARROW).eps)  # it may be lucky
    return furthest(gradients(compiled, x), exact) < 2 * usual


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_compiled_network_has_the_kernels_and_learns_the_same(lowered: list[Any], channels: int, bias: bool) -> None:
    assert is_as_exact(*compiled_and_eager(channels=channels, bias=bias))
    assert (lowered.count(FORWARD), lowered.count(BACKWARD)) == (1, 1)
    assert lowered.count(torch.ops.aten.convolution.default) == 1, "the second is left as it is"
    assert lowered.count(torch.ops.aten.convolution_backward.default) == 1


def test_the_number_of_images_may_change(lowered: list[Any]) -> None:
    """From the second number on, code is compiled for any."""
    compiled, eager, x = compiled_and_eager()
    for images in (4, 3, 2):
        assert is_as_exact(compiled, eager, x[:images])
    assert (lowered.count(FORWARD), lowered.count(BACKWARD)) == (2, 2)


def test_a_gradient_by_the_images_is_left_to_torch(lowered: list[Any]) -> None:
    compiled, eager, x = compiled_and_eager()
    assert is_as_exact(compiled, eager, x.requires_grad_())
    assert (lowered.count(FORWARD), lowered.count(BACKWARD)) == (1, 0)


@pytest.mark.parametrize("settings", [{"channels": 8}, {"dilation": 2}, {"groups": 2, "channels": 4}])
def test_what_the_kernels_are_not_for_is_left_alone(lowered: list[Any], settings: dict[str, Any]) -> None:
    assert is_as_exact(*compiled_and_eager(**settings))
    assert (lowered.count(FORWARD), lowered.count(BACKWARD)) == (0, 0)


def test_channels_that_lie_apart_are_left_alone(lowered: list[Any]) -> None:
    assert is_as_exact(*(of.to(memory_format=torch.contiguous_format) for of in compiled_and_eager()))
    assert lowered.count(FORWARD) == 0  # what is kept for backward is as the compiler likes it


def test_in_32_bits_it_is_left_alone(lowered: list[Any]) -> None:
    compiled, eager, x = compiled_and_eager()
    assert furthest(gradients(compiled, x, torch.float32), gradients(eager, x, torch.float32)) < 1e-5
    assert (lowered.count(FORWARD), lowered.count(BACKWARD)) == (0, 0)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="needs to be without a GPU")
def test_a_cpu_has_no_kernel(lowered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thin_convolution, "DEVICES", DEVICES)
    assert is_as_exact(*compiled_and_eager())
    assert (lowered.count(FORWARD), lowered.count(BACKWARD)) == (0, 0)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_on_a_gpu_the_kernels_run() -> None:
    torch._dynamo.reset()
    compiled, eager, x = compiled_and_eager()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        assert is_as_exact(compiled, eager, x)
    ran = {event.key for event in profile.key_averages()}
    assert any("_convolution_of_weights" in name for name in ran)
