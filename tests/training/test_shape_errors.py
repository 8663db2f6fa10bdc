"""Errors of shapes, types, indices and memory say which module, which tensors, which line, and what to change."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradus.schema.callables import import_callable
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe
from gradus.training.objective import Objective
from gradus.training.shape_errors import explain_forward_error, note_tensors

LABELS = torch.tensor([0, 1, 2, 0])


def recipe(**changes: Any) -> Recipe:
    document = {"name": "t", "model": {"use": "gpt"}, "data": {"use": "stdlib-text"}, "batch": 1, "steps": 1}
    return Recipe.from_document({**document, "optimizer": {"lr": 0.1}, **changes})


class Net(nn.Module):
    """A body of two layers; `between` is what happens between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x, inner: int = 8) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.head = nn.Linear(inner, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.between(self.body(x))
        y: Tensor = self.head(hidden)
        return y


def failure(model: nn.Module, batch: Any, loss: Any = "cross-entropy", **changes: Any) -> GradusError:
    with pytest.raises(GradusError) as caught:
        Objective(recipe(loss=loss, **changes), model)(model, batch, 4)
    return caught.value


def test_a_shape_error_names_the_module_its_parameters_its_inputs_the_batch_and_the_line() -> None:
    error = failure(Net(inner=7), (torch.ones(4, 5), LABELS))
    assert isinstance(error, InputError)
    first, *rest = error.message.splitlines()
    assert first == (
        "model: the model failed in head (Linear): RuntimeError: mat1 and mat2 shapes cannot be multiplied "
        "(4x8 and 7x3)"
    )
    assert rest[0].strip() == (
        "Linear(in_features=7, out_features=3, bias=True) with weight: float32 [3, 7], bias: float32 [3]"
    )
    assert rest[1].strip() == "was given 0: float32 [4, 8]"
    assert rest[2].strip() == "the batch: 0: float32 [4, 5], 1: int64 [4]"
    assert f"{__file__}, line" in rest[3]
    assert "self.head(hidden)" in rest[3]
    assert "mat1 and mat2" in error.details["traceback"]
    assert isinstance(error.__cause__, RuntimeError)
    assert error.__cause__.__traceback__ is not None


def test_the_innermost_module_is_named_by_its_path() -> None:
    error = failure(Net(), {"x": torch.ones(4, 6), "labels": LABELS})
    assert "failed in body.0 (Linear)" in error.message
    assert "the batch: x: float32 [4, 6], labels: int64 [4]" in error.message


@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_fp16_supported(), reason="this CPU has LSTMs in fp16")
def test_a_format_that_the_cpu_has_no_kernel_for_is_told_with_those_that_it_has() -> None:
    with torch.autocast("cpu", torch.float16):
        error = failure(nn.Sequential(nn.LSTM(5, 3)), (torch.ones(2, 4, 5), LABELS))
    assert isinstance(error, InputError)
    assert error.message.startswith("model: the model failed in 0 (LSTM): RuntimeError: could not create a primitive")
    assert "use plan.precision=bf16 or plan.precision=fp32" in str(error.hint)


def test_a_type_that_does_not_fit_is_shown_with_what_to_do() -> None:
    error = failure(Net(lambda x: x.bfloat16()), (torch.ones(4, 5), LABELS))
    assert "was given 0: bfloat16 [4, 8]" in error.message
    assert "weight: float32 [3, 8]" in error.message
    assert "torch.long" in str(error.hint)


def test_a_target_of_the_wrong_type_blames_the_loss(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\ndef own(output, batch):\n    return torch.nn.functional.nll_loss(output, batch[-1])\n"
    )
    error = failure(Net(), (torch.ones(4, 5), LABELS.float()), loss=f"{file}:own")
    assert error.message.startswith("loss: the loss failed")
    assert "the model's output: tensor: float32 [4, 3]" in error.message
    assert "1: float32 [4]" in error.message
    assert f"{file}, line 3" in error.message
    assert "class targets are torch.long" in str(error.hint)


def test_a_target_that_is_no_class_is_explained() -> None:
    error = failure(Net(), (torch.ones(4, 5), LABELS + 5))
    assert error.message.startswith("loss: the loss failed: IndexError: Target 5 is out of bounds")
    assert "-100" in str(error.hint)


def test_an_index_outside_a_table_is_named_with_the_size_of_the_table() -> None:
    table = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 3))
    error = failure(table, (torch.tensor([[1, 2], [3, 17]]), LABELS[:2]))
    assert "failed in 0 (Embedding)" in error.message
    assert "the largest index is 17, but the table has 10 rows, for indices 0 to 9" in str(error.hint)
    error = failure(table, (torch.tensor([[1, 2], [3, -1]]), LABELS[:2]))
    assert "the smallest index is -1" in str(error.hint)


def test_a_tensor_on_another_device_is_explained() -> None:
    error = failure(Net(lambda x: x + torch.ones(4, 8, device="meta")), (torch.ones(4, 5), LABELS))
    assert "on meta" in error.message or "meta" in error.message
    assert "register_buffer" in str(error.hint)


