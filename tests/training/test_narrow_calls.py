"""An own loop's model computes with narrow weights inside its calls; the loop itself knows only the parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import user_code
from own_loops import own_recipe, started
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.training.narrow_calls import HINT, hint_at_narrow_weights
from gradus.training.own_loop import Run
from gradus.training.own_optimizer import let_update_in_one_pass

CPU = torch.device("cpu")


class Net(nn.Module):
    """Notes in which format it is called, draws random numbers, and has statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(8, 1)
        self.formats: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.formats.append(self.first.weight.dtype)
        return self.last(self.after(self.dropout(self.norm(self.first(x)).relu())))

    def after(self, x: Tensor) -> Tensor:
        return x


class Refusing(Net):
    """As a kernel does that is made for fp32, in the middle of a forward pass."""

    def after(self, x: Tensor) -> Tensor:
        if self.last.weight.dtype != torch.float32:
            raise RuntimeError("expected scalar type Float but found BFloat16\nat a line of C++")
        return x


class Wrong(Net):
    def after(self, x: Tensor) -> Tensor:
        raise TypeError(f"with {self.last.weight.dtype}")


class Small(nn.Module):
    """Without anything that is another in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).relu())
        return y


Body = Callable[[nn.Module, Any], Any]


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return ((model(x).float() - y.reshape(-1, 1)) ** 2).mean()


def looped(
    folder: Path,
    model: nn.Module,
    body: Body = loss_of,
    *,
    plan: dict[str, Any] | None = None,
    trained: nn.Module | None = None,
    adjust: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None,
    after: Callable[[nn.Module], nn.Module] = lambda model: model,
    **changes: Any,
) -> tuple[Run, list[float]]:
    """A loop with narrow weights, and its losses."""
    directory = RunDirectory.create(folder, "narrow")
    plan = {"precision": "bf16", "narrow_weights": True, **(plan or {})}
    run = started(alone(CPU), str(directory.path), own_recipe(**{"steps": 4, "plan": plan, **changes}))
    torch.manual_seed(1)
    for layer in model.modules():
        if hasattr(layer, "reset_parameters"):
            layer.reset_parameters()
    optimizer = torch.optim.AdamW((trained or model).parameters(), lr=0.01)
    adjust(optimizer)
    model, _ = run.prepare(model, optimizer)
    model = after(model)
    for batch in run.batches(user_code.Points()):
        run.step(body(model, batch))
    run.finish()
    return run, [row["loss"] for row in read_metrics(directory)]


def warnings_of(run: Run) -> list[str]:
    return [event["message"] for event in read_events(run._place.run) if event["event"] == "warning"]


def test_the_model_computes_with_narrow_weights_and_the_loop_sees_the_parameters(tmp_path):
    model = Net()
    parameters, seen = list(model.parameters()), []

    def body(prepared: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(prepared, batch)
        seen.append([a is b for a, b in zip(prepared.parameters(), parameters, strict=True)])
        return loss

    run, _ = looped(tmp_path, model, body)
    assert model.formats == [torch.bfloat16] * 4
    assert all(all(same) for same in seen)
    assert run._live.step.has_narrow_weights
    assert warnings_of(run) == []


def test_what_the_loop_writes_into_a_weight_before_a_call_counts(tmp_path):
    """Also where torch does not count it as a change."""
    found = []

    def body(model: nn.Module, batch: Any) -> Tensor:
        model.last.weight.data.zero_()
        model.last.bias.data.fill_(3.0 + len(found))
        found.append(model(batch[0]).unique().tolist())
        return loss_of(model, batch)

    model = Net()
    looped(tmp_path, model, body, steps=2, trained=model.first)
    assert found == [[3.0], [4.0]]


def test_a_penalty_on_the_parameters_adds_to_the_gradients_of_the_copies(tmp_path):
    def penalised(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch) + 1e3 * sum(p.pow(2).sum() for p in model.parameters())

    plain, heavy = Net(), Net()
    looped(tmp_path / "plain", plain, steps=40)
    looped(tmp_path / "heavy", heavy, penalised, steps=40)
    assert heavy.first.weight.norm() < 0.8 * plain.first.weight.norm()


def test_a_parameter_with_a_hook_upon_its_gradient_keeps_it(tmp_path):
    model = Net()
    model.first.weight.register_hook(torch.zeros_like)
    run, _ = looped(tmp_path, model)
    assert model.formats == [torch.float32] * 4
    moments = {
        name: run._live.optimizer.state[layer.weight]["exp_avg"]
        for name, layer in model.named_children()
        if name in ("first", "last")
    }
    assert not moments["first"].any()
    assert moments["last"].any()


def test_parameters_that_are_given_for_a_call_are_those_that_it_computes_with(tmp_path):
    """As `functional_call` gives them, for one call, and a script that replaces one, for all that come."""
    found = []

    def body(model: nn.Module, batch: Any) -> Tensor:
        zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        found.append(float(functional_call(model, zeros, (batch[0],)).abs().max()))
        found.append(float(model(batch[0]).abs().max()))
        model.last.bias = nn.Parameter(torch.full((1,), 50.0))
        found.append(float(model(batch[0]).min()))
        return loss_of(model, batch)

    looped(tmp_path, Net(), body, steps=1)
    assert found[0] == 0.0
    assert found[1] > 0.0
    assert found[2] > 40.0


def test_a_parameter_that_is_frozen_or_set_free_on_the_way_is(tmp_path):
    model = Net()
    model.last.requires_grad_(False)
    weights: list[tuple[Tensor, Tensor]] = []

    def body(prepared: nn.Module, batch: Any) -> Tensor:
        if len(weights) == 2:
            prepared.first.weight.requires_grad_(False)
            prepared.last.weight.requires_grad_(True)
        weights.append((prepared.first.weight.detach().clone(), prepared.last.weight.detach().clone()))
        return loss_of(prepared, batch)

    # Without weight decay, which moves what was moved before: torch's optimizer looks for a gradient alone.
    looped(tmp_path, model, body, adjust=lambda optimizer: optimizer.param_groups[0].update(weight_decay=0.0))
    weights.append((model.first.weight.detach(), model.last.weight.detach()))
    moved = [[not torch.equal(a, b) for a, b in zip(*pair, strict=True)] for pair in pairwise(weights)]
    assert moved == [[True, False], [True, False], [False, True], [False, True]]


def test_after_a_backward_that_failed_the_model_has_its_own_parameters(tmp_path):
    model = Net()

    def body(prepared: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(prepared, batch)
        loss.register_hook(fails)
        return loss

    with pytest.raises(RuntimeError, match="in backward"):
        looped(tmp_path, model, body)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def fails(_: Tensor) -> None:
    raise RuntimeError("in backward")


def test_what_backward_computes_again_has_narrow_weights_too(tmp_path):
    class Again(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    model = Again()
    model.norm = nn.Identity()
    looped(tmp_path, model, steps=2)
    assert model.formats == [torch.bfloat16] * 4


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_refuses_them_goes_on_without_and_the_run_says_why(tmp_path, accumulate):
    """Just as it would have without trying: what the failed call drew and counted is put back."""
    plan = {"accumulate": accumulate}
    kinds = (Refusing, Net) if accumulate == 1 else (without_statistics(Refusing), without_statistics(Net))
    model, same = kinds[0](), kinds[1]()
    run, losses = looped(tmp_path / "refusing", model, plan=plan)
    _, wide = looped(tmp_path / "wide", same, plan={**plan, "narrow_weights": False})
    assert model.formats == [torch.bfloat16] + [torch.float32] * 4 * accumulate
    assert losses == wide
    for (name, found), expected in zip(model.state_dict().items(), same.state_dict().values(), strict=True):
        assert torch.equal(found, expected), name
    assert run._live.step._narrow is None
    assert run._live.step._one_pass is None
    [told] = warnings_of(run)
    assert "does not take weights in 16 bits" in told
    assert "plan.narrow_weights" in told
    assert told.endswith("RuntimeError: expected scalar type Float but found BFloat16")


def without_statistics(of: type[Net]) -> Callable[[], Net]:
    """Which cannot be accumulated."""

    def made() -> Net:
        model = of()
        model.norm = nn.Identity()
        return model

    return made


def test_gradients_that_copies_have_from_an_earlier_call_of_the_same_step_are_not_lost(tmp_path):
    class Sometimes(Net):
        def after(self, x: Tensor) -> Tensor:
            if len(self.formats) == 2 and self.last.weight.dtype == torch.bfloat16:
                raise RuntimeError("not this time")
            return x

    def several(model: nn.Module, batch: Any) -> Tensor:
        return loss_of(model, batch) + 0.0 * loss_of(model, batch) + 0.0 * loss_of(model, batch)

    model = without_statistics(Sometimes)()
    run, _ = looped(tmp_path, model, several, steps=1)
    assert model.formats == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    assert run._live.optimizer.state[model.first.weight]["exp_avg"].norm() > 1e-3
    assert run._live.step._narrow is None


@pytest.mark.parametrize("kind", [Net, Refusing])
def test_an_adamw_that_updates_in_one_pass_trains_what_torchs_does(tmp_path, kind):
    """Also where the model refuses narrow weights, and it has to step as torch's does. Interpreted, on a CPU."""
    pytest.importorskip("triton")
    plain, model = kind(), kind()
    _, expected = looped(tmp_path / "plain", plain, steps=6)
    run, losses = looped(tmp_path / "one", model, steps=6, adjust=let_update_in_one_pass)
    assert (run._live.step._one_pass is None) == (kind is Refusing)
    assert losses == pytest.approx(expected, rel=1e-2)
    assert model.formats == plain.formats
    state = run._live.optimizer.state[model.last.weight]
    assert int(state["step"]) == 6


