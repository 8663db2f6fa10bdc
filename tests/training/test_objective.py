"""Objective: every way in which a model may be called and may answer, as sums and counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradus.models import catalogue
from gradus.models.output import LossOutput
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.objective import Losses, Objective

SAMPLES = 6
TARGETS = torch.tensor([0, 2, 1, -100, 2, -100])


def recipe(**changes: Any) -> Recipe:
    document = {"name": "t", "model": {"use": "gpt"}, "data": {"use": "stdlib-text"}, "batch": 1, "steps": 1}
    return Recipe.from_document({**document, "optimizer": {"lr": 0.1}, **changes})


class Model(nn.Module):
    """Answers what a test wants, and remembers how it was called."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.called: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        self.called = arguments, keywords
        return self.answer


class Named(Model):
    def forward(self, x: Any = None, mask: Any = None) -> Any:
        self.called = (), {"x": x, "mask": mask}
        return self.answer


def losses(model: nn.Module, batch: Any, samples: int = SAMPLES, **changes: Any) -> Losses:
    return Objective(recipe(**changes), model)(model, batch, samples)


def logits(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: SimpleNamespace(loss=t), lambda t: {"loss": t}])
def test_without_a_loss_the_models_answer_is_the_mean_weighted_by_samples(wrap: Callable[[Tensor], Any]) -> None:
    found = losses(Model(wrap(torch.tensor(0.5))), (1, 2))
    assert found.loss_sum.item() == 0.5 * SAMPLES
    assert found.count.item() == SAMPLES
    assert found.loss_sum.ndim == 0


def test_a_mean_in_a_tensor_of_one_element_will_do() -> None:
    assert losses(Model(torch.tensor([[0.5]])), (1,)).loss_sum.item() == 3.0


def test_without_a_loss_a_dict_goes_in_as_keywords_whole() -> None:
    model = Model(torch.tensor(1.0))
    losses(model, {"x": 1, "labels": 2})
    assert model.called == ((), {"x": 1, "labels": 2})


def test_without_a_loss_a_tuple_goes_in_by_position_whole() -> None:
    model = Model(torch.tensor(1.0))
    losses(model, (1, 2, 3))
    assert model.called == ((1, 2, 3), {})


def test_with_a_loss_the_last_element_of_a_tuple_is_withheld() -> None:
    model = Model(logits(SAMPLES, 3))
    losses(model, (1, 2, TARGETS), loss="cross-entropy")
    assert model.called == ((1, 2), {})


def test_with_a_loss_the_model_gets_the_keys_that_its_forward_names() -> None:
    model = Named(logits(SAMPLES, 3))
    losses(model, {"x": 1, "labels": TARGETS, "id": 5}, loss="cross-entropy")
    assert model.called == ((), {"x": 1, "mask": None})


def test_with_a_loss_a_model_that_takes_any_keyword_gets_all() -> None:
    model = Model(logits(SAMPLES, 3))
    losses(model, {"x": 1, "labels": TARGETS, "id": 5}, loss="cross-entropy")
    assert model.called[1].keys() == {"x", "labels", "id"}


def test_a_reference_model_answers_with_its_own_sum_and_count() -> None:
    answer = LossOutput(torch.tensor(7.0), torch.tensor(4.0), None)
    found = losses(Model(answer), (1,))
    assert (found.loss_sum.item(), found.count.item()) == (7.0, 4.0)


def users_loss(tmp_path: Path, body: str, name: str = "loss") -> str:
    file = tmp_path / "mine.py"
    file.write_text(body)
    return f"{file}:{name}"


def test_a_users_scalar_mean_is_weighted_by_samples(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "def loss(output, batch):\n    return (output - batch[-1]).abs().mean()\n")
    found = losses(Model(torch.tensor([1.0, 2.0, 6.0])), (0, torch.zeros(3)), samples=3, loss=use)
    assert (found.loss_sum.item(), found.count.item()) == (9.0, 3.0)


