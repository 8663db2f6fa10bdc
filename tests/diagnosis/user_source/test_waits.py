"""What makes the host wait in a loop of the user's own, found in its text; and what does not."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from gradus.diagnosis.user_source.waits import waits_in

LOOP = """
import torch
from torch import nn
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for step, (x, y) in enumerate(loader):
        x = x.to(device)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
{code}
    print(loss.item())
"""
FIRST_LINE = 12  # of what is put in


def lines(code: str) -> list[int]:
    text = LOOP.format(code=textwrap.indent(textwrap.dedent(code).strip(), " " * 8))
    return [wait.line - FIRST_LINE + 1 for wait in waits_in(Path("train.py"), text)]


@pytest.mark.parametrize(
    "code",
    [
        "total += loss.item()",
        "print(loss)",
        "print('loss', float(loss))",
        "print(f'{epoch}: {loss:.3f}')",
        "print('%.3f' % loss)",
        "print('{}'.format(loss))",
        "losses.append(loss.detach().cpu())",
        "losses.append(loss.detach().cpu().numpy())",
        "history.append(loss.tolist())",
        "bar.set_postfix(loss=loss.item())",
        "writer.add_scalar('loss', loss, step)",
        "wandb.log({'loss': loss})",
        "logger.info('loss %s', loss)",
        "torch.cuda.synchronize()",
        "dist.barrier()",
        "assert torch.isfinite(loss)",
        "norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()",
        "correct += (model(x).argmax(1) == y).sum().item()",
    ],
)
def test_a_line_that_waits_at_every_step_is_found(code: str) -> None:
    assert lines(code) == [1]


def test_a_tensor_that_decides_is_found_and_what_it_decides_is_not() -> None:
    assert lines("if loss > 10:\n    print('bad', loss.item())") == [1]
    assert lines("if torch.isnan(loss).any():\n    raise ValueError(loss.item())") == [1]


@pytest.mark.parametrize(
    "guard",
    [
        "if step % 50 == 0:",
        "if (step + 1) % every == 0:",
        "if rank == 0 and step % 50 == 0:",
        "if not step % 50:",
        "if step == 0:",
        "if step == len(loader) - 1:",
        "if time.time() - last > 10:",
        "if should_log(step):",
        "if not model.training:",
    ],
)
def test_what_happens_now_and_then_is_not_told(guard: str) -> None:
    assert lines(f"{guard}\n    print(loss.item())") == []


@pytest.mark.parametrize(
    "guard",
    [
        "if rank == 0:",
        "if dist.get_rank() == 0:",
        "if True:",
        "if step % 1 == 0:",
        "if writer is not None:",
        "if verbose:",
    ],
)
def test_a_guard_that_lets_every_step_pass_is_none(guard: str) -> None:
    assert lines(f"{guard}\n    print(loss.item())") == [2]


def test_what_follows_a_continue_at_most_steps_happens_now_and_then() -> None:
    assert lines("if step % 10:\n    continue\nprint(loss.item())") == []
    assert lines("if step % 10 == 0:\n    continue\nprint(loss.item())") == [3]


@pytest.mark.parametrize(
    "code",
    [
        "total += loss.detach()",
        "longest = y.max().item()",  # of the loader: it has never left the host
        "print(step, x.shape, len(loader))",
        "print('step', step)",
        "if y.shape[0] < 8:\n    pass",
        "if scaler is not None:\n    scaler.update()",
        "seen = {name: count for name, count in counts.items()}",
        "value = config.items()",
    ],
)
def test_what_does_not_wait_is_not_told(code: str) -> None:
    assert lines(code) == []


def test_a_step_in_a_function_makes_the_loop_that_calls_it_hot() -> None:
    text = """
def train_step(model, x):
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss

def main():
    for x in loader:
        loss = train_step(model, x)
        print(loss)
"""
    assert [wait.line for wait in waits_in(Path("train.py"), text)] == [11]


def test_a_function_that_the_loop_calls_is_looked_into() -> None:
    text = """
def note(loss):
    return loss.item()

for x in loader:
    loss = model(x).sum()
    loss.backward()
    history.append(note(loss))
"""
    assert [wait.line for wait in waits_in(Path("train.py"), text)] == [3]


def test_an_evaluation_loop_may_wait() -> None:
    text = """
for x in loader:
    loss = model(x).sum()
    loss.backward()
with torch.no_grad():
    for x in held_out:
        total += model(x).sum().item()
