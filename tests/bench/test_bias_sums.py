"""The lever that sums biases' gradients where their matrix is written: it is torch's result, and it finds its place.

Without a GPU the kernels are interpreted (conftest.py).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lowered_graphs import graphs_looked_at
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gradus.models import catalogue
from gradus.training import compilation, graph_passes

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative to the largest number. Triton's interpreter cuts off the digits that bf16 has not.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-7 if DEVICE.type == "cpu" else 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module")
def lever() -> Iterator[ModuleType]:
    before = set(sys.modules)
    sys.path.insert(0, str(BENCHMARKS))
    import bias_sums
    import bias_sums_kernel  # noqa: F401, with its place in the lever

    yield bias_sums
    sys.path.remove(str(BENCHMARKS))
    for name in set(sys.modules) - before:
        if name.startswith("bias_sums"):
            del sys.modules[name]


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(found: Tensor, expected: Tensor, rounding: float) -> None:
    assert found.shape == expected.shape
    assert float((found.double() - expected).abs().max()) <= rounding * float(expected.abs().max())


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(3, 70, 40), (1, 128, 264), (130, 8)])
def test_gelu_backward_and_its_sums_are_those_of_torch(
    lever: ModuleType, shape: tuple[int, ...], approximate: str, dtype: torch.dtype
) -> None:
    gradient, x = (drawn(*shape, seed=seed, dtype=dtype) for seed in (1, 2))
    exact = torch.ops.aten.gelu_backward(gradient.double(), x.double(), approximate=approximate)
    kernel = torch.ops.gradus.gelu_backward_sums_and_gelu
    found, sums, again = kernel(gradient, x, approximate == "tanh")
    assert_close(found, exact, ROUNDING[dtype])
    assert_close(sums.sum(0), exact.flatten(0, -2).sum(0), 2e-6 * len(sums) + 1e-5)  # never rounded to 16 bits
    assert_close(again, nn.functional.gelu(x.double(), approximate=approximate), ROUNDING[dtype])
    assert sums.dtype == torch.float32
    alone = torch.ops.gradus.gelu_backward_and_sums(gradient, x, approximate == "tanh")
    assert torch.equal(alone[0], found)
    assert torch.equal(alone[1], sums)


# Shapes of the parts, the dimension in which they are joined, and the first one that is a column.
JOINED: dict[str, tuple[list[tuple[int, ...]], int, int]] = {
    "queries, keys and values": ([(2, 70, 4, 8)] * 3, 3, 2),
    "more queries than keys": ([(2, 70, 2, 3, 8), (2, 70, 2, 1, 8), (2, 70, 2, 1, 8)], 3, 2),
    "two, one after the other": ([(130, 264), (130, 8)], 1, 1),
}


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("name", JOINED)
def test_joined_gradients_and_their_sums_are_those_of_torch(lever: ModuleType, name: str, dtype: torch.dtype) -> None:
    shapes, dim, first_column = JOINED[name]
    parts = [drawn(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    found, sums = torch.ops.gradus.joined_and_sums(parts, dim, first_column)
    expected = torch.cat(parts, dim)
    assert torch.equal(found, expected)
    rows = expected.double().flatten(first_column).flatten(0, -2)
    assert_close(sums.sum(0), rows.sum(0), 1e-5)


def test_without_values_they_have_the_shape_and_the_layout_that_they_have(lever: ModuleType) -> None:
    gradient, x = (drawn(2, 70, 40, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    shapes, dim, first_column = JOINED["more queries than keys"]
    parts = [drawn(*shape, seed=seed, dtype=torch.float16) for seed, shape in enumerate(shapes)]
    for operator, inputs in (
        (torch.ops.gradus.gelu_backward_and_sums, (gradient, x, True)),
        (torch.ops.gradus.gelu_backward_sums_and_gelu, (gradient, x, False)),
        (torch.ops.gradus.joined_and_sums, (parts, dim, first_column)),
    ):
        found = operator(*inputs)
        with FakeTensorMode() as mode:
            fake = operator(*torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, inputs))
        assert [(f.shape, f.stride(), f.dtype) for f in fake] == [(f.shape, f.stride(), f.dtype) for f in found]


# --- in compiled code


@pytest.fixture
def lowered(lever: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Our operators in the graphs that are compiled during a test, where a CPU counts as a device with the kernels."""
    seen: list[str] = []

    def look(calls: list[Any]) -> None:
        seen.extend(str(node.target).split(".")[1] for node in calls if str(node.target).startswith("gradus."))

    monkeypatch.setattr(graph_passes, "_the_passes", lever.passes_with_sums)
    monkeypatch.setattr(lever, "FEWEST_ROWS", 1)
    with graphs_looked_at(monkeypatch, lever, look):
        yield seen


def gradients(model: nn.Module, inputs: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    model.zero_grad()
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        result = model(*inputs)
    loss = result.loss_sum / result.count if hasattr(result, "loss_sum") else result.float().square().mean()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def furthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of a gradient, relative to the largest of its numbers."""
    return max(float((found[name] - g).abs().max() / g.abs().max()) for name, g in expected.items() if g.abs().max())


def assert_learns_the_same(eager: nn.Module, inputs: Any, dtype: torch.dtype = torch.bfloat16) -> None:
    compiled = copy.deepcopy(eager)
    compilation.compile_model(compiled)
    exact = gradients(eager, inputs, torch.float32)
    usual = max(furthest(gradients(eager, inputs, dtype), exact), torch.finfo(dtype).eps)
    assert furthest(gradients(compiled, inputs, dtype), exact) < 2 * usual


class Inner(nn.Module):
    def __init__(self, approximate: str, bias: bool = True) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64, bias=bias)
        self.activation = nn.GELU(approximate)
        self.down = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.activation(self.up(x)))
        return y


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_between_two_products_has_the_kernel_and_learns_the_same(lowered: list[str], approximate: str) -> None:
    torch.manual_seed(1)
    x = drawn(4, 30, 16, seed=3, dtype=torch.float32)
    assert_learns_the_same(Inner(approximate).to(DEVICE), (x,))
    assert len(lowered) == 1
    assert lowered[0].startswith("gelu_backward")


def test_without_a_bias_there_is_nothing_to_sum(lowered: list[str]) -> None:
    assert_learns_the_same(Inner("none", bias=False).to(DEVICE), (drawn(4, 30, 16, seed=3, dtype=torch.float32),))
    assert lowered == []


def test_in_32_bits_it_is_left_alone(lowered: list[str]) -> None:
    x = drawn(4, 30, 16, seed=3, dtype=torch.float32)
    assert_learns_the_same(Inner("none").to(DEVICE), (x,), torch.float32)
    assert lowered == []


def test_a_gpt_has_both_kernels_in_each_block(lowered: list[str]) -> None:
    torch.manual_seed(1)
    settings = {"layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "context": 32, "vocabulary": 128}
    model = catalogue.build("gpt", settings).to(DEVICE)
    tokens = torch.randint(0, 128, (2, 33), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert_learns_the_same(model, (tokens[:, :-1], tokens[:, 1:]))
    assert sorted(name.split("_")[0] for name in lowered) == ["gelu", "joined"]