def test_a_mean_over_a_part_of_the_sequences_is_refused(tmp_path: Path) -> None:
    """A rank's part may have fewer valid tokens than another's, so that the mean of their means is another."""
    use = users_loss(tmp_path, "def loss(output, batch):\n    return output.mean()\n")
    for model, changes, hint in (
        (Model(torch.ones(2)), {"loss": use}, "return the sum over valid tokens and their number"),
        (Model(torch.tensor(0.5)), {}, "name a `loss` that returns (sum, count)"),
    ):
        objective = Objective(recipe(**changes), model, context=4)
        with pytest.raises(InputError, match=r"found a mean over a rank's part .*plan\.mesh\.context 4") as caught:
            objective(model, (0, 0), SAMPLES)
        assert caught.value.details["field"] == "loss"
        assert hint in str(caught.value.hint)


@pytest.mark.parametrize("count", ["3", "torch.tensor(3)", "torch.tensor(3.0)"])
def test_a_users_sum_and_count_are_taken_as_they_are(tmp_path: Path, count: str) -> None:
    use = users_loss(tmp_path, f"import torch\ndef loss(output, batch):\n    return output.sum(), {count}\n")
    found = losses(Model(torch.tensor([1.0, 2.0])), (0, 0), loss=use)
    assert (found.loss_sum.item(), found.count.item()) == (3.0, 3.0)


def test_a_users_loss_gets_its_own_keys(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "def loss(output, batch, scale):\n    return output.mean() * scale\n")
    found = losses(Model(torch.tensor([2.0])), (0, 0), loss={"use": use, "scale": 10.0})
    assert found.loss_sum.item() == 20.0 * SAMPLES


def test_a_users_loss_may_be_a_class(tmp_path: Path) -> None:
    body = """
class Loss:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, output, batch):
        return output.mean() * self.scale
"""
    use = users_loss(tmp_path, body, "Loss")
    assert losses(Model(torch.tensor([2.0])), (0, 0), loss={"use": use, "scale": 10.0}).loss_sum.item() == 120.0


def test_a_mean_in_half_precision_is_summed_in_fp32() -> None:
    """In bf16 the factor 1 / global count would itself be off by up to 0.4 %."""
    mean = torch.tensor(1.0, dtype=torch.bfloat16, requires_grad=True)
    found = losses(Model(mean), (0,), samples=257)
    assert found.loss_sum.dtype == torch.float32
    assert found.loss_sum.item() == 257.0


def test_cross_entropy_leaves_ignored_targets_out() -> None:
    x = logits(SAMPLES, 3)
    found = losses(Model(x), (0, TARGETS), loss="cross-entropy")
    kept = TARGETS != -100
    assert found.count.item() == 4
    expected = F.cross_entropy(x[kept], TARGETS[kept], reduction="sum")
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=1e-12)


def test_cross_entropy_takes_classes_last_or_second() -> None:
    x = logits(2, 3, 4, 5)  # three classes, second
    targets = torch.randint(0, 3, (2, 4, 5), generator=torch.Generator().manual_seed(1))
    targets[0, 0, 0] = -100
    expected = F.cross_entropy(x, targets, reduction="sum").item()
    for answer in (x, x.movedim(1, -1), SimpleNamespace(logits=x)):
        found = losses(Model(answer), (0, targets), loss="cross-entropy")
        assert found.loss_sum.item() == pytest.approx(expected, rel=1e-12)
        assert found.count.item() == 39


@pytest.mark.parametrize("key", ["labels", "targets", "target", "label"])
def test_the_target_in_a_dict_has_one_of_the_usual_names(key: str) -> None:
    found = losses(Model(logits(SAMPLES, 3)), {"x": 1, key: TARGETS}, loss="cross-entropy")
    assert found.count.item() == 4


def test_a_batch_without_a_target_is_refused_with_what_was_found() -> None:
    with pytest.raises(InputError, match=r"no target in the batch: found \['x', 'y'\]"):
        losses(Model(logits(SAMPLES, 3)), {"x": 1, "y": TARGETS}, loss="cross-entropy")


