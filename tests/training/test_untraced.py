"""What torch.compile gives up on without a word is said, with the reason; and nothing where all of it is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gradus_command import Gradus, events
from torch import Tensor, nn

from gradus.training.compilation import why_not_compiled
from gradus.training.untraced import Untraced


class Net(nn.Module):
    """A body between two layers."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.before, self.body, self.after = nn.Linear(4, 4), body, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.before(x))
        y: Tensor = self.after(hidden[0] if isinstance(hidden, tuple) else hidden)
        return y


class Printing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("the mean", end="\r")
        return x.relu()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def told_after(model: nn.Module) -> str | None:
    untraced = Untraced()
    torch.compile(model, backend="eager")(torch.ones(2, 3, 4))
    return untraced.told()


def test_a_model_that_is_compiled_as_a_whole_says_nothing() -> None:
    assert told_after(Net(nn.ReLU())) is None


def test_what_is_left_out_on_purpose_is_not_told() -> None:
    body = Printing()
    body.forward = torch.compiler.disable(body.forward)  # type: ignore[method-assign]
    assert told_after(Net(body)) is None


def test_a_model_that_is_given_up_on_says_why() -> None:
    told = str(told_after(Net(nn.LSTM(4, 4))))
    assert told.startswith("torch.compile gave up on 1 function of the model")
    assert told.endswith("Dynamo does not support RNN, GRU, or LSTM (LSTM(4, 4))")


def test_a_line_that_cuts_the_graph_is_named() -> None:
    told = str(told_after(Net(Printing())))
    assert told.startswith("torch.compile leaves out of its graphs")
    assert "`print`" in told


def test_what_an_earlier_run_was_told_is_not_told_again() -> None:
    model = Net(nn.LSTM(4, 4))
    assert told_after(model) is not None
    assert told_after(Net(nn.ReLU())) is None


def test_a_model_of_one_kernel_is_not_compiled_and_says_so() -> None:
    assert "LSTM is torch's own" in str(why_not_compiled(nn.LSTM(4, 4)))
    assert why_not_compiled(Net(nn.ReLU())) is None
    assert why_not_compiled(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) is None


MODELS = """\
from torch import nn

class Net(nn.Module):
    def __init__(self, width=1):
        super().__init__()
        self.body, self.head = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 1)
    def forward(self, x, y):
        return ((self.head(self.body(x[:, None])[0][:, 0]) - y) ** 2).mean()
"""


def test_a_run_says_once_what_is_not_compiled(tmp_path: Path) -> None:
    gradus = Gradus(tmp_path)
    (tmp_path / "recurrent.py").write_text(MODELS)
    plan = {"workers": 0, "compile": True}
    recipe = gradus.recipe(model={"use": "recurrent.py:Net"}, plan=plan, name="own")
    done = gradus("train", "--nproc", "1", "--run-id", "gru", recipe)
    assert done.code == 0, done.err
    found = [event["message"] for event in events(gradus.run("gru")) if event["event"] == "compilation"]
    assert len(found) == 1
    assert "torch.compile gave up on" in found[0]
    assert found[0] in done.err.replace("\n", " ")
