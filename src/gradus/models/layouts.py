"""Layouts: how Hugging Face names and stores what `gpt` and `bert` hold, as one table for both directions. No torch.

| layout    | of     | what differs besides the names |
|-----------|--------|--------------------------------|
| `gpt2`    | `gpt`  | matrices are transposed; one matrix holds all queries, then all keys, then all values |
| `llama`   | `gpt`  | queries, keys and values are three matrices; rotary positions turn the same pairs as ours |
| `bert`    | `bert` | three matrices; a head under `cls.predictions` |
| `roberta` | `bert` | three matrices; a head under `lm_head`; two unused rows before position 0 |

Our one matrix for queries, keys and values holds them group by group (see `layers.Attention`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gradus.models.settings import BERTSettings, GPTSettings, Settings
from gradus.schema.errors import InputError


class Run(NamedTuple):
    """Neighbouring rows that lie side by side in both tensors: where they begin, and how many they are."""

    theirs: int
    ours: int
    rows: int


@dataclass(frozen=True)
class Link:
    """A tensor of theirs is all of one of ours, or some of its rows, perhaps in another order."""

    ours: str
    theirs: str
    runs: tuple[Run, ...] | None = None  # in the order of theirs, which they fill; None: all rows, as they are
    transposed: bool = False  # theirs is the transpose, and the runs count its columns

    @property
    def rows(self) -> int | None:
        """How many rows of ours theirs holds; None: all."""
        return None if self.runs is None else sum(run.rows for run in self.runs)


@dataclass(frozen=True)
class Layout:
    name: str
    links: tuple[Link, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)  # a second name of theirs for a tied tensor → the first
    unused: str = r"(?!)"  # names of theirs that hold nothing our model needs


# A name that gives a layout away, without the prefix that models with a head put before it.
_MARKS = {
    "gpt2": "h.0.attn.c_attn.weight",
    "llama": "layers.0.self_attn.q_proj.weight",
    "bert": "encoder.layer.0.attention.self.query.weight",
}
_PREFIXES = {"gpt2": ("transformer.",), "llama": ("model.",), "bert": ("bert.", "roberta.")}
_HEADS = ("lm_head.", "cls.")


def detected(names: Iterable[str]) -> tuple[str, dict[str, str]] | None:
    """The layout that these names are in, and each of them as that layout spells it; None if it is none of these."""
    names = list(names)
    known = set(names)
    for layout, mark in _MARKS.items():
        for prefix in (*_PREFIXES[layout], ""):
            if prefix + mark in known:
                name = "roberta" if prefix == "roberta." or "lm_head.layer_norm.weight" in known else layout
                full = "roberta." if name == "roberta" else _PREFIXES[layout][0]
                return name, {n: _spelled(n, "" if prefix else full) for n in names}
    return None


def _spelled(name: str, prefix: str) -> str:
    name = re.sub(r"(LayerNorm)\.gamma$", r"\1.weight", re.sub(r"(LayerNorm)\.beta$", r"\1.bias", name))
    return name if name.startswith(_HEADS) else prefix + name


def layout_of(settings: Settings, name: str | None = None) -> Layout:
    """The layout of a model with these settings; without `name`, the one that holds such a model."""
    if isinstance(settings, GPTSettings):
        chosen = name or _gpt_layout(settings)
        return gpt2(settings) if chosen == "gpt2" else llama(settings)
    if isinstance(settings, BERTSettings):
        chosen = name or ("roberta" if settings.position_offset else "bert")
        return bert(settings, chosen)
    raise _no_layout("only gpt and bert have one")


def _gpt_layout(s: GPTSettings) -> str:
    if s.experts is not None or s.attention != "heads":
        what = "a mixture of experts" if s.experts is not None else "latent attention"
        raise _no_layout(f"gpt2 and llama have one MLP in each layer and keys for each head; found {what}")
    kind = (s.positions, s.norm, s.activation == "swiglu")
    if kind == ("learned", "layernorm", False) and s.bias and s.key_value_heads == s.heads:
        return "gpt2"
    if kind == ("rotary", "rmsnorm", True):
        return "llama"
    raise _no_layout(
        "gpt2 has learned positions, layernorm, gelu, bias and no grouped queries, llama has rotary positions, rmsnorm "
        f"and swiglu; found positions={s.positions}, norm={s.norm}, activation={s.activation}, bias={s.bias}, "
        f"kv_heads={s.key_value_heads} of {s.heads}"
    )


def _no_layout(reason: str) -> InputError:
    return InputError(
        f"--layout: no Hugging Face layout holds this model: {reason}",
        hint="--layout gradus writes it under its own names",
        field="--layout",
        found="huggingface",
        allowed="gradus",
    )


def gpt2(s: GPTSettings) -> Layout:
    def links() -> Iterator[Link]:
        yield Link("embedding.token.weight", "transformer.wte.weight")
        yield Link("embedding.position.weight", "transformer.wpe.weight")
        for i in range(s.layers):
            ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
            yield from _both(f"{ours}.attention_norm", f"{theirs}.ln_1", s.bias)
            yield Link(f"{ours}.attention.qkv.weight", f"{theirs}.attn.c_attn.weight", joined, transposed=True)
            yield Link(f"{ours}.attention.qkv.bias", f"{theirs}.attn.c_attn.bias", joined)
            yield from _both(f"{ours}.attention.out", f"{theirs}.attn.c_proj", s.bias, transposed=True)
            yield from _both(f"{ours}.mlp_norm", f"{theirs}.ln_2", s.bias)
            yield from _both(f"{ours}.mlp.up", f"{theirs}.mlp.c_fc", s.bias, transposed=True)
            yield from _both(f"{ours}.mlp.down", f"{theirs}.mlp.c_proj", s.bias, transposed=True)
        yield from _both("head.norm", "transformer.ln_f", s.bias)
        yield from _output(s)

    queries, keys, values = _grouped(s.heads, s.heads, s.head_width)
    joined = (*queries, *_after(queries, keys), *_after((*queries, *keys), values))
    # Causal masks, which old files hold as if they were weights.
    return Layout("gpt2", tuple(links()), _tied(s, "transformer.wte.weight"), r".*\.attn\.(masked_)?bias")


def llama(s: GPTSettings) -> Layout:
    def links() -> Iterator[Link]:
        yield Link("embedding.token.weight", "model.embed_tokens.weight")
        parts = dict(zip("qkv", _grouped(s.heads, s.key_value_heads, s.head_width), strict=True))
        for i in range(s.layers):
            ours, theirs = f"blocks.{i}", f"model.layers.{i}"
            yield Link(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")
            yield from _split(f"{ours}.attention.qkv", theirs + ".self_attn.{}_proj", parts, s.bias)
            yield from _both(f"{ours}.attention.out", f"{theirs}.self_attn.o_proj", s.bias)
            yield Link(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight")
            for part in ("gate", "up", "down"):
                yield from _both(f"{ours}.mlp.{part}", f"{theirs}.mlp.{part}_proj", s.bias)
        yield Link("head.norm.weight", "model.norm.weight")
        yield from _output(s)

    return Layout("llama", tuple(links()), _tied(s, "model.embed_tokens.weight"), r".*\.rotary_emb\.inv_freq")


def bert(s: BERTSettings, name: str = "bert") -> Layout:
    def links() -> Iterator[Link]:
        for ours, theirs in (("token", "word"), ("position", "position"), ("token_type", "token_type")):
            yield Link(f"embedding.{ours}.weight", f"{name}.embeddings.{theirs}_embeddings.weight")
        yield from _both("embedding.norm", f"{name}.embeddings.LayerNorm")
        grouped = _grouped(s.heads, s.heads, s.width // s.heads)
        parts = dict(zip(("query", "key", "value"), grouped, strict=True))
        for i in range(s.layers):
            ours, theirs = f"blocks.{i}", f"{name}.encoder.layer.{i}"
            yield from _split(f"{ours}.attention.qkv", theirs + ".attention.self.{}", parts, True)
            yield from _both(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
            yield from _both(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
            yield from _both(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
            yield from _both(f"{ours}.mlp.down", f"{theirs}.output.dense")
            yield from _both(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
        yield from _both("head.dense", "cls.predictions.transform.dense" if name == "bert" else "lm_head.dense")
        norm = "cls.predictions.transform.LayerNorm" if name == "bert" else "lm_head.layer_norm"
        yield from _both("head.norm", norm)
        yield Link("head.decoder.bias", f"{head}.bias")
        if s.pooler:
            yield from _both("pooler", f"{name}.pooler.dense")

    head = "cls.predictions" if name == "bert" else "lm_head"
    aliases = {
        f"{head}.decoder.weight": f"{name}.embeddings.word_embeddings.weight",
        f"{head}.decoder.bias": f"{head}.bias",
    }
    # The pooling layer and the next-sentence head have no part in predicting masked tokens.
    unused = r".*\.position_ids|cls\.seq_relationship\..*" + ("" if s.pooler else r"|.*\.pooler\.dense\..*")
    return Layout(name, tuple(links()), aliases, unused)


def _both(ours: str, theirs: str, bias: bool = True, *, transposed: bool = False) -> Iterator[Link]:
    """A weight and, where there is one, its bias."""
    yield Link(f"{ours}.weight", f"{theirs}.weight", transposed=transposed)
    if bias:
        yield Link(f"{ours}.bias", f"{theirs}.bias")


def _split(ours: str, theirs: str, parts: Mapping[str, tuple[Run, ...]], bias: bool) -> Iterator[Link]:
    """Our one matrix for queries, keys and values as their three."""
    for part, runs in parts.items():
        for kind in ("weight", "bias") if bias else ("weight",):
            yield Link(f"{ours}.{kind}", f"{theirs.format(part)}.{kind}", runs)


def _grouped(heads: int, kv_heads: int, head_width: int) -> tuple[tuple[Run, ...], ...]:
    """Where a matrix of all queries, one of all keys and one of all values lie in ours.

    Ours has a group for each key-value head: the queries that it serves, its key, its value.
    """
    sizes = [head_width * heads // kv_heads, head_width, head_width]
    firsts = [0, sizes[0], sizes[0] + sizes[1]]
    return tuple(
        tuple(Run(group * rows, group * sum(sizes) + first, rows) for group in range(kv_heads))
        for first, rows in zip(firsts, sizes, strict=True)
    )


def _after(before: Iterable[Run], runs: Iterable[Run]) -> tuple[Run, ...]:
    """The runs of a matrix of theirs that follows others in one tensor."""
    offset = sum(run.rows for run in before)
    return tuple(run._replace(theirs=offset + run.theirs) for run in runs)


def _output(s: GPTSettings) -> Iterator[Link]:
    if not s.tied:
        yield Link("head.output.weight", "lm_head.weight")


def _tied(s: GPTSettings, embedding: str) -> dict[str, str]:
    return {"lm_head.weight": embedding} if s.tied else {}