def test_mse_is_a_mean_over_every_number() -> None:
    predicted, target = logits(SAMPLES, 1), torch.ones(SAMPLES)
    found = losses(Model(predicted), (0, target), loss="mse")
    assert found.count.item() == SAMPLES
    assert (found.loss_sum / found.count).item() == pytest.approx(((predicted[:, 0] - 1) ** 2).mean().item())


def test_mse_refuses_a_target_of_another_shape() -> None:
    """Six numbers in another arrangement are not the target, though they could be reshaped into it."""
    with pytest.raises(InputError, match=r"\(2, 3\).*\(3, 2\)"):
        losses(Model(logits(2, 3)), (0, torch.zeros(3, 2)), samples=2, loss="mse")


def evaluated(answer: Any, batch: Any, samples: int = SAMPLES, **changes: Any) -> Losses:
    model = Model(answer).eval()
    return losses(model, batch, samples, **changes)


def test_accuracy_counts_what_is_right_among_valid_targets() -> None:
    x = F.one_hot(torch.tensor([0, 2, 2, 0, 2, 1]), 3).double()
    found = evaluated(x, (0, TARGETS), loss="cross-entropy", metrics=["accuracy"])
    right, count = found.metrics["accuracy"]
    assert (right.item(), count.item()) == (3, 4)


def test_accuracy_takes_classes_last_or_second() -> None:
    x = logits(2, 3, 4, 5)
    targets = torch.randint(0, 3, (2, 4, 5), generator=torch.Generator().manual_seed(1))
    expected = (x.argmax(1) == targets).sum().item()
    for answer in (x, x.movedim(1, -1)):
        right, count = evaluated(answer, (0, targets), loss="cross-entropy", metrics=["accuracy"]).metrics["accuracy"]
        assert (right.item(), count.item()) == (expected, 40)


def test_accuracy_of_a_reference_model_is_its_own() -> None:
    model = catalogue.build("vit", {"layers": 1, "width": 12, "image": 8})
    batch = (torch.randn(4, 3, 8, 8), torch.tensor([1, 2, 3, 4]))
    assert losses(model.train(), batch).metrics == {}, "argmax is not free"
    right, count = losses(model.eval(), batch).metrics["accuracy"]
    assert right.item() == (model(batch[0]).argmax(-1) == batch[1]).sum().item()
    assert count.item() == 4


def test_a_users_metric_is_named_after_its_function(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "def spread(output, batch):\n    return output.max() - output.min()\n", "spread")
    found = evaluated(torch.tensor([1.0, 4.0]), (0, 0), loss=loss_of(tmp_path), metrics=[use])
    total, count = found.metrics["spread"]
    assert (total / count).item() == 3.0


def loss_of(folder: Path) -> str:
    file = folder / "other.py"
    file.write_text("def mean(output, batch):\n    return output.mean()\n")
    return f"{file}:mean"


@pytest.mark.parametrize("result", ["2.0", "(6, 3)", "(6.0, torch.tensor(3))", "(torch.tensor(6.0), 3)"])
def test_a_metric_may_answer_with_plain_numbers(tmp_path: Path, result: str) -> None:
    use = users_loss(tmp_path, f"import torch\ndef level(output, batch):\n    return {result}\n", "level")
    total, count = evaluated(torch.tensor([1.0]), (0, 0), loss=loss_of(tmp_path), metrics=[use]).metrics["level"]
    assert (total / count).item() == 2.0


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("'good'", "'good', a Python str"),
        ("None", "found None"),
        ("output", r"a tensor of shape \(6, 3\)"),
        ("{'a': 1}", "found dict"),
        ("(output.sum(), 'many')", "a count that is str"),
        ("(output.sum(), output)", r"a count that is a tensor of shape \(6, 3\)"),
        ("(output, 3)", r", as \(sum, count\): found a tensor of shape \(6, 3\)"),
        ("(1, 2, 3)", "found tuple"),
    ],
)
def test_a_metric_that_returns_nonsense_is_refused_by_its_name(tmp_path: Path, result: str, words: str) -> None:
    use = users_loss(tmp_path, f"def odd(output, batch):\n    return {result}\n", "odd")
    with pytest.raises(InputError, match=f"metric odd.*{words}") as caught:
        evaluated(logits(SAMPLES, 3), (0, 0), loss=loss_of(tmp_path), metrics=[use])
    assert caught.value.details["field"] == "metrics"


