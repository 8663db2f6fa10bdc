"""A model that its user compiled has its own names everywhere, and a run of it goes on with or without the compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
from own_loops import loss_of, own_recipe, started
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.weights import open_weights
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.training.compilation import compile_model
from gradus.training.compiled_in_place import compiled_in_place
from gradus.training.construction import constructed
from gradus.training.exporting import export, open_saved
from gradus.training.own_loop import Run
from gradus.training.trained_model import load_trained

CPU = torch.device("cpu")
SOME_STEPS, ALL_STEPS = 4, 9


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y: Tensor = self.layer(x).relu()
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.body: nn.Module = Body()
        self.last = nn.Sequential(nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.body(self.first(x).relu()))
        return y


NAMES = set(Net().state_dict())


@pytest.fixture(autouse=True)
def _compiler() -> None:
    torch._dynamo.reset()


class Counted:
    """A backend of torch.compile that computes what it is given, bit for bit as without, and counts that."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1

        def call(*arguments: Any) -> Any:
            self.calls += 1
            return graph.forward(*arguments)

        return call


def compiled(how: str, backend: Any = "eager") -> nn.Module:
    model = Net()
    if how in ("part", "both"):
        model.body = torch.compile(model.body, backend=backend)
    if how == "sequence":
        model.last = torch.compile(model.last, backend=backend)
    if how in ("whole", "both"):
        return torch.compile(model, backend=backend)
    if how == "in place":
        model.compile(backend=backend)
    return model


KINDS = ["whole", "part", "both", "sequence", "in place"]


@pytest.mark.parametrize("how", KINDS)
def test_names_are_the_models_own_and_what_was_compiled_is(how: str) -> None:
    counted = Counted()
    model = compiled_in_place(compiled(how, counted))
    assert type(model) is Net
    assert set(model.state_dict()) == NAMES
    model(torch.randn(2, 4)).sum().backward()
    model(torch.randn(2, 4)).sum().backward()
    assert counted.graphs >= 1
    assert counted.calls == 2 * counted.graphs
    assert model.first.weight.grad is not None


def test_the_wrapper_still_is_the_model_with_its_hooks() -> None:
    counted, seen = Counted(), []
    wrapper = torch.compile(Net(), backend=counted)
    wrapper.register_forward_hook(lambda *_: seen.append("wrapper"))
    wrapper._orig_mod.register_forward_hook(lambda *_: seen.append("model"))
    model = compiled_in_place(wrapper)
    assert model is wrapper._orig_mod
    for called in (wrapper, model):
        called.eval()(torch.zeros(1, 4))
        assert seen == ["model", "wrapper"]
        seen.clear()
    assert (counted.graphs, counted.calls) == (1, 2)
    assert type(compiled_in_place(wrapper)) is Net  # as a second run gets it


def test_a_part_in_two_places_is_one_part() -> None:
    model = Net()
    part = torch.compile(Body(), backend="eager")
    model.body = model.again = part
    model.inside = nn.ModuleList([part])
    model = compiled_in_place(model)
    assert model.body is model.again is model.inside[0] is part._orig_mod
    assert not [name for name in model.state_dict() if "_orig_mod" in name]


def test_a_copy_is_a_plain_model() -> None:
    model = compiled_in_place(compiled("both"))
    other = copy.deepcopy(model)
    assert {id(p) for p in other.parameters()}.isdisjoint({id(p) for p in model.parameters()})
    assert torch.equal(other.eval()(torch.ones(1, 4)), model.eval()(torch.ones(1, 4)))


@pytest.mark.parametrize("how", ["whole", "part", "in place"])
def test_the_plans_compiler_leaves_it_to_the_user(how: str) -> None:
    counted = Counted()
    model = compiled_in_place(compiled(how, counted))
    compile_model(model)
    model(torch.zeros(1, 4))
    assert (counted.graphs >= 1) == (how != "part")  # which is a part of what the plan compiles


def test_a_recipes_model_is_in_place_too() -> None:
    recipe = own_recipe(model={"use": f"{__file__}:compiled", "how": "both"}, data={"use": "own"})
    assert set(constructed(recipe, torch.float32).state_dict()) == NAMES


def trained(
    run: RunDirectory,
    how: str,
    *,
    attempt: int = 1,
    until: int = ALL_STEPS,
    momentum: float = 0.9,
    after: Callable[[nn.Module], None] = lambda model: None,
    **changes: Any,
) -> Run:
    own = started(alone(CPU), str(run.path), own_recipe(steps=ALL_STEPS, deterministic=True, **changes), attempt)
    model: nn.Module = compiled(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=momentum) if "optimizer" not in changes else None
    model, _ = own.prepare(model, optimizer)
    after(model)
    for batch in own.batches(user_code.Points()):
        own.step(loss_of(model, batch))
        if own.evaluation_due:
            own.evaluate(user_code.Points(), lambda batch: loss_of(model, batch))
        if own.steps_done == until:
            break
    own.finish()
    return own


def losses(run: RunDirectory) -> list[float]:
    return [row["loss"] for row in read_metrics(run)]