"""
    assert waits_in(Path("train.py"), text) == []


def test_the_loop_of_gradus_run_is_hot() -> None:
    text = """
run = gradus.Run.start("recipe.yaml")
for batch in run.batches(points):
    loss = loss_of(model, batch)
    run.step(loss)
    if run.evaluation_due:
        print(run.evaluate(held_out, measure))
    print(run.steps_done, loss.item())
"""
    assert [wait.line for wait in waits_in(Path("train.py"), text)] == [8]


def test_of_a_recipes_files_forward_passes_losses_and_hooks_are_looked_at() -> None:
    text = """
class Net(nn.Module):
    def forward(self, x):
        if self.training:
            self.largest = x.abs().max().item()
        return self.layer(x)

class Data:
    def __getitem__(self, index):
        return self.x[index].item()

def loss(output, batch):
    value = ((output - batch[1]) ** 2).mean()
    print(value)
    return value

class Notes(gradus.Hook):
    def on_step(self, run):
        self.values.append(self.total.item())

    def on_evaluate(self, run, results):
        print(self.total.item())
"""
    found = waits_in(Path("own.py"), text, functions=("loss",))
    assert [wait.line for wait in found] == [5, 14, 19]


def test_a_file_that_is_no_python_has_none() -> None:
    assert waits_in(Path("train.py"), "for x in:\n  print 'x'") == []


def test_the_examples_wait_for_nothing() -> None:
    examples = Path(__file__).parents[3] / "examples"
    found = {path.name: waits_in(path, path.read_text()) for path in examples.glob("*.py")}
    assert len(found) >= 4
    assert not [wait for waits in found.values() for wait in waits]


@pytest.mark.parametrize(
    "code",
    [
        "if step >= 100:\n    print(loss.item())\n    break",
        "if stop:\n    raise RuntimeError(loss.item())",
        "if step == 3:\n    print(loss.item())\n    break",
    ],
)
def test_what_ends_the_loop_happens_once(code: str) -> None:
    assert lines(code) == []


@pytest.mark.parametrize(
    ("code", "arguments", "found"),
    [
        ("if args.fault == 'item':\n    loss.item()", ["--fault", "item"], [2]),
        ("if args.fault == 'item':\n    loss.item()", ["--fault=item"], [2]),
        ("if args.fault == 'item':\n    loss.item()", ["--fault=none"], []),
        ("if args.bad:\n    loss.item()", ["--bad"], [2]),
        ("if args.log_all:\n    loss.item()", ["--log-all"], [2]),
        ("if args.bad:\n    loss.item()", [], []),
    ],
)
def test_what_the_script_was_asked_for_happens(code: str, arguments: list[str], found: list[int]) -> None:
    text = LOOP.format(code=textwrap.indent(code, " " * 8))
    waits = waits_in(Path("train.py"), text, arguments=arguments)
    assert [wait.line - FIRST_LINE + 1 for wait in waits] == found


@pytest.mark.parametrize(
    "code",
    ["a = np.array(loss.detach())", "if math.isnan(loss):\n    skipped += 1", "kept = loss.to(torch.device('cpu'))"],
)
def test_the_tensor_is_read_by_other_libraries(code: str) -> None:
    assert lines(code) == [1]


def test_methods_of_an_object_that_the_file_makes_are_looked_at() -> None:
    text = """
import torch
class Trainer:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(self, x):
        loss = self.model(x).sum()
        loss.backward()
        self.optimizer.step()
        self.total += loss.item()
    def fit(self, loader):
        for x in loader:
            self.step(x)
trainer = Trainer(model)
for x in loader:
    trainer.step(x)
"""
    assert [wait.line for wait in waits_in(Path("train.py"), text)] == [11]
    assert [wait.line for wait in waits_in(Path("train.py"), text.partition("trainer =")[0])] == [11]


def test_a_function_of_the_file_beside_is_looked_at() -> None:
    text = "from helpers import note as noted\n" + LOOP.format(code="        noted(loss, step)")
    helpers = "def note(value, step):\n    losses.append(value.item())\ndef other(value):\n    value.item()\n"
    found = waits_in(Path("there/train.py"), text, beside={Path("there/helpers.py"): helpers})
    assert [wait.place for wait in found] == ["there/helpers.py:2"]


def test_a_scheduler_steps_no_training_whatever_its_name() -> None:
    text = """
import torch
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for epoch in range(10):
    for x in loader:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    cosine.step()
    print(loss.item())
"""
    assert waits_in(Path("train.py"), text) == []
