"""The mean that a Hugging Face model returns, times the labels it is over, is the sum of its cross-entropies."""

from __future__ import annotations

from typing import Any

import huggingface_cases as cases
import pytest
import torch
import torch.nn.functional as F
from huggingface_cases import SMALL, SPECIAL, VOCABULARY
from torch import Tensor, nn

from gradus.models.huggingface import adapted
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.objective import Losses, Objective
from gradus.training.valid_labels import rule_for

ROWS = 4


def batch(labels: str = "tokens") -> dict[str, Tensor]:
    data = cases.Sentences(ROWS, labels=labels)
    items = [data[index] for index in range(ROWS)]
    return {key: torch.stack([torch.as_tensor(item[key]) for item in items]) for key in items[0]}


def small(name: str, head: str, **changes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, name + head)(getattr(transformers, name + "Config")(**{**SMALL, **changes}))


def losses(model: nn.Module, inputs: dict[str, Tensor], **changes: Any) -> Losses:
    document = {"name": "t", "model": {"use": "gpt"}, "data": {"use": "stdlib-text"}, "batch": 1, "steps": 1}
    recipe = Recipe.from_document({**document, "optimizer": {"lr": 0.1}, **changes})
    with torch.no_grad():
        return Objective(recipe, model)(model.eval(), inputs, ROWS)


def expected_sum(model: nn.Module, inputs: dict[str, Tensor], shift: bool) -> tuple[float, int]:
    with torch.no_grad():
        logits = model(**inputs).logits
    labels = inputs["labels"]
    if shift:
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total.item(), int((labels != -100).sum())


CAUSAL = ["Llama", "Mistral", "Qwen2", "GPTNeoX", "Gemma", "Phi3", "Mixtral"]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_model_predicts_the_label_of_the_next_position(name: str) -> None:
    changes = {} if name == "GPTNeoX" else {"num_key_value_heads": 1}
    model = small(name, "ForCausalLM", **changes, **({"head_dim": 8} if name == "Gemma" else {}))
    check(model, batch(), shift=True)


def test_gpt2_whose_class_name_does_not_say_what_it_does() -> None:
    check(cases.gpt2(), batch(), shift=True)


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra", "ModernBert"])
def test_an_encoder_predicts_the_label_of_the_same_position(name: str, head: str) -> None:
    extra = {"cls_token_id": 1, "sep_token_id": 2} if name == "ModernBert" else {}
    check(small(name, head, num_labels=VOCABULARY, **extra), batch(), shift=False)


def test_a_decoder_that_does_not_shift_its_labels_is_not_taken_for_one_that_does() -> None:
    from transformers import BartConfig, BartForCausalLM

    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    config = BartConfig(**sizes, decoder_ffn_dim=32, max_position_embeddings=32, is_encoder_decoder=False, **SPECIAL)
    check(BartForCausalLM(config), batch(), shift=False)


@pytest.mark.parametrize("build", [cases.t5, cases.bart])
def test_an_encoder_with_decoder_predicts_the_label_of_the_same_position(build: Any) -> None:
    check(build(), batch(), shift=False)


@pytest.mark.parametrize("name", ["Bert", "Llama"])
def test_a_classifier_leaves_out_ignored_labels(name: str) -> None:
    inputs = batch("classes")
    inputs["labels"][1] = -100
    check(small(name, "ForSequenceClassification", num_labels=3), inputs, shift=False)


def test_a_model_by_name_treats_its_own_keys_as_its_class_does() -> None:
    check(adapted(cases.gpt2()), batch(), shift=True)


def check(model: nn.Module, inputs: dict[str, Tensor], shift: bool) -> None:
    found = losses(model, inputs)
    total, count = expected_sum(model, inputs, shift)
    assert found.count.item() == count
    assert found.loss_sum.item() == pytest.approx(total, rel=1e-5)
    assert (inputs["labels"] == -100).any()


def test_a_batch_without_any_label_weighs_nothing_and_sends_no_nan_back() -> None:
    model, inputs = cases.gpt2(), batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    document = {"name": "t", "model": {"use": "gpt"}, "data": {"use": "stdlib-text"}, "batch": 1, "steps": 1}
    recipe = Recipe.from_document({**document, "optimizer": {"lr": 0.1}})
    found = Objective(recipe, model)(model.train(), inputs, ROWS)
    assert (found.loss_sum.item(), found.count.item()) == (0.0, 0.0)
    found.loss_sum.backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters() if p.grad is not None)


def test_regression_and_unknown_losses_are_weighted_by_samples() -> None:
    inputs = batch("classes")
    regression = small("Bert", "ForSequenceClassification", num_labels=1)
    assert losses(regression, {**inputs, "labels": inputs["labels"].float()}).count.item() == ROWS

    class Own(type(cases.gpt2())):  # type: ignore[misc]
        def forward(self, **named: Any) -> Any:
            output = super().forward(**named)
            output.loss = output.loss * 2
            return output

    model = cases.gpt2()
    model.__class__ = Own
    assert rule_for(model) is None, "a forward of one's own may have any loss"
    assert losses(model, batch()).count.item() == ROWS
    changed = cases.gpt2()
    changed.loss_function = lambda logits, labels, **named: logits.mean()
    assert losses(changed, batch()).count.item() == ROWS
    assert rule_for(nn.Linear(1, 1)) is None


def test_accuracy_of_a_causal_model_compares_with_the_next_token() -> None:
    model, inputs = cases.gpt2(), batch()
    right, count = losses(model, inputs, metrics=["accuracy"]).metrics["accuracy"]
    with torch.no_grad():
        predicted = model.eval()(**inputs).logits[:, :-1].argmax(-1)
    labels = inputs["labels"][:, 1:]
    assert right.item() == ((predicted == labels) & (labels != -100)).sum().item()
    assert count.item() == (labels != -100).sum().item()


def test_a_batch_without_labels_is_refused_with_the_key_that_is_missing() -> None:
    inputs = batch()
    del inputs["labels"]
    with pytest.raises(InputError, match="CausalLMOutputWithCrossAttentions without a `loss`") as caught:
        losses(cases.gpt2(), inputs)
    assert "give it `labels` in the batch" in str(caught.value.hint)


def test_no_cache_of_keys_and_values_is_kept_in_training() -> None:
    seen: list[Any] = []
    model = cases.gpt2()
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.past_key_values))
    losses(model, batch())
    assert seen == [None]
    assert model.config.use_cache, "the model's configuration stays as it is"