WITH = {
    "plain": {},
    "narrow": {"plan": {"precision": "bf16", "narrow_weights": True}},
    "ema": {"hooks": [{"use": "ema", "decay": 0.5}], "evaluate": {"every": 3}},
    "lora": {"lora": {"rank": 2, "targets": ["body.layer"]}, "optimizer": {"use": "adamw", "lr": 0.01}},
    "patterns": {
        "freeze": ["first.*"],
        "optimizer": {"use": "adamw", "lr": 0.01, "groups": [{"match": ["body.*"], "lr_factor": 0.1}]},
    },
}


@pytest.mark.parametrize("case", WITH)
@pytest.mark.parametrize("change", [("plain", "both"), ("both", "plain"), ("whole", "part")])
def test_a_run_goes_on_with_and_without_the_compiler(tmp_path: Path, case: str, change: tuple[str, str]) -> None:
    whole, cut = RunDirectory.create(tmp_path, "whole"), RunDirectory.create(tmp_path, "cut")
    trained(whole, "plain", **WITH[case])
    trained(cut, change[0], until=SOME_STEPS, **WITH[case])
    own = trained(cut, change[1], attempt=2, **WITH[case])
    assert own.steps_done == ALL_STEPS
    assert losses(cut) == losses(whole)
    first, second = (CheckpointStore(run.checkpoints).newest()[0] for run in (whole, cut))
    assert first is not None
    assert second is not None
    assert not [name for name in second.manifest["tensors"] if "_orig_mod" in name]
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name]), name
    if case == "ema":
        assert "hooks.ema.body.layer.weight" in second.manifest["tensors"]


def test_what_the_script_compiles_after_prepare_keeps_its_names(tmp_path: Path) -> None:
    run, plain = RunDirectory.create(tmp_path, "run"), RunDirectory.create(tmp_path, "plain")
    counted = Counted()

    def compile_body(model: nn.Module) -> None:
        model.body = torch.compile(model.body, backend=counted)

    trained(run, "plain", after=compile_body, **WITH["ema"])
    trained(plain, "plain", **WITH["ema"])
    assert counted.calls >= ALL_STEPS
    assert losses(run) == losses(plain)
    saved = CheckpointStore(run.checkpoints).newest()[0]
    assert saved is not None
    assert not [name for name in saved.manifest["tensors"] if "_orig_mod" in name]


def with_names_of_a_wrapper(run: RunDirectory, other: RunDirectory) -> None:
    """The newest checkpoint as it was written of such models before: with the compiler's mark in every name."""

    def marked(name: str) -> str:
        return "_orig_mod." + name.replace("body.", "body._orig_mod.")

    saved = CheckpointStore(run.checkpoints).newest()[0]
    assert saved is not None
    tensors = {}
    for name, tensor in saved.tensors().items():
        prefix = next(p for p in ("model.", "optimizer.", "hooks.ema.") if name.startswith(p))
        tensors[prefix + marked(name.removeprefix(prefix))] = tensor
    state = copy.deepcopy(saved.state)
    numbers = state["optimizer"]
    numbers["parameters"] = {marked(name): value for name, value in numbers["parameters"].items()}
    for group in numbers["groups"]:
        group["names"] = [marked(name) for name in group["names"]]
    other.checkpoints.mkdir(parents=True, exist_ok=True)
    CheckpointStore(other.checkpoints).save(saved.step, tensors, state)


@pytest.mark.parametrize("how", ["plain", "both"])
def test_checkpoints_with_the_compilers_names_are_read_as_well(tmp_path: Path, how: str) -> None:
    """Numbers of the optimizer's groups, too: the one that goes on is made with another momentum."""
    whole, cut, old = (RunDirectory.create(tmp_path, name) for name in ("whole", "cut", "old"))
    trained(whole, "plain", **WITH["ema"])
    trained(cut, "plain", until=SOME_STEPS, **WITH["ema"])
    with_names_of_a_wrapper(cut, old)
    trained(old, how, attempt=2, momentum=0.0, **WITH["ema"])
    assert losses(old) == losses(whole)[SOME_STEPS:]
    first, second = (CheckpointStore(run.checkpoints).newest()[0] for run in (whole, old))
    assert first is not None
    assert second is not None
    assert torch.equal(first.tensors()["hooks.ema.body.layer.weight"], second.tensors()["hooks.ema.body.layer.weight"])


def test_exports_and_loaded_models_have_the_models_own_names(tmp_path: Path) -> None:
    run, old = RunDirectory.create(tmp_path, "run"), RunDirectory.create(tmp_path, "old")
    own = trained(run, "both")
    with_names_of_a_wrapper(run, old)
    expected = own._live.model.state_dict()
    for number, saved in enumerate((run, old)):
        export(open_saved(saved.path), tmp_path / f"out-{number}")
        weights = load_file(tmp_path / f"out-{number}" / "model.safetensors")
        Net().load_state_dict(weights)
        for how in ("plain", "both"):
            loaded = load_trained(saved, None, CPU, "model", compiled(how))
            assert set(loaded.state_dict()) == NAMES
            for name, tensor in loaded.state_dict().items():
                assert torch.equal(tensor, expected[name]), (name, how)


def test_files_of_weights_are_read_by_own_names(tmp_path: Path) -> None:
    save_file(compiled("both").state_dict(), tmp_path / "model.safetensors")
    assert set(open_weights(tmp_path / "model.safetensors").tensors) == NAMES
    assert set(open_weights(tmp_path).tensors) == NAMES
