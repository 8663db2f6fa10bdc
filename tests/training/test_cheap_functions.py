"""Cheap functions: formulas of erf and tanh are in the graphs of 16-bit models, and their results do not show it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from gradus.models.layers import GeluMLP
from gradus.training import compilation
from gradus.training.cheap_functions import erf, exp_of_product, tanh, use_cheap_functions
from gradus.training.graph_passes import GraphPasses

aten = torch.ops.aten
EXACT = {"none": aten.erf.default, "tanh": aten.tanh.default}  # what either GELU is made of
DENSE = torch.linspace(-12, 12, 4_000_001, dtype=torch.float64).float()
EXTREME = torch.tensor([0.0, 1e-30, 1e-6, 25.0, 100.0, 1e10, 3e38, float("inf")])
NUMBERS = torch.cat([DENSE, EXTREME, -EXTREME])


def at_once(operator: Callable[..., Tensor], *inputs: Any) -> Tensor:
    return operator(*inputs)


def error(found: Tensor, expected: Tensor) -> float:
    return (found.double() - expected).abs().max().item()


def test_erf_is_right_to_a_ten_millionth() -> None:
    assert error(erf(at_once, NUMBERS), torch.erf(NUMBERS.double())) < 1.1e-7


def test_tanh_is_right_to_two_ten_millionths() -> None:
    assert error(tanh(at_once, NUMBERS), torch.tanh(NUMBERS.double())) < 2e-7


def test_exp_is_right_to_five_digits_of_its_own() -> None:
    squares = DENSE[DENSE > 0].square()
    expected = torch.exp(squares.double() * -0.5)
    relative = (exp_of_product(at_once, squares, -0.5).double() - expected) / expected
    assert relative.abs().max().item() < 5e-6


@pytest.mark.parametrize("function", [erf, tanh])
def test_what_is_no_number_stays_so(function: Callable[..., Tensor]) -> None:
    assert function(at_once, torch.tensor(float("nan"))).isnan()


@pytest.mark.parametrize("approximate", EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_every_16_bit_number_is_within_one_step_of_rounding_or_less_than_a_millionth_off(
    dtype: torch.dtype, approximate: str
) -> None:
    """Where GELU is nearly 0, 1 + erf has few digits in fp32 as well, so that no step of rounding can be asked for."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    x = every[every.isfinite()].float()
    inner = x * math.sqrt(0.5) if approximate == "none" else math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    cheap = (0.5 * x * (1 + (erf if approximate == "none" else tanh)(at_once, inner))).to(dtype)
    exact = nn.functional.gelu(x.double(), approximate=approximate)
    step = torch.finfo(dtype).eps * exact.abs()
    assert ((cheap.double() - exact).abs() <= torch.maximum(step, torch.tensor(1e-6))).all()
    same = cheap == nn.functional.gelu(x, approximate=approximate).to(dtype)
    assert same.double().mean().item() > 0.99


def gelu_graph(dtype: torch.dtype, approximate: str, *, backward: bool) -> fx.Graph:
    """As the compiler sees it: of operators that it knows, with what each returns."""

    def run(x: Tensor, gradient: Tensor) -> Tensor:
        if backward:
            return aten.gelu_backward(gradient, x, approximate=approximate)
        return aten.gelu(x, approximate=approximate)

    example = torch.randn(3, 5, dtype=dtype)
    return make_fx(run, select_decomp_table(), tracing_mode="fake")(example, example).graph