class Hungry(Net):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
def test_out_of_memory_stays_as_it_is(error: Exception) -> None:
    """Its explanation needs the run: see out_of_memory.py."""
    with pytest.raises(RuntimeError) as caught:
        Objective(recipe(loss="cross-entropy"), Hungry(error))(Hungry(error), (torch.ones(4, 5), LABELS), 4)
    assert caught.value is error


@pytest.mark.parametrize(
    "error",
    [
        ValueError("this model is broken"),
        RuntimeError("Expected to have finished reduction in the prior iteration, with parameters of size 3"),
        RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer, size 3"),
        KeyError("shape"),
        InputError("model.context: a sequence of size 3"),
    ],
)
def test_what_is_not_about_tensors_comes_out_as_it_is(error: Exception) -> None:
    model = Hungry(error)
    with pytest.raises(type(error)) as caught:
        Objective(recipe(loss="cross-entropy"), model)(model, (torch.ones(4, 5), LABELS), 4)
    assert caught.value is error


def test_a_shape_error_in_a_metric_says_so(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def own(output, batch):\n    return (output + batch[0]).mean()\n")
    error = failure(Net().eval(), (torch.ones(4, 5), LABELS), metrics=[f"{file}:own"])
    assert error.message.startswith("metrics: metrics failed: RuntimeError: The size of tensor a (3) must match")
    assert f"{file}, line 2" in error.message


def test_the_line_is_that_of_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n\nclass Mine(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.layer = nn.Conv2d(3, 4, 3)\n\n    def forward(self, x):\n        return self.layer(x)\n"
    )
    linecache.checkcache()
    model = import_callable(f"{file}:Mine", "model.use")()
    error = failure(model, (torch.ones(4, 1, 8, 8), LABELS))
    assert "failed in layer (Conv2d)" in error.message
    assert "weight: float32 [4, 3, 3, 3]" in error.message
    assert f"at {file}, line 9: return self.layer(x)" in error.message


def test_a_compiled_model_is_explained_as_it_is_written() -> None:
    model = Net(inner=7)
    model.compile(backend="eager")
    error = failure(model, (torch.ones(4, 5), LABELS))
    assert "failed in head (Linear): RuntimeError: mat1 and mat2 shapes" in error.message
    assert "was given 0: float32 [4, 8]" in error.message
    assert "self.head(hidden)" in error.message


def test_a_long_list_of_tensors_is_cut() -> None:
    model = nn.Linear(3, 3)
    try:
        model(torch.ones(2, 4))
    except RuntimeError as error:
        explained = explain_forward_error(error, model, {str(n): torch.ones(n) for n in range(40)})
    assert "and 28 more" in str(explained)


def test_a_model_that_is_replicated_has_its_own_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = DistributedDataParallel(Net(inner=7))
        error = failure_of(model, (torch.ones(4, 5), LABELS))
    finally:
        torch.distributed.destroy_process_group()
    assert "failed in head (Linear)" in error.message


def failure_of(model: DistributedDataParallel, batch: Any) -> GradusError:
    with pytest.raises(GradusError) as caught:
        Objective(recipe(loss="cross-entropy"), model.module)(model, batch, 4)
    return caught.value


def noted(work: Callable[[], Any], model: nn.Module, batch: str | None) -> list[str]:
    try:
        work()
    except Exception as error:
        note_tensors(error, model, batch)
        return list(getattr(error, "__notes__", []))
    raise AssertionError("it has not failed")


def test_an_error_of_a_loop_of_ones_own_is_noted_with_its_tensors() -> None:
    model = Net(inner=7)
    name, parameters, given, batch, hint = noted(lambda: model(torch.ones(4, 5)), model, "0: float32 [4, 5]")
    assert name == "the model failed in head (Linear)"
    assert "weight: float32 [3, 7]" in parameters
    assert given.strip() == "was given 0: float32 [4, 8]"
    assert batch.strip() == "the batch: 0: float32 [4, 5]"
    assert hint.startswith("hint: make the data's shapes fit")


def test_what_fails_outside_of_a_module_is_noted_with_the_batch_alone() -> None:
    batch, hint = noted(lambda: torch.ones(3) + torch.ones(4), Net(), "0: float32 [4, 5]")
    assert batch.strip() == "the batch: 0: float32 [4, 5]"
    assert hint.startswith("hint: make the tensors on the line of yours")


@pytest.mark.parametrize("words", ["the cat is on the keyboard", "Connection reset by peer: sizes differ"])
def test_an_error_about_something_else_is_left_as_it_is(words: str) -> None:
    def fail() -> None:
        raise RuntimeError(words)

    assert noted(fail, Net(), "0: float32 [4, 5]") == []


def test_an_error_of_shapes_outside_of_every_step_and_module_is_left_as_it_is() -> None:
    assert noted(lambda: torch.ones(3) + torch.ones(4), Net(), None) == []
