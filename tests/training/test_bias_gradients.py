"""Gradients of biases: sums by sample in what we compile, with the numbers of a plain sum."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.utils import fresh_cache

from gradus.training import bias_gradients, compilation
from gradus.training.graph_passes import GraphPasses

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SUM = torch.ops.aten.sum.dim_IntList


class Block(nn.Module):
    """As in a transformer, with a norm, queries and keys side by side, and a function between two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.both = nn.Linear(width, 2 * width)
        self.wide = nn.Linear(width, 4 * width)
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys = self.both(self.norm(x)).chunk(2, dim=-1)
        x = x + torch.bmm(torch.bmm(queries, keys.transpose(1, 2)).softmax(-1), x)
        y: Tensor = self.back(nn.functional.gelu(self.wide(x)))
        return y


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[int]]]:
    """What each sum in compiled graphs goes over, where a CPU counts as a device that is to have them by sample."""
    seen: list[list[int]] = []
    original = GraphPasses.__call__

    def looking(self: GraphPasses, graph: fx.Graph) -> None:
        original(self, graph)
        graph.lint()
        seen.extend(node.args[1] for node in graph.nodes if node.target is SUM)

    monkeypatch.setattr(GraphPasses, "__call__", looking)
    monkeypatch.setattr(bias_gradients, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(bias_gradients, "LEAST_SUMS", 64)
    torch._dynamo.reset()
    with fresh_cache():
        yield seen
    torch._dynamo.reset()


def compiled_and_eager(width: int = 16) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    eager = Block(width).to(DEVICE, torch.bfloat16)
    compiled = copy.deepcopy(eager)
    compilation.compile_model(compiled)
    return compiled, eager


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(x).float().square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return max(float((found[name] - g).norm() / g.norm()) for name, g in exact.items() if "both.bias" not in name)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)


def test_gradients_are_as_exact_as_torchs_and_summed_by_sample(sums: list[list[int]]) -> None:
    compiled, eager = compiled_and_eager()
    x = drawn(6, 20, 16)
    exact = gradients(copy.deepcopy(eager).double(), x.double())
    assert error(gradients(compiled, x), exact) < 2 * error(gradients(eager, x), exact)
    # Of the two layers whose gradients are made by simple kernels; the third's comes from outside.
    assert sums.count([1]) == 2


def test_what_a_norm_makes_is_left_to_the_compiler(sums: list[list[int]]) -> None:
    """Which sums over rows and columns in one kernel."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(self.layer(x))
            return y

    model = Normed().to(DEVICE, torch.bfloat16)
    compilation.compile_part(model, **compilation.with_graph_passes())
    gradients(model, drawn(6, 20, 16))
    assert [0] in sums
    assert [1] not in sums


@pytest.mark.parametrize("shape", [(1, 20, 16), (120, 16)])
def test_few_sums_and_rows_without_samples_are_left_alone(sums: list[list[int]], shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).to(DEVICE, torch.bfloat16)
    compilation.compile_part(model, **compilation.with_graph_passes())
    gradients(model, drawn(*shape))
    assert [0] in sums
    assert [1] not in sums


def test_in_32_bits_they_are_left_alone(sums: list[list[int]]) -> None:
    compiled, eager = (model.float() for model in compiled_and_eager())
    x = drawn(6, 20, 16).float()
    assert error(gradients(compiled, x), gradients(eager, x)) < 1e-5
    assert [1] not in sums


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_on_a_gpu_the_kernel_that_makes_a_gradient_sums_it() -> None:
    torch._dynamo.reset()
    compiled, _ = compiled_and_eager(width=256)
    x = drawn(32, 512, 256)
    gradients(compiled, x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        gradients(compiled, x)
    backward = {event.key for event in profile.key_averages() if "gelu_backward" in event.key}
    assert len(backward) == 1, "one kernel has all of it"
    assert all("sum" in name for name in backward), backward