def operators(graph: fx.Graph) -> set[Any]:
    return {node.target for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("approximate", EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_16_bit_numbers_has_no_costly_function_left(
    dtype: torch.dtype, approximate: str, backward: bool
) -> None:
    graph = gelu_graph(dtype, approximate, backward=backward)
    assert EXACT[approximate] in operators(graph)
    use_cheap_functions(graph)
    graph.lint()
    assert aten.exp2.default in operators(graph)
    assert not operators(graph) & {aten.erf.default, aten.tanh.default, aten.exp.default}
    assert all(node.users for node in graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("approximate", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gelu_of_wider_numbers_is_left_alone(dtype: torch.dtype, approximate: str, backward: bool) -> None:
    graph = gelu_graph(dtype, approximate, backward=backward)
    before = str(graph)
    use_cheap_functions(graph)
    assert str(graph) == before


def test_what_is_added_is_described_as_what_it_returns() -> None:
    graph = gelu_graph(torch.bfloat16, "none", backward=True)
    use_cheap_functions(graph)
    values = [node.meta["val"] for node in graph.nodes if node.op == "call_function"]
    assert {tuple(value.shape) for value in values} == {(3, 5)}
    storages = [value.untyped_storage()._cdata for value in values]
    assert len(set(storages)) == len(storages), "no two look as if they were one piece of memory"


def after_the_pass(run: Callable[..., Tensor], *inputs: Tensor) -> set[Any]:
    graph = make_fx(run, select_decomp_table(), tracing_mode="fake")(*inputs).graph
    use_cheap_functions(graph)
    return operators(graph)


HALF, FULL = torch.randn(4, dtype=torch.bfloat16), torch.randn(4)


def test_one_input_in_32_bits_keeps_the_exact_function() -> None:
    def beside(x: Tensor, y: Tensor) -> Tensor:
        return torch.erf(x.float() + y) + 1

    assert aten.erf.default in after_the_pass(beside, HALF, FULL)
    assert aten.erf.default not in after_the_pass(beside, HALF, HALF)
    assert aten.erf.default not in after_the_pass(beside, HALF, torch.tensor(2.0)), "a single number is no such input"


def test_a_sum_of_16_bit_numbers_keeps_the_exact_function() -> None:
    """It may have more digits than any of them."""
    assert aten.erf.default in after_the_pass(lambda x: torch.erf(x.float().sum(0, keepdim=True)) + 1, HALF)


@pytest.mark.parametrize("function", [torch.erf, torch.tanh])
@pytest.mark.parametrize(
    "use", [lambda y: y, lambda y: y * 3, lambda y: y + 1e-3, lambda y: y * y, lambda y: (y + 1) * y]
)
def test_where_small_results_count_the_exact_function_is_kept(
    function: Callable[[Tensor], Tensor], use: Callable[[Tensor], Tensor]
) -> None:
    exact = {torch.erf: aten.erf.default, torch.tanh: aten.tanh.default}[function]
    assert exact in after_the_pass(lambda x: use(function(x.float())), HALF)


def test_a_softmax_keeps_its_exp() -> None:
    assert aten.exp.default in after_the_pass(
        lambda x: ((x.float() - x.float().amax(-1, keepdim=True)) * 0.5).exp(), HALF[None]
    )


class TwoKinds(nn.Module):
    """A model with both GELUs: two blocks, each of which is compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.exact, self.by_tanh = GeluMLP(16, 32), GeluMLP(16, 32, approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.exact(x) + self.by_tanh(x)
        return y


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[set[Any]]]:
    """The operators of each graph that is compiled during a test, after this pass."""
    seen: list[set[Any]] = []
    original = GraphPasses.__call__

    def looking(self: GraphPasses, graph: fx.Graph) -> None:
        original(self, graph)
        seen.append(operators(graph))

    monkeypatch.setattr(GraphPasses, "__call__", looking)
    torch._dynamo.reset()
    with fresh_cache():
        yield seen
    torch._dynamo.reset()


def trained(model: nn.Module, x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def test_a_compiled_model_in_16_bits_computes_what_it_did(lowered: list[set[Any]]) -> None:
    torch.manual_seed(1)
    plain, x = TwoKinds(), 3 * torch.randn(64, 16)
    cheap, exact = copy.deepcopy(plain), copy.deepcopy(plain)
    compilation.compile_model(cheap)
    exact.compile()
    found = trained(cheap, x, torch.bfloat16)
    assert len(lowered) == 4, "forward and backward of each"
    for seen in lowered:
        assert aten.exp2.default in seen
        assert not seen & {*EXACT.values(), aten.exp.default}
    expected = trained(exact, x, torch.bfloat16)
    assert len(lowered) == 4, "what is compiled by others does not get the pass"
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= torch.finfo(torch.bfloat16).eps * other.abs().max()


def test_a_compiled_model_in_32_bits_is_exact(lowered: list[set[Any]]) -> None:
    torch.manual_seed(1)
    plain, x = TwoKinds(), 3 * torch.randn(64, 16)
    model = copy.deepcopy(plain)
    compilation.compile_model(model)
    trained(model, x, torch.float32)
    assert len(lowered) == 4
    for seen in lowered:
        assert seen & set(EXACT.values())
        assert aten.exp2.default not in seen