def test_metrics_have_options_and_names_of_their_own(tmp_path: Path) -> None:
    body = """
def top(output, batch, k):
    return (output.topk(k, -1).indices == batch[-1][:, None]).any(-1).sum(), len(batch[-1])

class Above:
    def __init__(self, level):
        self.level = level

    def __call__(self, output, batch):
        return (output > self.level).float().mean()
"""
    use = users_loss(tmp_path, body, "top")
    metrics = [
        {"use": use, "k": 1},
        {"use": use, "k": 3, "name": "top3"},
        {"use": f"{tmp_path}/mine.py:Above", "level": 0},
    ]
    targets = TARGETS.clamp(min=0)
    found = evaluated(logits(SAMPLES, 3), (0, targets), loss="cross-entropy", metrics=metrics).metrics
    assert found.keys() == {"top", "top3", "Above"}
    assert found["top3"][0].item() == SAMPLES
    assert found["top"][0].item() == (logits(SAMPLES, 3).argmax(-1) == targets).sum().item()


def test_two_metrics_of_one_name_are_refused_with_the_key_that_names_them(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "def top(output, batch, k): ...\n", "top")
    with pytest.raises(InputError, match="two that are called 'top'") as caught:
        recipe(metrics=[{"use": use, "k": 1}, {"use": use, "k": 5}])
    assert "name: ..." in str(caught.value.hint)


def test_a_key_that_accuracy_does_not_have_is_refused() -> None:
    with pytest.raises(InputError, match="unknown key of metric 'accuracy'"):
        recipe(metrics=[{"use": "accuracy", "k": 5}])


def test_padding_weighs_nothing() -> None:
    for answer, changes in (
        (torch.tensor(0.5), {}),
        (LossOutput(torch.tensor(7.0), torch.tensor(4.0), torch.tensor(2.0)), {}),
        (logits(SAMPLES, 3), {"loss": "cross-entropy", "metrics": ["accuracy"]}),
    ):
        found = evaluated(answer, (0, TARGETS), samples=0, **changes)
        assert found.loss_sum.item() == 0
        assert found.count.item() == 0
        assert all(total.item() == 0 and count.item() == 0 for total, count in found.metrics.values())


def test_padding_sends_zero_gradients_back_rather_than_none() -> None:
    """Every rank has to take part in the reduction of gradients."""
    model = nn.Linear(2, 3)
    found = losses(model, (torch.ones(1, 2), torch.tensor([1])), samples=0, loss="cross-entropy")
    found.loss_sum.backward()
    assert model.weight.grad is not None
    assert not model.weight.grad.any()