def test_an_error_that_wide_weights_raise_too_is_raised_as_it_is(tmp_path):
    with pytest.raises(TypeError, match=r"with torch\.float32") as raised:
        looped(tmp_path, Wrong())
    assert raised.value.__context__ is None


def test_running_out_of_memory_is_no_refusal(tmp_path):
    class Large(Net):
        def after(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = Large()
    with pytest.raises(torch.OutOfMemoryError):
        looped(tmp_path, model)
    assert len(model.formats) == 1


@pytest.mark.parametrize("compiled_by", ["plan", "script"])
def test_a_compiled_model_is_refused_and_taken_alike(tmp_path, compiled_by):
    plan = {"compile": compiled_by == "plan"}
    for kind, narrow in ((Mixing, False), (nn.Linear, True)):
        model: nn.Module = kind(4, 1)
        model = torch.compile(model) if compiled_by == "script" else model
        run, _ = looped(tmp_path / kind.__name__, model, plan=plan, steps=2)
        assert run._live.step.has_narrow_weights == narrow
        assert len(warnings_of(run)) == (not narrow)


AS_IT_IS = {"backend": "eager"}  # traced, and computed bit for bit as without a compiler


class Graphs(list[torch.fx.GraphModule]):
    """A backend of torch.compile that computes bit for bit as without a compiler."""

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.append(graph)
        return graph.forward


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_that_its_script_compiles_after_prepare_is_one_graph_with_narrow_weights(tmp_path, fullgraph):
    """The compiler meets nothing of ours that it would have to trace."""
    torch._dynamo.reset()
    graphs = Graphs()
    run, losses = looped(
        tmp_path / "compiled", Small(), after=lambda model: torch.compile(model, fullgraph=fullgraph, backend=graphs)
    )
    _, plain = looped(tmp_path / "plain", Small())
    assert losses == plain
    assert warnings_of(run) == []
    assert run._live.step.has_narrow_weights
    [graph] = graphs
    weights = [node.meta["example_value"] for node in graph.graph.nodes if "parameters" in node.name]
    assert {weight.dtype for weight in weights} == {torch.bfloat16}


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_sequence_that_its_script_compiles_after_prepare_does_without_and_the_run_says_why(tmp_path, fullgraph):
    """The compiler begins outside of it, and looks past what is around a call."""
    torch._dynamo.reset()
    layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)
    graphs = Graphs()
    run, losses = looped(
        tmp_path / "narrow",
        nn.Sequential(*layers),
        after=lambda model: torch.compile(model, fullgraph=fullgraph, backend=graphs),
    )
    _, wide = looped(tmp_path / "wide", nn.Sequential(*layers), plan={"narrow_weights": False})
    assert len(graphs) == 1
    assert losses == wide
    [told] = warnings_of(run)
    assert "without weights in 16 bits (plan.narrow_weights)" in told
    assert "torch.compile(model) before run.prepare" in told
    assert run._live.step._narrow is None
    assert run._live.step._one_pass is None


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_model_that_its_script_compiles_after_prepare_may_refuse_them(tmp_path, fullgraph):
    torch._dynamo.reset()
    run, losses = looped(
        tmp_path / "refusing", Mixing(4, 1), after=lambda model: torch.compile(model, fullgraph=fullgraph, **AS_IT_IS)
    )
    _, wide = looped(tmp_path / "wide", Mixing(4, 1), plan={"narrow_weights": False})
    assert losses == wide
    [told] = warnings_of(run)
    assert "does not take weights in 16 bits" in told
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0, "or casts of one step would be kept for the next"


