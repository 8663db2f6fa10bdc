"""Chunked loss: what it computes is what the whole computes, with less memory, for any model where it can be."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_cases import HERE, VOCABULARY, gpt2, llama
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Gemma2Config, Gemma2ForCausalLM

from gradus.models import catalogue
from gradus.models.output import IGNORED
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.chunked_loss import OutputLayer
from gradus.training.compilation import compile_model
from gradus.training.live_run import LiveRun
from gradus.training.loop import train
from gradus.training.loss_placement import chunk_loss
from gradus.training.objective import Objective

HERE_TOO = __file__
SMALL = {"layers": 2, "width": 16, "heads": 2, "context": 12, "vocabulary": 101}


class Classifier(nn.Module):
    """A user's model, whose logits may be changed after the last layer, or looked at, or made twice."""

    def __init__(self, scale: float | None = None, *, looks: bool = False, calls: int = 1) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.last = nn.Linear(16, 301)
        self.scale, self.looks, self.calls = scale, looks, calls

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body(x).relu()
        for _ in range(self.calls):
            logits: Tensor = self.last(inner)
        if self.looks:
            self.largest = logits.detach().abs().max()
        return logits if self.scale is None else logits * self.scale


class Kept(Classifier):
    """What its first forward makes is there for all others, as tables of positions and masks are."""

    table: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.calls_so_far: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.ones(8, device=x.device)
        self.calls_so_far.append(len(x))
        return super().forward(x * self.table)


class Strict(Classifier):
    """It knows how many classes there are."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        assert logits.shape[-1] == 301, f"bad shape {tuple(logits.shape)}"
        return logits


class WideHead(Classifier):
    """Logits in 32 bits, whatever the rest is computed in."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.body(x).relu()
        with torch.autocast("cpu", enabled=False):
            y: Tensor = self.last(inner.float())
        return y


class Widened(Classifier):
    """Asks its logits for nothing but their device and another format."""

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits.to(logits.device).to(torch.promote_types(logits.dtype, torch.float32))