def test_a_vector_loss_is_refused_with_its_shape_and_a_hint(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "def loss(output, batch):\n    return output\n")
    with pytest.raises(InputError, match=r"the loss: found a tensor of shape \(6, 3\)") as caught:
        losses(Model(logits(SAMPLES, 3)), (0, 0), loss=use)
    assert ".mean()" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("result", "words", "hint"),
    [
        ("output.mean().item()", "a Python float", "the tensor itself"),
        ("None", "found None", "`return`"),
        ("output.mean().detach()", "no gradient reaches the model", r".detach()"),
        ("(output.sum().detach(), 3)", "no gradient reaches the model", r".item()"),
    ],
)
def test_a_loss_without_a_gradient_is_refused_with_what_cut_it_off(
    tmp_path: Path, result: str, words: str, hint: str
) -> None:
    use = users_loss(tmp_path, f"def loss(output, batch):\n    return {result}\n")
    model = nn.Linear(2, 3)
    batch = (torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    with pytest.raises(InputError, match=words) as caught:
        losses(model, batch, 4, loss=use)
    assert hint in str(caught.value.hint)
    assert caught.value.details["field"] == "loss"


def test_a_model_that_cuts_its_own_loss_off_is_refused() -> None:
    class Cut(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (super().forward(x) - y).square().mean().detach()

    model = Cut(2, 1)
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    with pytest.raises(InputError, match="no gradient reaches the model") as caught:
        losses(model, batch, 4)
    assert caught.value.details["field"] == "model"
    with torch.no_grad():
        assert losses(model.eval(), batch, 4).loss_sum.item() > 0, "evaluation needs no gradient"


def test_a_loss_of_torch_is_called_as_torch_has_it() -> None:
    x = logits(SAMPLES, 3)
    targets = TARGETS.clamp(min=0)
    found = losses(Model(x), (0, targets), loss={"use": "torch.nn:CrossEntropyLoss", "label_smoothing": 0.1})
    expected = F.cross_entropy(x, targets, label_smoothing=0.1).item()
    assert (found.loss_sum / found.count).item() == pytest.approx(expected, rel=1e-12)
    by_function = losses(
        Model(x), (0, targets), loss={"use": "torch.nn.functional:cross_entropy", "label_smoothing": 0.1}
    )
    assert by_function.loss_sum.item() == found.loss_sum.item()


def test_a_loss_that_is_a_module_has_its_buffers_in_the_models_numbers(tmp_path: Path) -> None:
    body = """
import torch
from torch import nn

class Weighted(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    def forward(self, output, batch):
        values = nn.functional.cross_entropy(output, batch[-1], self.weights, reduction="sum")
        return values, self.weights[batch[-1]].sum()
"""
    use = users_loss(tmp_path, body, "Weighted")
    model, batch = nn.Linear(2, 3).double(), (torch.ones(4, 2).double(), torch.tensor([0, 1, 2, 0]))
    found = losses(model, batch, 4, loss={"use": use, "weights": [1.0, 2.0, 3.0]})
    assert found.loss_sum.dtype == torch.float64
    assert found.count.item() == 7.0


def test_a_loss_with_parameters_is_refused_because_nobody_would_train_them(tmp_path: Path) -> None:
    body = """
from torch import nn

class Learned(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Linear(1, 1)
"""
    with pytest.raises(InputError, match=r"only the model's are trained: t\.weight, t\.bias") as caught:
        losses(Model(1), (0, 0), loss=users_loss(tmp_path, body, "Learned"))
    assert "part of the model" in str(caught.value.hint)


def test_a_class_that_refuses_its_settings_is_told_as_such(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "class Loss:\n    def __init__(self, scale): ...\n", "Loss")
    with pytest.raises(InputError, match=r"refused its settings: .*unexpected keyword argument 'scael'"):
        losses(Model(1), (0, 0), loss={"use": use, "scael": 1})


@pytest.mark.parametrize("result", ["(output, 3)", "(output.sum().item(), 3)"])
def test_a_sum_that_is_no_scalar_tensor_is_refused(tmp_path: Path, result: str) -> None:
    use = users_loss(tmp_path, f"def loss(output, batch):\n    return {result}\n")
    with pytest.raises(InputError, match=r"the loss, as \(sum, count\): found"):
        losses(Model(logits(SAMPLES, 3)), (0, 0), loss=use)


@pytest.mark.parametrize("answer", [logits(SAMPLES, 3), SimpleNamespace(logits=1), {"logits": 1}, "text"])
def test_a_model_without_a_loss_is_refused_with_the_line_to_add(answer: Any) -> None:
    with pytest.raises(InputError, match="the loss: found") as caught:
        losses(Model(answer), (0, TARGETS))
    assert "loss: cross-entropy" in str(caught.value.hint)
    assert caught.value.details["field"] == "loss"


def test_a_model_that_returns_a_tuple_is_told_to_name_its_loss() -> None:
    """Some return (loss, logits), some (logits, loss)."""
    with pytest.raises(InputError, match="the loss: found tuple") as caught:
        losses(Model((logits(SAMPLES, 3), torch.tensor(1.0))), (0, TARGETS))
    assert "a dict with `loss`" in str(caught.value.hint)


def test_an_answer_without_logits_is_refused() -> None:
    with pytest.raises(InputError, match=r"the model returned str, allowed: a tensor, or something with \.logits"):
        losses(Model("text"), (0, TARGETS), loss="cross-entropy")


def test_a_dict_with_logits_will_do_as_a_dict_with_loss_does() -> None:
    found = losses(Model({"logits": logits(SAMPLES, 3)}), (0, TARGETS), loss="cross-entropy")
    assert found.count.item() == 4


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "def loss(output, target):\n    return F.cross_entropy(output, target)",
            "TypeError: .*must be Tensor, not tuple",
        ),
        ("def loss(output, target):\n    return (output - target).mean()", "TypeError: unsupported operand"),
        ("def loss(output, target):\n    return output.mean() * target.float()", "AttributeError: 'tuple' object"),
        ("def loss(batch, output):\n    return F.cross_entropy(output, batch[-1])", "TypeError: "),
        ("def loss(output):\n    return output.mean()", "TypeError: .*1 positional argument but 2 were given"),
        ("def loss(output, batch):\n    return {}['weight']", "KeyError: 'weight'"),
    ],
)
@pytest.mark.parametrize("field", ["loss", "metrics"])
def test_an_exception_in_a_users_loss_says_how_it_is_called(tmp_path: Path, body: str, words: str, field: str) -> None:
    use = users_loss(tmp_path, f"import torch.nn.functional as F\n{body}\n")
    changes = (
        {"loss": use} if field == "loss" else {"loss": loss_of(tmp_path), "metrics": [{"use": use, "name": "own"}]}
    )
    with pytest.raises(InputError, match=f"{field}: .*mine.py:loss raised {words}") as caught:
        evaluated(logits(SAMPLES, 3), (0, TARGETS.clamp(min=0)), **changes)
    assert "(output, batch): the target is batch[-1] of a tuple, or batch['labels'] of a dict" in str(caught.value.hint)
    if "1 positional" not in words:
        assert f"mine.py, line 3: {body.splitlines()[-1].strip()}" in str(caught.value.hint)
    else:
        assert "objective.py" not in str(caught.value.hint), "the mistake is not there"


