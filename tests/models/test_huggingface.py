"""`use: huggingface`: models of transformers by configuration or folder, checked early, adapted to our data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from huggingface_cases import SMALL, bart, bert, gpt2, vit

from gradus.models import catalogue
from gradus.models.huggingface import adapted
from gradus.models.huggingface_settings import HuggingFaceSettings
from gradus.models.output import LossOutput
from gradus.planner.resolve import resolved
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

LLAMA = {"model_type": "llama", **SMALL}
TOKENS = torch.arange(24).reshape(2, 12)


def settings(**options: Any) -> HuggingFaceSettings:
    found = catalogue.resolve("huggingface", options)[1]
    assert isinstance(found, HuggingFaceSettings)
    return found


def test_a_configuration_says_what_data_needs_to_know_without_torch() -> None:
    code = (
        "import sys, json; from gradus.models import catalogue; from dataclasses import asdict\n"
        f"found = asdict(catalogue.resolve('huggingface', {{'config': {LLAMA!r}, 'task': 'causal-lm'}})[1])\n"
        "loaded = [name in sys.modules for name in ('torch', 'transformers')]\n"
        "print(json.dumps([found['vocabulary'], found['context'], *loaded]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [40, 32, False, False]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_positions": 64, "vocab_size": 9}, (9, 64)),
        ({"model_type": "roberta", "max_position_embeddings": 514, "vocab_size": 9, "pad_token_id": 1}, (9, 512)),
        ({"model_type": "t5", "n_positions": 512, "vocab_size": 9}, (9, None)),
        ({"model_type": "gpt2"}, (None, None)),
    ],
)
def test_context_and_vocabulary_have_many_names(config: dict[str, Any], expected: tuple[int, int]) -> None:
    found = settings(config=config, task="causal-lm")
    assert (found.vocabulary, found.context) == expected


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("GPT2LMHeadModel", "causal-lm"),
        ("LlamaForCausalLM", "causal-lm"),
        ("BertForMaskedLM", "masked-lm"),
        ("T5ForConditionalGeneration", "seq2seq-lm"),
        ("MarianMTModel", "seq2seq-lm"),
        ("BertForSequenceClassification", "sequence-classification"),
        ("ViTForImageClassification", "image-classification"),
    ],
)
def test_the_task_follows_from_the_architecture(architecture: str, task: str) -> None:
    assert settings(config={"model_type": "llama", "architectures": [architecture]}).task == task


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({}, "model", "neither path and config"),
        ({"path": "x", "config": LLAMA}, "model", "both path and config"),
        ({"path": "/no/such/folder"}, "model.path", "is no folder"),
        ({"path": "."}, "model.path", "has no config.json"),
        ({"config": {"vocab_size": 3}}, "model.config.model_type", "no model_type"),
        ({"config": {"model_type": "lama"}}, "model.config.model_type", "did you mean 'llama'"),
        ({"config": LLAMA}, "model.task", "missing"),
        ({"config": LLAMA, "task": "causal"}, "model.task", "did you mean 'causal-lm'"),
        ({"config": "llama"}, "model.config", "a mapping"),
        ({"config": LLAMA, "task": "causal-lm", "vocabulary": "many"}, "model.vocabulary", "whole number"),
        ({"config": LLAMA, "tsak": "causal-lm"}, "model.tsak", "did you mean 'task'"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_built(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as caught:
        settings(**options)
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("config", "task", "field", "words"),
    [
        ({**LLAMA, "hiden_size": 3}, "causal-lm", "model.config.hiden_size", "did you mean 'hidden_size'"),
        ({**LLAMA, "hidden_size": "x"}, "causal-lm", "model.config", "transformers refused it"),
        ({"model_type": "vit"}, "causal-lm", "model.config", "Unrecognized configuration class"),
    ],
)
def test_what_transformers_would_keep_in_silence_or_refuse_is_told(
    config: dict[str, Any], task: str, field: str, words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        catalogue.build("huggingface", {"config": config, "task": task})
    assert caught.value.details["field"] == field


def test_our_names_set_the_configuration() -> None:
    model = catalogue.build("huggingface", {"config": LLAMA, "task": "causal-lm", "vocabulary": 77, "context": 8})
    assert (model.config.vocab_size, model.config.max_position_embeddings) == (77, 8)
    short = catalogue.build(
        "huggingface",
        {"config": {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1}, "task": "causal-lm"}
        | {"vocabulary": 50, "context": 16},
    )
    assert (short.config.n_positions, short.config.vocab_size) == (16, 50)


def test_a_model_by_name_gives_exact_sums_for_our_batches_and_takes_its_own_keys_too() -> None:
    model = catalogue.build("huggingface", {"config": LLAMA, "task": "causal-lm"})
    targets = torch.where(TOKENS % 5 == 0, -100, TOKENS)
    found = model(tokens=TOKENS, targets=targets)
    assert isinstance(found, LossOutput)
    output = model(input_ids=TOKENS, labels=TOKENS)
    expected = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert found.loss_sum.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found.count.item() == (targets != -100).sum().item()
    assert found.correct is None
    assert model.eval()(tokens=TOKENS, targets=targets).correct is not None
    assert output.loss is not None
    assert torch.equal(model(TOKENS).logits, model(tokens=TOKENS))


def test_an_image_model_takes_the_pair_that_image_sources_give() -> None:
    model, images, labels = adapted(vit()), torch.randn(4, 3, 8, 8), torch.tensor([0, 1, -100, 2])
    found = model(images, labels)
    assert isinstance(found, LossOutput)
    assert found.count.item() == 3
    assert model(pixel_values=images, labels=labels).loss.item() == pytest.approx((found.loss_sum / 3).item())


def test_a_decoder_sees_the_targets_before_the_one_that_it_predicts() -> None:
    model = adapted(bart()).eval()
    targets = torch.where(TOKENS % 7 == 0, -100, TOKENS + 3)
    found = model(tokens=TOKENS + 3, targets=targets)
    own = model(input_ids=TOKENS + 3, labels=targets)
    assert (found.loss_sum / found.count).item() == pytest.approx(own.loss.item(), rel=1e-6)


def test_a_text_longer_than_the_model_has_positions_is_refused() -> None:
    model = catalogue.build("huggingface", {"config": {**LLAMA, "max_position_embeddings": 8}, "task": "causal-lm"})
    with pytest.raises(InputError, match="a sequence of 12 tokens"):
        model(tokens=TOKENS)


def test_a_folder_is_read_with_its_weights_and_written_as_transformers_has_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    first = gpt2().eval()
    first.save_pretrained(tmp_path / "one")
    model = catalogue.build("huggingface", {"path": str(tmp_path / "one")}).eval()
    assert model.state_dict().keys() == first.state_dict().keys()
    assert torch.equal(model(TOKENS).logits, first(TOKENS).logits)
    assert model.generate(TOKENS, max_new_tokens=2, do_sample=False).shape == (2, 14)
    model.save_pretrained(tmp_path / "two")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "two").eval()
    assert type(again) is type(first)
    assert torch.equal(again(TOKENS).logits, first(TOKENS).logits)


def test_a_folder_may_get_a_head_for_other_classes_but_no_other_vocabulary(tmp_path: Path) -> None:
    bert("BertForSequenceClassification").save_pretrained(tmp_path)
    model = catalogue.build("huggingface", {"path": str(tmp_path), "classes": 7})
    assert model.classifier.weight.shape[0] == 7
    with pytest.raises(InputError, match=r"found 41, but the weights in .* are for 40"):
        settings(path=str(tmp_path), vocabulary=41)


def test_a_folder_without_safetensors_or_with_other_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(InputError, match="no weights in safetensors") as caught:
        settings(path=str(tmp_path))
    assert "model.config" in str(caught.value.hint)
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"no weight in .* has the name of one of LlamaForCausalLM"):
        catalogue.build("huggingface", {"path": str(tmp_path)})


def recipe(**changes: Any) -> Recipe:
    document = {"name": "t", "batch": 4, "steps": 1, "optimizer": {"lr": 0.1}, "data": {"use": "stdlib-text"}}
    model = {"use": "huggingface", "config": {**LLAMA, "vocab_size": 256}, "task": "causal-lm"}
    return Recipe.from_document({**document, "model": model, **changes})


def test_data_inherits_context_and_objective() -> None:
    assert resolved(recipe()).data.options == {"context": 32}
    masked = {"use": "huggingface", "config": {"model_type": "bert", **SMALL, "vocab_size": 256}, "task": "masked-lm"}
    assert resolved(recipe(model=masked)).data.options == {"context": 32, "objective": "masked"}


def test_a_path_is_found_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2().save_pretrained(tmp_path / "tiny")
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "name: t\nmodel: {use: huggingface, path: tiny}\ndata: {use: synthetic-tokens}\nbatch: 4\nsteps: 1\n"
        "optimizer: {lr: 0.1}\n"
    )
    monkeypatch.chdir("/")
    loaded = resolved(Recipe.load(file))
    assert loaded.model.options["path"] == str(tmp_path / "tiny")
    assert loaded.data.options == {"context": 32, "vocabulary": 40}


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradus.models import huggingface_settings

    huggingface_settings._model_types.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="needs the package transformers") as caught:
        settings(config=LLAMA, task="causal-lm")
    assert 'pip install "gradus[huggingface]"' in str(caught.value.hint)


def test_it_is_no_line_of_the_catalogue_but_a_known_name() -> None:
    assert "huggingface" not in [entry.name for entry in catalogue.entries()]
    with pytest.raises(InputError, match="did you mean 'huggingface'"):
        catalogue.resolve("hugingface", {})


def test_a_folder_is_read_to_the_host_under_any_default_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes another one for a `device_map`, which it refuses without accelerate."""
    saved = gpt2()
    saved.save_pretrained(tmp_path)
    monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("cuda"))  # which this machine may not have
    with torch.device("meta"):
        model = catalogue.build("huggingface", {"path": str(tmp_path)})
    assert model.training
    for name, parameter in saved.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_on_the_meta_device_a_folder_is_the_shape_of_its_model(tmp_path: Path) -> None:
    saved = gpt2()
    saved.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = catalogue.build("huggingface", {"path": str(tmp_path)})
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in saved.named_parameters()}
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