def test_a_function_that_its_script_compiles_around_the_model_is_one_graph(tmp_path):
    torch._dynamo.reset()
    model = Net()
    run, _ = looped(tmp_path, model, torch.compile(loss_of, fullgraph=True, **AS_IT_IS))
    assert set(model.formats) == {torch.float32}
    assert len(warnings_of(run)) == 1


@pytest.mark.parametrize("when", ["after prepare", "before prepare"])
def test_a_model_that_is_compiled_in_place_has_narrow_weights(tmp_path, when):
    torch._dynamo.reset()
    model = Net()

    def compile_it(model: nn.Module) -> nn.Module:
        model.compile(fullgraph=True, **AS_IT_IS)
        return model

    if when == "before prepare":
        run, _ = looped(tmp_path, compile_it(model))
    else:
        run, _ = looped(tmp_path, model, after=compile_it)
    assert model.formats == [torch.bfloat16] * 4
    assert run._live.step.has_narrow_weights
    assert warnings_of(run) == []


def test_a_script_that_goes_on_with_what_it_compiled_before_prepare_has_narrow_weights(tmp_path):
    torch._dynamo.reset()
    model = Net()
    wrapper = torch.compile(model, fullgraph=True, **AS_IT_IS)
    run, _ = looped(tmp_path, wrapper, after=lambda prepared: wrapper)
    assert model.formats == [torch.bfloat16] * 4
    assert warnings_of(run) == []