def test_shapes_that_do_not_fit_in_a_users_loss_are_told_as_shapes(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "def loss(output, batch):\n    return (output - batch[-1]).mean()\n")
    with pytest.raises(InputError, match=r"the model's output: .*\[6, 3\]"):
        losses(Model(logits(SAMPLES, 3)), (0, torch.zeros(5)), loss=use)


def test_what_may_be_the_machines_fault_is_no_bad_input(tmp_path: Path) -> None:
    use = users_loss(tmp_path, "def loss(output, batch):\n    raise RuntimeError('NCCL timeout')\n")
    with pytest.raises(RuntimeError, match="NCCL timeout"):
        losses(Model(logits(SAMPLES, 3)), (0, TARGETS), loss=use)


@pytest.mark.parametrize(
    ("count", "found", "hint"),
    [
        ("output.abs().mean()", r"a tensor of shape \(\) with a gradient", "add the two losses up yourself"),
        ("-1", "-1", "number of valid tokens"),
        ("float('nan')", "nan", "number of valid tokens"),
        ("True", "True", "number of valid tokens"),
    ],
)
def test_two_losses_are_not_taken_for_a_sum_and_a_count(tmp_path: Path, count: str, found: str, hint: str) -> None:
    use = users_loss(tmp_path, f"def loss(output, batch):\n    return output.mean(), {count}\n")
    with pytest.raises(InputError, match=f"a count that is {found}") as caught:
        losses(nn.Linear(2, 3), (torch.ones(4, 2), torch.zeros(4)), 4, loss=use)
    assert hint in str(caught.value.hint)