class ClassesSecond(nn.Module):
    """As torch has it for sequences: (samples, classes, positions); a layer over the positions comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(x[:, None].expand(-1, 301, -1))
        return y


def capped() -> Classifier:
    model = Classifier()
    model.last.register_forward_hook(lambda _, __, logits: 5 * torch.tanh(logits / 5))
    return model


class Signals(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((8,), float(index)), index


def recipe(**changes: Any) -> Recipe:
    document = {"model": {"use": "gpt", **SMALL}, "data": {"use": "synthetic-tokens", "samples": 8, "context": 12}}
    rest = {"name": "small", "batch": 4, "steps": 1, "optimizer": {"lr": 0.1}}
    return resolved(Recipe.from_document({**rest, **document, **changes}))


def objective_of(model: nn.Module, loss: str | None = None) -> Objective:
    return Objective(recipe(**({"loss": loss} if loss else {})), model)


def text(vocabulary: int = 101) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (2, 13), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 3:5] = IGNORED
    return tokens[:, :-1], targets


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    assert gradients(found).keys() == gradients(expected).keys()
    for name, gradient in gradients(expected).items():
        difference = (gradients(found)[name] - gradient).abs().max()
        assert difference <= tolerance * gradient.abs().max(), name


@pytest.mark.parametrize("chunks", [2, 5, 24, 100])  # 24 tokens: in even parts or not, one by one, and fewer than parts
@pytest.mark.parametrize("use", ["gpt", "bert"])  # without and with a bias
def test_loss_and_gradients_are_those_of_the_whole(use: str, chunks: int) -> None:
    whole = catalogue.build(use, SMALL).double()
    chunked = copy.deepcopy(whole)
    chunk_loss(chunked, chunks, None, None)
    expected, found = whole(*text()), chunked(*text())
    assert found.loss_sum.item() == pytest.approx(expected.loss_sum.item(), rel=1e-13)
    assert found.count == expected.count == 22
    for output in (expected, found):
        (output.loss_sum * 3 / output.count).backward()
    assert_same_gradients(chunked, whole)


def test_without_targets_and_in_evaluation_there_are_all_logits() -> None:
    whole = catalogue.build("gpt", SMALL).double()
    chunked = copy.deepcopy(whole)
    chunk_loss(chunked, 3, None, None)
    tokens, targets = text()
    assert torch.equal(chunked(tokens), whole(tokens))
    expected, found = whole.eval()(tokens, targets), chunked.eval()(tokens, targets)
    assert (found.loss_sum, found.correct) == (expected.loss_sum, expected.correct)


def test_a_copy_of_the_model_has_a_loss_of_its_own() -> None:
    model = gpt2().double()
    chunk_loss(model, 3, objective_of(model), labelled())
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    assert loss_of_labels(other) != loss_of_labels(model)


def test_what_is_frozen_gets_no_gradient() -> None:
    whole = catalogue.build("gpt", {**SMALL, "tied": False}).double()
    whole.head.output.requires_grad_(False)
    chunked = copy.deepcopy(whole)
    chunk_loss(chunked, 3, None, None)
    for model in (whole, chunked):
        model(*text()).loss_sum.backward()
    assert "head.output.weight" not in gradients(chunked)
    assert_same_gradients(chunked, whole)


def test_without_gradients_there_is_only_a_loss() -> None:
    model = catalogue.build("gpt", SMALL).double()
    expected = model(*text()).loss_sum.item()
    chunk_loss(model, 3, None, None)
    with torch.no_grad():
        assert model(*text()).loss_sum.item() == pytest.approx(expected, rel=1e-13)


def test_in_bfloat16_it_is_as_near_to_the_truth_as_the_whole() -> None:
    """Errors of gradients against float64, both under autocast: in chunks sums are wider, products the same."""
    exact = catalogue.build("gpt", {**SMALL, "width": 64, "vocabulary": 509}).double()
    whole = copy.deepcopy(exact).float()
    chunked = copy.deepcopy(whole)
    chunk_loss(chunked, 3, None, None)
    tokens, targets = text(509)
    exact(tokens, targets).loss_sum.backward()
    for model in (whole, chunked):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(tokens, targets)
        assert output.loss_sum.dtype == torch.float32
        output.loss_sum.backward()

    def error(model: nn.Module) -> float:
        truth = gradients(exact)
        squares = [((g - truth[name]) ** 2).sum() / (truth[name] ** 2).sum() for name, g in gradients(model).items()]
        return float(torch.stack(squares).mean().sqrt())

    assert error(chunked) < 1.1 * error(whole)
    assert all(g.dtype == torch.float32 for g in gradients(chunked).values())


def labelled() -> dict[str, Tensor]:
    return dict(zip(("input_ids", "labels"), text(VOCABULARY), strict=True))


def loss_of_labels(model: nn.Module, **more: Any) -> Tensor:
    loss: Tensor = model(**labelled(), use_cache=False, **more).loss
    return loss


@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_causal_model_of_hugging_face_with_labels(build: Any) -> None:
    whole = build().double()
    chunked = copy.deepcopy(whole)
    chunk_loss(chunked, 3, objective_of(chunked), labelled())
    # transformers computes this loss in float32.
    assert loss_of_labels(chunked).item() == pytest.approx(loss_of_labels(whole).item(), rel=1e-6)
    few = {"num_items_in_batch": 7}
    assert loss_of_labels(chunked, **few).item() == pytest.approx(loss_of_labels(whole, **few).item(), rel=1e-6)
    for model in (whole, chunked):
        loss_of_labels(model).backward()
    assert_same_gradients(chunked, whole, 1e-5)
    assert torch.equal(loss_of_labels(chunked.eval()), loss_of_labels(whole.eval()))
    tokens = labelled()["input_ids"]
    assert torch.equal(chunked(input_ids=tokens).logits, whole(input_ids=tokens).logits)


def test_a_model_of_hugging_face_with_batches_of_our_own() -> None:
    settings = {"task": "causal-lm", "vocabulary": 101, "context": 12}
    config = {"model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole = catalogue.build("huggingface", {**settings, "config": {**config, "intermediate_size": 32}}).double()
    chunked = copy.deepcopy(whole)
    batch = dict(zip(("tokens", "targets"), text(), strict=True))
    chunk_loss(chunked, 3, objective_of(chunked), batch)
    for model in (whole, chunked):
        model(**batch).loss_sum.backward()
    assert_same_gradients(chunked, whole)
    assert chunked.eval()(**batch) == whole.eval()(**batch)


@pytest.mark.parametrize("model", ["huggingface", "own"])
def test_a_plan_for_it_is_made_without_weights(model: str) -> None:
    """Planned are models whose weights are not there, with data that is."""
    changes: dict[str, Any] = {"model": {"use": f"{HERE}:llama"}, "data": {"use": f"{HERE}:Sentences"}}
    if model == "own":
        changes = {"model": {"use": f"{__file__}:Classifier"}, "data": {"use": f"{__file__}:Signals"}}
        changes["loss"] = "cross-entropy"
    profile = profile_of(recipe(**changes), precision="bf16", loss_chunks=3)
    assert not profile.notes, "it was traced, and not estimated"
    assert any(operator.eager for part in profile.parts for operator in part.forward)


def test_logits_that_are_changed_on_the_way_to_the_loss_are_seen() -> None:
    config = Gemma2Config(
        vocab_size=101, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    with pytest.raises(InputError, match="is not what a Linear layer of it returned"):
        chunk_loss(model, 3, objective_of(model), labelled())
    assert type(model.lm_head) is nn.Linear
    assert model.loss_function.__name__ == "ForCausalLMLoss"


@pytest.mark.parametrize("kind", [Classifier, Kept, Widened])
def test_a_model_of_the_users_with_a_cross_entropy_of_the_recipe(kind: type[Classifier]) -> None:
    torch.manual_seed(0)
    whole = kind().double()
    chunked = copy.deepcopy(whole)
    x, y = torch.randn(10, 8, dtype=torch.float64), torch.arange(10) * 7
    expected, found = (objective_of(model, "cross-entropy") for model in (whole, chunked))
    chunk_loss(chunked, 3, found, (x, y))
    for model, objective in ((whole, expected), (chunked, found)):
        losses = objective(model, (x, y), 10)
        assert losses.count == 10
        losses.loss_sum.backward()
    assert_same_gradients(chunked, whole)
    assert found(chunked.eval(), (x, y), 10).loss_sum == expected(whole.eval(), (x, y), 10).loss_sum


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (Classifier(2.0), "cross-entropy", "Classifier computes its loss of is not what a Linear layer of it returned"),
        (Classifier(looks=True), "cross-entropy", "Classifier uses its logits for something else than the loss"),
        (Classifier(calls=2), "cross-entropy", "Classifier calls its output layer more than once"),
        (capped(), "cross-entropy", "Classifier computes its loss of is not what a Linear layer of it returned"),
        (Strict(), "cross-entropy", r"cannot be seen without data: AssertionError: bad shape \(4, 16\)"),
        (WideHead(), "cross-entropy", "WideHead computes its logits in a precision of its own"),
        (Classifier(), "mse", "the recipe's loss is mse, and only cross-entropy"),
        (Classifier(), None, "Classifier computes its loss itself"),
    ],
)
def test_where_it_cannot_be_it_is_refused(model: nn.Module, loss: str | None, message: str) -> None:
    objective, batch = objective_of(model, loss), (torch.randn(4, 8), torch.arange(4))
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(InputError, match=message):
        chunk_loss(model, 3, objective, batch)
    assert all(type(module) is not OutputLayer for module in model.modules())
    assert [vars(module) for module in model.modules()] == before
    if loss == "cross-entropy":  # goes on as if nothing had been tried
        found = objective(model, batch, 4).loss_sum
        assert found.item() == pytest.approx(objective_of(model, loss)(model, batch, 4).loss_sum.item())


@pytest.mark.parametrize("said", [True, False])
def test_a_run_goes_on_without_parts_that_only_its_planner_wanted(tmp_path: Path, said: bool) -> None:
    """The planner looks at a model on another machine, where it may take another way."""
    changes: dict[str, Any] = {"model": {"use": f"{HERE_TOO}:Strict"}, "data": {"use": f"{HERE_TOO}:Signals"}}
    of_run = recipe(**changes, loss="cross-entropy", plan={"precision": "fp32", **({"loss_chunks": 2} if said else {})})
    plan = default_plan(of_run, Cluster(name="here", cpu_cores=1, memory_gib=4), 1).plan
    plan, run = plan.model_copy(update={"loss_chunks": 2}), RunDirectory.create(tmp_path, "small")
    with pytest.raises(InputError, match="bad shape") if said else nullcontext():
        live = LiveRun.from_recipe(of_run, plan, run, 1, alone(torch.device("cpu")))
        assert live.plan.loss_chunks == 1
        assert train(live).state == "finished"
    warned = [event["message"] for event in read_events(run) if event["event"] == "warning"]
    assert ["all logits are computed at once" in message for message in warned] == ([] if said else [True])


def test_classes_in_the_second_place_are_refused() -> None:
    model = ClassesSecond()
    with pytest.raises(InputError, match="with the classes last"):
        chunk_loss(
            model, 3, objective_of(model, "cross-entropy"), (torch.randn(4, 8), torch.zeros(4, 5, dtype=torch.long))
        )


def test_a_look_at_a_model_leaves_nothing_on_it() -> None:
    """What a forward keeps would have no values."""
    model = Kept().eval()
    model.body.train()
    chunk_loss(model, 3, objective_of(model, "cross-entropy"), (torch.randn(4, 8), torch.arange(4)))
    assert model.table is None
    assert model.calls_so_far == []
    assert (model.training, model.body.training, model.last.training) == (False, True, False)
    assert not model.last._forward_hooks


def test_an_own_loop_with_a_model_of_the_users_is_refused() -> None:
    with pytest.raises(InputError, match="in an own loop, the loss of Classifier is computed where"):
        chunk_loss(Classifier(), 3, None, None)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """The graphs that are compiled during a test, by a backend that runs them as they are."""
    compiled: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(graph)
        return graph.forward

    original = nn.Module.compile

    def without_options(module: nn.Module, options: dict[str, Any], **how: Any) -> None:
        original(module, backend=counting, **how)  # which has no options

    monkeypatch.setattr(nn.Module, "compile", without_options)
    torch._dynamo.reset()
    yield compiled
    torch._dynamo.reset()


def test_compiled_no_graph_has_all_logits(graphs: list[torch.fx.GraphModule]) -> None:
    whole = catalogue.build("gpt", SMALL).double()
    chunked = copy.deepcopy(whole)
    chunk_loss(chunked, 3, None, None)
    compile_model(chunked)
    for model in (whole, chunked):
        model(*text()).loss_sum.backward()
    assert_same_gradients(chunked, whole)
    shapes = [tuple(node.meta["example_value"].shape) for graph in graphs for node in graph.graph.nodes
              if isinstance(node.meta.get("example_value"), Tensor)]  # fmt: skip
    logits = {shape for shape in shapes if shape[-1:] == (101,)}
    assert (8, 101) in logits  # of a third of the tokens
    assert not logits & {(24, 101), (2, 12, 101)}