@pytest.mark.parametrize("how", ["compiles in place", "calls its parts"])
def test_a_loop_that_no_longer_calls_the_prepared_model_is_told(tmp_path, how):
    """Its gradients are not rounded for an optimizer that takes those of copies."""
    torch._dynamo.reset()
    model = Net()
    calls = []

    def body(prepared: nn.Module, batch: Any) -> Tensor:
        calls.append(how)
        if len(calls) == 3 and how == "compiles in place":
            prepared.compile(**AS_IT_IS)
        if len(calls) >= 3 and how == "calls its parts":
            return loss_of(prepared.forward, batch)
        return loss_of(prepared, batch)

    run, _ = looped(tmp_path, model, body)
    assert model.formats == [torch.bfloat16] * 2 + [torch.float32] * 2
    assert len(warnings_of(run)) == 1
    assert not run._live.step.has_narrow_weights


def test_after_the_loop_the_model_is_called_as_before_it(tmp_path):
    model = Net()
    looped(tmp_path, model)
    assert model._compiled_call_impl is None


class Mixing(nn.Linear):
    """With a product that wants both sides in one format, whatever autocast does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x @ self.weight.t() + self.bias


def test_after_a_loop_that_is_left_nothing_is_computed_as_if_inside(tmp_path):
    folder, model = str(RunDirectory.create(tmp_path, "left").path), nn.Linear(4, 1)
    run = started(alone(torch.device("cpu")), folder, own_recipe(plan={"precision": "bf16"}))
    model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs, _ in run.batches(user_code.Points()):
        assert torch.is_autocast_enabled("cpu")
        assert model(inputs).dtype == torch.bfloat16
        break
    assert not torch.is_autocast_enabled("cpu")
    run.finish()


def test_a_copy_of_the_model_is_a_plain_model(tmp_path):
    model = Net()
    looped(tmp_path, model)
    other = copy.deepcopy(model)
    assert other._compiled_call_impl is None
    assert other.eval()(torch.zeros(1, 4)).dtype == torch.float32


def test_who_differentiates_by_the_parameters_is_told_of_the_copies(tmp_path):
    model = Net()
    params = list(model.parameters())

    def body(prepared: nn.Module, batch: Any) -> Tensor:
        loss = loss_of(prepared, batch)
        return loss + sum(g.pow(2).sum() for g in torch.autograd.grad(loss, params, create_graph=True))

    with pytest.raises(RuntimeError, match="appears to not have been used in the graph") as raised:
        looped(tmp_path, model, body)
    hint_at_narrow_weights(raised.value)
    assert raised.value.__notes__ == [f"hint: {HINT}"]
    assert "plan.narrow_weights=false" in HINT
    other = RuntimeError("shapes cannot be multiplied")
    hint_at_narrow_weights(other)
    assert not hasattr(other, "__notes__")
