"""Hugging Face layouts: the same logits from the same files, in both directions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from gradus.checkpoint.store import CheckpointStore
from gradus.models import catalogue
from gradus.models.layouts import Run, bert, gpt2, layout_of, llama
from gradus.models.settings import BERTSettings, GPTSettings, Settings
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.exporting import export, open_saved
from gradus.training.pretrained import load_pretrained

VOCABULARY, CONTEXT = 61, 24
TOKENS = torch.randint(5, VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(0))

GPT2 = {"use": "gpt", "layers": 2, "width": 32, "heads": 4, "context": CONTEXT, "vocabulary": VOCABULARY}
GPT2_TANH = {**GPT2, "activation": "gelu-tanh"}
LLAMA = {
    **GPT2,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "inner": 48,
    "bias": False,
    "tied": False,
}
BERT = {**GPT2, "use": "bert", "inner": 48, "type_vocabulary": 2, "norm_eps": 1e-12}
ROBERTA = {**GPT2, "use": "bert", "inner": 48, "position_offset": 2, "pooler": False}


def gpt2_config(**changes: Any) -> GPT2Config:
    return GPT2Config(vocab_size=VOCABULARY, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=4, **changes)


def llama_config(**changes: Any) -> LlamaConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaConfig(
        **{**sizes, "num_attention_heads": 4, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, **changes}
    )


def bert_config(kind: Any = BertConfig, **changes: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return kind(**{**sizes, "num_attention_heads": 4, "max_position_embeddings": CONTEXT, **changes})


def theirs(kind: type[nn.Module], config: Any) -> Any:
    """A model of transformers none of whose parameters is at its starting value, so that none can be mixed up."""
    torch.manual_seed(1)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def ours(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(2)
    return catalogue.build(options["use"], {k: v for k, v in options.items() if k != "use"}).eval()


FOREIGN = {
    "gpt2": (GPT2LMHeadModel, gpt2_config(), GPT2_TANH),
    "gpt2 with an exact gelu and another eps": (
        GPT2LMHeadModel,
        gpt2_config(activation_function="gelu", layer_norm_epsilon=1e-3),
        {**GPT2, "norm_eps": 1e-3},
    ),
    "gpt2 with an own output": (
        GPT2LMHeadModel,
        gpt2_config(tie_word_embeddings=False),
        {**GPT2_TANH, "tied": False},
    ),
    "llama": (LlamaForCausalLM, llama_config(), LLAMA),
    "llama with grouped queries, another base and eps": (
        LlamaForCausalLM,
        llama_config(num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        {**LLAMA, "kv_heads": 2, "rotary_base": 5e5},
    ),
    "llama with biases": (
        LlamaForCausalLM,
        llama_config(attention_bias=True, mlp_bias=True),
        {**LLAMA, "bias": True},
    ),
    "llama with a tied output": (LlamaForCausalLM, llama_config(tie_word_embeddings=True), {**LLAMA, "tied": True}),
    "bert": (BertForMaskedLM, bert_config(), BERT),
    "bert with a pooler and a next-sentence head": (BertForPreTraining, bert_config(), {**BERT, "pooler": True}),
    "bert whose pooler is not wanted": (BertForPreTraining, bert_config(), BERT),
    "roberta": (
        RobertaForMaskedLM,
        bert_config(
            RobertaConfig, max_position_embeddings=CONTEXT + 2, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1
        ),
        ROBERTA,
    ),
}


def logits(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        output = model(tokens)
    if isinstance(output, Tensor):
        return output
    found: Tensor = output.logits if hasattr(output, "logits") else output.prediction_logits
    return found


@pytest.mark.parametrize("case", FOREIGN)
def test_a_hugging_face_folder_gives_the_same_logits_in_our_model(tmp_path: Path, case: str) -> None:
    kind, config, options = FOREIGN[case]
    foreign = theirs(kind, config)
    foreign.save_pretrained(tmp_path)
    model = ours(options)
    assert not torch.allclose(logits(model), logits(foreign), atol=1e-2), "they would agree without loading"
    load_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(foreign), rtol=1e-5, atol=1e-5)


def test_a_sharded_folder_gives_the_same_logits(tmp_path: Path) -> None:
    foreign = theirs(LlamaForCausalLM, llama_config())
    foreign.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = ours(LLAMA)
    load_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(foreign), rtol=1e-5, atol=1e-5)


def test_files_of_the_bare_model_without_its_prefix_are_known_too(tmp_path: Path) -> None:
    foreign = theirs(GPT2LMHeadModel, gpt2_config())
    foreign.transformer.save_pretrained(tmp_path)  # as the published gpt2 is stored
    assert isinstance(foreign.transformer, GPT2Model)
    model = ours(GPT2_TANH)
    load_pretrained(model, tmp_path)
    torch.testing.assert_close(logits(model), logits(foreign), rtol=1e-5, atol=1e-5)


def test_names_and_masks_of_old_files_are_known_too(tmp_path: Path) -> None:
    foreign = theirs(BertForMaskedLM, bert_config())
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t.contiguous()
        for name, t in foreign.state_dict().items()
        if "decoder" not in name
    }
    save_file(renamed, tmp_path / "old-bert.safetensors")
    model = ours(BERT)
    load_pretrained(model, tmp_path / "old-bert.safetensors")
    torch.testing.assert_close(logits(model), logits(foreign), rtol=1e-5, atol=1e-5)

    foreign = theirs(GPT2LMHeadModel, gpt2_config())
    tensors = {
        name: t.contiguous().clone() for name, t in foreign.state_dict().items()
    }  # with the output a second time
    tensors |= {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, CONTEXT, CONTEXT) for i in range(2)}
    save_file(tensors, tmp_path / "old-gpt2.safetensors")
    model = ours(GPT2_TANH)
    load_pretrained(model, tmp_path / "old-gpt2.safetensors")
    torch.testing.assert_close(logits(model), logits(foreign), rtol=1e-5, atol=1e-5)


def test_token_types_are_those_of_bert(tmp_path: Path) -> None:
    foreign = theirs(BertForMaskedLM, bert_config())
    foreign.save_pretrained(tmp_path)
    model = ours(BERT)
    load_pretrained(model, tmp_path)
    types = (torch.arange(20) > 9).long().expand(3, 20)
    with torch.no_grad():
        expected = foreign(TOKENS, token_type_ids=types).logits
        torch.testing.assert_close(model(TOKENS, token_types=types), expected, rtol=1e-5, atol=1e-5)


OWN = {
    "gpt2": (GPT2, AutoModelForCausalLM, "GPT2LMHeadModel"),
    "gpt2 with tanh": (GPT2_TANH, AutoModelForCausalLM, "GPT2LMHeadModel"),
    "gpt2 untied": ({**GPT2, "tied": False, "norm_eps": 1e-4}, AutoModelForCausalLM, "GPT2LMHeadModel"),
    "llama": (LLAMA, AutoModelForCausalLM, "LlamaForCausalLM"),
    "llama grouped": (
        {**LLAMA, "kv_heads": 1, "rotary_base": 700.0, "norm_eps": 1e-3, "tied": True},
        AutoModelForCausalLM,
        "LlamaForCausalLM",
    ),
    "llama with biases": ({**LLAMA, "bias": True}, AutoModelForCausalLM, "LlamaForCausalLM"),
    "bert": (BERT, AutoModelForMaskedLM, "BertForMaskedLM"),
    "roberta": (ROBERTA, AutoModelForMaskedLM, "RobertaForMaskedLM"),
}


@pytest.mark.parametrize("case", OWN)
def test_our_model_exported_gives_the_same_logits_in_transformers(tmp_path: Path, case: str) -> None:
    options, automatic, kind = OWN[case]
    model = ours(options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tensors = {f"model.{name}": parameter for name, parameter in model.named_parameters()}
    CheckpointStore(tmp_path / "checkpoints").save(3, tensors, {})
    recipe = Recipe.from_document({"name": "x", "model": options, "batch": 1, "steps": 1})
    saved = open_saved(tmp_path / "checkpoints", recipe=recipe)
    export(saved, tmp_path / "out", "huggingface")
    foreign, loading = automatic.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(foreign).__name__ == kind
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    torch.testing.assert_close(logits(foreign.eval()), logits(model), rtol=1e-5, atol=1e-5)
    again = ours(options)
    load_pretrained(again, tmp_path / "out")
    assert torch.equal(logits(again), logits(model)), "and back, bit for bit"


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (GPTSettings(), gpt2(GPTSettings())),
        (GPTSettings(**{k: v for k, v in LLAMA.items() if k != "use"}), None),
        (GPTSettings(**{k: v for k, v in LLAMA.items() if k != "use"}, kv_heads=2), None),
        (BERTSettings(pooler=True), bert(BERTSettings(pooler=True))),
    ],
)
def test_every_parameter_is_linked_exactly_once(settings: Settings, layout: Any) -> None:
    layout = layout or llama(settings)  # type: ignore[arg-type]
    use = "bert" if isinstance(settings, BERTSettings) else "gpt"
    model = catalogue.build(use, asdict(settings))
    lengths = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
    rows: dict[str, list[int]] = {name: [] for name in lengths}
    for link in layout.links:
        runs = link.runs or (Run(0, 0, lengths[link.ours]),)
        assert [run.theirs for run in runs] == [sum(run.rows for run in runs[:i]) for i in range(len(runs))]
        rows[link.ours] += [run.ours + row for run in runs for row in range(run.rows)]
    assert {name: sorted(found) for name, found in rows.items()} == {n: list(range(k)) for n, k in lengths.items()}


def refusal(folder: Path, options: dict[str, Any]) -> InputError:
    model = ours(options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError) as caught:
        load_pretrained(model, folder)
    assert caught.value.details["field"] == "model.weights"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items()), "nothing was changed"
    return caught.value


def test_other_settings_are_named_with_what_to_change(tmp_path: Path) -> None:
    theirs(GPT2LMHeadModel, gpt2_config()).save_pretrained(tmp_path)
    error = refusal(tmp_path, {**GPT2, "vocabulary": 64, "heads": 2})
    assert "vocabulary is 61 there and 64 here" in error.message
    assert "heads is 4 there and 2 here" in error.message
    assert error.hint == "--set model.heads=4 --set model.vocabulary=61 --set model.activation=gelu-tanh"


def test_llama_weights_for_a_gpt2_say_what_kind_they_are(tmp_path: Path) -> None:
    theirs(LlamaForCausalLM, llama_config()).save_pretrained(tmp_path)
    error = refusal(tmp_path, GPT2)
    assert "holds a llama model" in error.message
    for change in ("model.positions=rotary", "model.norm=rmsnorm", "model.activation=swiglu", "model.bias=false"):
        assert change in str(error.hint)
    assert "model.use bert" not in error.message


def test_bert_weights_for_a_gpt_name_the_reference_model(tmp_path: Path) -> None:
    theirs(BertForMaskedLM, bert_config()).save_pretrained(tmp_path)
    error = refusal(tmp_path, GPT2)
    assert "use: bert" in str(error.hint)
    assert "type_vocabulary: 2" in str(error.hint)


def test_scaled_rotary_positions_are_refused_and_not_ignored(tmp_path: Path) -> None:
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    theirs(LlamaForCausalLM, llama_config(rope_parameters=scaled)).save_pretrained(tmp_path)
    error = refusal(tmp_path, LLAMA)
    assert "rotary positions are scaled (linear)" in error.message
    assert "file.py:build" in str(error.hint)


def test_a_bert_without_its_head_lists_what_is_missing(tmp_path: Path) -> None:
    theirs(BertModel, bert_config()).save_pretrained(tmp_path)
    error = refusal(tmp_path, BERT)
    assert "cls.predictions.transform.dense.weight" in error.details["missing"]
    assert "weights_skip" in str(error.hint)
    model = ours(BERT)
    load_pretrained(model, tmp_path, skip=["head.*"])


@pytest.mark.parametrize(
    ("kind", "config", "reason"),
    [
        (Qwen2ForCausalLM, Qwen2Config, "only some of its layers have a bias"),
        (Qwen3ForCausalLM, Qwen3Config, "its heads are 128 wide"),
        (MistralForCausalLM, MistralConfig, "attention sees only the last 4096 tokens"),
    ],
)
def test_relatives_of_llama_that_differ_are_refused_with_the_difference(
    tmp_path: Path, kind: Any, config: Any, reason: str
) -> None:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    theirs(kind, config(**sizes, num_attention_heads=4, num_key_value_heads=4)).save_pretrained(tmp_path)
    assert reason in refusal(tmp_path, LLAMA).message


def test_a_config_that_is_nonsense_is_bad_input(tmp_path: Path) -> None:
    theirs(LlamaForCausalLM, llama_config()).save_pretrained(tmp_path)
    for text in ('{"num_attention_heads": "many", "head_dim": 3}', '{"rope_parameters": 5}', "[]", "{"):
        (tmp_path / "config.json").write_text(text)
        assert "config.json" in refusal(tmp_path, LLAMA).message


def test_a_model_that_no_layout_holds_is_refused() -> None:
    with pytest.raises(InputError, match="no Hugging Face layout") as caught:
        layout_of(GPTSettings(norm="rmsnorm"))
    assert "norm=rmsnorm" in caught.value.message
    with pytest.raises(InputError, match="only gpt and bert"):
        layout_of(catalogue.resolve("vit", {})[1])
