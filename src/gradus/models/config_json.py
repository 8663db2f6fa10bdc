"""config.json: what it and the shapes beside it say about a Hugging Face model, in the settings of ours, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from gradus.models.layouts import Layout, detected, layout_of
from gradus.models.settings import BERTSettings, GPTSettings, Settings
from gradus.schema.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]

_GELUS = {"gelu": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh"}
REFERENCES = {"gpt2": "gpt", "llama": "gpt", "bert": "bert", "roberta": "bert"}


def recognised(
    settings: Settings, shapes: Shapes, config: Mapping[str, Any] | None, weights: str
) -> tuple[Layout, dict[str, str]] | None:
    """The layout of a file for a reference model, and the file's names as that layout spells them.

    None for a file that is in none of the known ones: its names are then taken for our own. A file of a model with
    other settings is an error that says which to change.
    """
    found = detected(shapes)
    if found is None:
        return None
    name, spelled = found
    check_fits(name, settings_in(name, {spelled[n]: shape for n, shape in shapes.items()}, config), settings, weights)
    return layout_of(settings, name), spelled


def settings_in(layout: str, shapes: Shapes, config: Mapping[str, Any] | None) -> dict[str, object]:
    """The settings of our reference model that follow from a file's shapes and, where there is one, its config.json."""
    read = {"gpt2": _in_gpt2, "llama": _in_llama}.get(layout, _in_bert)
    try:
        found = read(layout, shapes, config or {})
    except (KeyError, ValueError, IndexError, TypeError, AttributeError, ZeroDivisionError) as error:
        # Names alone made it look like this layout. What else it has comes from outside and may be anything.
        raise InputError(
            f"model.weights: its names are those of a {layout} model, but its tensors or its config.json are not: "
            f"{type(error).__name__}: {error}",
            field="model.weights",
        ) from error
    return {key: value for key, value in found.items() if value is not None}


def check_fits(layout: str, found: Mapping[str, object], settings: Settings, weights: str) -> None:
    """Refuse weights of a model with other settings, and say which to change."""
    mine = asdict(settings)
    if not isinstance(settings, GPTSettings if REFERENCES[layout] == "gpt" else BERTSettings):
        raise InputError(
            f"model.weights: {weights} holds a {layout} model, which model.use {REFERENCES[layout]} would be",
            hint=f"model: {{use: {REFERENCES[layout]}, {_written(found)}}}",
            field="model.weights",
            found=layout,
        )
    mine["inner"] = settings.inner_width
    if isinstance(settings, GPTSettings):
        mine["kv_heads"] = settings.key_value_heads
    different = {key: value for key, value in found.items() if mine[key] != value}
    if different:
        listed = "; ".join(f"{key} is {value!r} there and {mine[key]!r} here" for key, value in different.items())
        raise InputError(
            f"model.weights: {weights} holds a {layout} model with other settings: {listed}",
            hint=" ".join(f"--set model.{key}={_yaml(value)}" for key, value in different.items()),
            field="model.weights",
            found={key: mine[key] for key in different},
            allowed=different,
        )


def config_of(layout: str, settings: Settings) -> dict[str, Any]:
    """The config.json with which `transformers` builds the same model."""
    if isinstance(settings, GPTSettings):
        return _gpt2_config(settings) if layout == "gpt2" else _llama_config(settings)
    assert isinstance(settings, BERTSettings), settings
    return _bert_config(layout, settings)


def _in_gpt2(layout: str, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, object]:
    vocabulary, width = shapes["transformer.wte.weight"]
    if not config.get("scale_attn_weights", True) or config.get("scale_attn_by_inverse_layer_idx", False):
        raise _unknown(layout, "attention is scaled in another way")
    return {
        "layers": _layers(shapes, "transformer.h"),
        "width": width,
        "heads": config.get("n_head"),
        "context": _rows(shapes, "transformer.wpe.weight"),
        "vocabulary": vocabulary,
        "inner": _columns(shapes, "transformer.h.0.mlp.c_fc.weight"),
        "positions": "learned",
        "norm": "layernorm",
        "activation": _gelu(layout, config.get("activation_function")),
        "norm_eps": config.get("layer_norm_epsilon"),
        "bias": True,
        "tied": _is_tied(shapes, config, default=True),
    }


