"""Compilation: a repeated block is compiled once for all layers, and computes what it computed before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.training.compilation import compile_model, parts_to_compile

SMALL: dict[str, dict[str, Any]] = {
    "gpt": {"layers": 5, "width": 16, "heads": 2, "context": 12},
    "bert": {"layers": 3, "width": 16, "heads": 2, "context": 12},
    "vit": {"layers": 3, "width": 12, "heads": 2, "image": 8},
}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled during a test, by a backend that runs them as they are."""
    compiled: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    original = torch.compile  # which modules call as well
    monkeypatch.setattr(torch, "compile", lambda function, options: original(function, backend=counting))
    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()


def batch(samples: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 256, (samples, 13), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    output = model(tokens, targets)
    output.loss_sum.backward()
    return output.loss_sum.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("name", SMALL)
def test_the_blocks_of_a_transformer_and_what_is_around_them_are_parts(name: str) -> None:
    model = catalogue.build(name, SMALL[name])
    assert parts_to_compile(model) == [*model.blocks, model.embedding, model.head]  # type: ignore[misc]


@pytest.mark.parametrize("name", ["simple-cnn", "mnist-cnn", "resnet18", "resnet50", "resnet101"])
def test_a_model_whose_blocks_share_no_code_is_compiled_whole(name: str) -> None:
    """A ResNet has blocks of eight shapes."""
    with torch.device("meta"):
        model = catalogue.build(name, {})
    assert parts_to_compile(model) == [model]


def test_encoder_and_decoder_are_compiled_by_blocks() -> None:
    with torch.device("meta"):
        model = nn.Transformer(16, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=32)
    blocks = [*model.encoder.layers, *model.decoder.layers]
    assert parts_to_compile(model)[:4] == blocks


def test_blocks_that_hold_little_of_the_model_are_not_worth_it() -> None:
    small = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    model = nn.Sequential(*small, nn.Linear(2, 100))
    assert parts_to_compile(model) == [model]


@pytest.mark.parametrize("name", [*SMALL, "resnet18", "resnet50", "simple-cnn", "mnist-cnn"])
def test_every_layer_with_parameters_is_in_exactly_one_part(name: str) -> None:
    with torch.device("meta"):
        model = catalogue.build(name, SMALL.get(name, {}))
    inside = [id(module) for part in parts_to_compile(model) for module in part.modules()]
    for layer_name, layer in model.named_modules():
        if any(True for _ in layer.parameters(recurse=False)):
            assert inside.count(id(layer)) == 1, layer_name


@pytest.mark.parametrize("options", [{}, {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu"}])
def test_one_graph_serves_all_layers(graphs: list[torch.fx.GraphModule], options: dict[str, Any]) -> None:
    plain = catalogue.build("gpt", {**SMALL["gpt"], **options}).double()
    model = copy.deepcopy(plain)
    compile_model(model)
    loss, gradients = loss_and_gradients(model, *batch())
    assert len(graphs) == 3, "embedding, block, head: five layers share one graph"
    expected_loss, expected = loss_and_gradients(plain, *batch())
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-12)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max().item() < 1e-12, name


class Encoder(nn.Module):
    """Of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.layers(x))
        return y


def of_sequences() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))


@pytest.mark.parametrize("make", [Encoder, of_sequences, lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU())])
def test_modules_of_torchs_own_are_compiled_too_and_share_graphs(
    graphs: list[torch.fx.GraphModule], make: Callable[[], nn.Module]
) -> None:
    torch.manual_seed(0)
    model = make()
    plain, x = copy.deepcopy(model), torch.randn(2, 8, 16)
    compile_model(model)
    torch.testing.assert_close(model(x), plain(x))
    assert len(graphs) in (1, 2), "what the first of them is given wants no gradient, what others are given does"
    assert list(model.state_dict()) == list(plain.state_dict())
    model(x)
    assert len(graphs) in (1, 2)


class Subclass(nn.Sequential):
    """With torch's own forward."""


def test_whose_code_a_part_runs_decides_how_it_is_compiled(graphs: list[torch.fx.GraphModule]) -> None:
    x = torch.randn(2, 16)
    layers = nn.Linear(16, 16), nn.GELU()
    ours = Subclass(*layers)
    compile_model(ours)
    ours(x)
    assert len(graphs) == 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layers(x)
            return y

    traced = torch.fx.symbolic_trace(Model())
    compile_model(traced)
    torch.testing.assert_close(traced(x), ours(x))


def test_a_model_that_its_user_compiled_keeps_that() -> None:
    theirs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        theirs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(16, 16), nn.GELU()), backend=backend)
    compile_model(model)
    model(torch.randn(2, 16))
    assert len(theirs) == 1
    torch._dynamo.reset()


def test_further_steps_compile_nothing(graphs: list[torch.fx.GraphModule]) -> None:
    model = catalogue.build("gpt", SMALL["gpt"])
    compile_model(model)
    for seed in range(3):
        loss_and_gradients(model, *batch(seed=seed))
    assert len(graphs) == 3


def test_evaluation_and_a_short_last_batch_stay_within_the_limit_of_recompilations(
    graphs: list[torch.fx.GraphModule],
) -> None:
    """Beyond its limit the compiler would give up without an error and run the code as it is."""
    model = catalogue.build("gpt", SMALL["gpt"])
    compile_model(model)

    def visit_all() -> None:
        for training in (True, False):
            model.train(training)
            for samples in (4, 3, 2):
                with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
                    model(*batch(samples))

    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        visit_all()
        before = len(graphs)
        visit_all()
    assert len(graphs) == before, "all shapes are known by now"


def test_names_of_parameters_do_not_change(graphs: list[torch.fx.GraphModule]) -> None:
    """Checkpoints are the same with and without compilation."""
    model = catalogue.build("gpt", SMALL["gpt"])
    names = list(model.state_dict())
    compile_model(model)
    assert list(model.state_dict()) == names