def _in_llama(layout: str, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, object]:
    vocabulary, width = shapes["model.embed_tokens.weight"]
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        raise _unknown(layout, f"rotary positions are scaled ({kind})")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _unknown(layout, f"its activation is {config['hidden_act']}")
    heads = config.get("num_attention_heads")
    if heads is not None and config.get("head_dim") not in (None, width // heads):
        raise _unknown(layout, f"its heads are {config['head_dim']} wide, and not width / heads = {width // heads}")
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise _unknown(layout, f"attention sees only the last {config['sliding_window']} tokens")
    biases = [
        f"model.layers.0.{layer}.bias" in shapes for layer in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    ]
    if len(set(biases)) > 1:
        raise _unknown(layout, "only some of its layers have a bias")
    if "model.layers.0.self_attn.q_norm.weight" in shapes:
        raise _unknown(layout, "its queries and keys are normalised")
    return {
        "layers": _layers(shapes, "model.layers"),
        "width": width,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "vocabulary": vocabulary,
        "inner": _rows(shapes, "model.layers.0.mlp.gate_proj.weight"),
        "positions": "rotary",
        "rotary_base": _number(rotary.get("rope_theta", config.get("rope_theta"))),
        "norm": "rmsnorm",
        "activation": "swiglu",
        "norm_eps": config.get("rms_norm_eps"),
        "bias": biases[0],
        "tied": _is_tied(shapes, config, default=False),
    }


def _in_bert(layout: str, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, object]:
    vocabulary, width = shapes[f"{layout}.embeddings.word_embeddings.weight"]
    if config.get("hidden_act", "gelu") != "gelu":
        raise _unknown(layout, f"its activation is {config['hidden_act']}")
    offset = 2 if layout == "roberta" else 0
    rows = _rows(shapes, f"{layout}.embeddings.position_embeddings.weight")
    return {
        "layers": _layers(shapes, f"{layout}.encoder.layer"),
        "width": width,
        "heads": config.get("num_attention_heads"),
        "inner": _rows(shapes, f"{layout}.encoder.layer.0.intermediate.dense.weight"),
        "context": None if rows is None else rows - offset,
        "position_offset": offset,
        "vocabulary": vocabulary,
        "type_vocabulary": _rows(shapes, f"{layout}.embeddings.token_type_embeddings.weight"),
        "norm_eps": config.get("layer_norm_eps"),
    }


def _gpt2_config(s: GPTSettings) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": s.vocabulary,
        "n_positions": s.context,
        "n_embd": s.width,
        "n_layer": s.layers,
        "n_head": s.heads,
        "n_inner": s.inner_width,
        "activation_function": "gelu_new" if s.activation == "gelu-tanh" else "gelu",
        "layer_norm_epsilon": s.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), s.dropout),
        "tie_word_embeddings": s.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _llama_config(s: GPTSettings) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": s.vocabulary,
        "hidden_size": s.width,
        "intermediate_size": s.inner_width,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.key_value_heads,
        "head_dim": s.head_width,
        "max_position_embeddings": s.context,
        "hidden_act": "silu",
        "rms_norm_eps": s.norm_eps,
        "rope_theta": s.rotary_base,  # where releases of transformers before 5 look for it
        "rope_parameters": {"rope_type": "default", "rope_theta": s.rotary_base},
        "attention_bias": s.bias,
        "mlp_bias": s.bias,
        "tie_word_embeddings": s.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def _bert_config(layout: str, s: BERTSettings) -> dict[str, Any]:
    if layout == "roberta" and s.position_offset != 2:
        raise InputError(
            f"--layout: roberta has 2 unused positions, found model.position_offset {s.position_offset}",
            field="--layout",
            found=s.position_offset,
            allowed=[0, 2],
        )
    return {
        "model_type": layout,
        "architectures": ["BertForMaskedLM" if layout == "bert" else "RobertaForMaskedLM"],
        "vocab_size": s.vocabulary,
        "hidden_size": s.width,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "intermediate_size": s.inner_width,
        "max_position_embeddings": s.context + s.position_offset,
        "type_vocab_size": s.type_vocabulary,
        "hidden_act": "gelu",
        "layer_norm_eps": s.norm_eps,
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), s.dropout),
        "pad_token_id": 1 if layout == "roberta" else 0,
        "tie_word_embeddings": True,
    }


def _layers(shapes: Shapes, before: str) -> int:
    numbers = {match[1] for name in shapes if (match := re.match(re.escape(before) + r"\.(\d+)\.", name))}
    return len(numbers)


def _rows(shapes: Shapes, name: str) -> int | None:
    return shapes[name][0] if name in shapes else None


def _columns(shapes: Shapes, name: str) -> int | None:
    return shapes[name][1] if name in shapes else None


def _is_tied(shapes: Shapes, config: Mapping[str, Any], *, default: bool) -> bool | None:
    if "lm_head.weight" not in shapes:
        return True
    if not config:
        return None  # a second copy of the embedding, or a matrix of its own: the bytes will tell
    return bool(config.get("tie_word_embeddings", default))


def _gelu(layout: str, name: object) -> str | None:
    if name is not None and name not in _GELUS:
        raise _unknown(layout, f"its activation is {name}")
    return None if name is None else _GELUS[str(name)]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _unknown(layout: str, what: str) -> InputError:
    return InputError(
        f"model.weights: this {layout} model cannot be loaded into {REFERENCES[layout]}: {what}",
        hint="use it as it is: model.use: file.py:build, with a function that returns the transformers model",
        field="model.weights",
        found=what,
    )


def _written(found: Mapping[str, object]) -> str:
    return ", ".join(f"{key}: {_yaml(value)}" for key, value in found.items())


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
