"""Documents in one sequence: loss and gradients are those of each document by itself, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradus.models.bert import BERT
from gradus.models.documents import attend_inside, positions_in
from gradus.models.gpt import GPT
from gradus.models.huggingface import adapted
from gradus.models.huggingface_documents import KEPT_APART
from gradus.models.output import IGNORED
from gradus.models.settings import BERTSettings, GPTSettings
from gradus.parallel.context import _of_whole_sequences
from gradus.schema.errors import InputError

CONTEXT = 16
# The numbers of tokens of the documents in each sample; what is left is padding.
PACKS = [[7, 5, 3], [16], [1, 1, 1, 9, 4]]
SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "context": CONTEXT, "vocabulary": 61, "dropout": 0.0}
LATENT = {"attention": "latent", "kv_rank": 8, "query_rank": 12, "plain_width": 8, "rotary_width": 4, "value_width": 8}
MODELS: dict[str, Any] = {
    "gpt, learned": lambda: GPT(GPTSettings(**SMALL)),
    "gpt, rotary": lambda: GPT(GPTSettings(**SMALL, positions="rotary", norm="rmsnorm", activation="swiglu")),
    "gpt, grouped": lambda: GPT(GPTSettings(**SMALL, positions="rotary", kv_heads=2)),
    "gpt, latent": lambda: GPT(GPTSettings(**SMALL, positions="rotary", **LATENT)),
    "gpt, experts": lambda: GPT(GPTSettings(**SMALL, experts=4, experts_per_token=2, balance="none")),
    "bert": lambda: BERT(BERTSettings(**SMALL)),
}


@pytest.fixture(autouse=True)
def in_float64():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]()


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(2)
    documents = torch.full((len(PACKS), CONTEXT), 0, dtype=torch.int32)
    targets = torch.randint(61, (len(PACKS), CONTEXT), generator=draw)
    for row, lengths in enumerate(PACKS):
        numbers = [number for number, length in enumerate(lengths) for _ in range(length)]
        documents[row] = torch.tensor(numbers + [len(lengths)] * (CONTEXT - len(numbers)))
        targets[row, len(numbers) :] = IGNORED
    return {
        "tokens": torch.randint(61, (len(PACKS), CONTEXT), generator=draw),
        "targets": targets,
        "documents": documents,
    }


def one_by_one(packs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Each document as a batch of its own."""
    found = []
    for row, lengths in enumerate(PACKS):
        at = 0
        for length in lengths:
            found.append({key: packs[key][row : row + 1, at : at + length] for key in ("tokens", "targets")})
            at += length
    return found


def gradients(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = torch.stack([model(**one).loss_sum for one in batches]).sum()
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_a_pack_is_its_documents_one_by_one(name: str) -> None:
    model, packs = made(name), batch()
    loss, together = gradients(model, [packs])
    expected, alone = gradients(model, one_by_one(packs))
    assert torch.allclose(loss, expected, rtol=1e-12, atol=0)
    for found, wanted in zip(together, alone, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-12)
    whole, _ = gradients(model, [{key: packs[key] for key in ("tokens", "targets")}])
    assert abs(whole - expected) > 1e-3  # without `documents` they see each other


@pytest.mark.parametrize("name", MODELS)
def test_a_document_that_fills_the_sequence_is_a_plain_sample(name: str) -> None:
    model, packs = made(name), batch()
    plain = {key: packs[key] for key in ("tokens", "targets")}
    of_one = {**plain, "documents": torch.zeros_like(packs["documents"])}
    loss, found = gradients(model, [of_one])
    expected, wanted = gradients(model, [plain])
    assert torch.allclose(loss, expected, rtol=1e-12, atol=0)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, wanted, strict=True))


def test_positions_begin_anew_with_each_document() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, 3, 3], [4, 4, 4, 4, 4, 4, 4, 9]])
    assert positions_in(documents).tolist() == [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0]]


@pytest.mark.parametrize("causal", [True, False])
def test_the_blocks_that_a_gpu_computes_are_those_of_the_mask(causal: bool) -> None:
    """Uncompiled, flex_attention computes on any device what its kernel does on a GPU."""
    from gradus.models.documents import _attend_blocks

    draw = torch.Generator().manual_seed(3)
    documents = batch()["documents"]
    q, k, v = (torch.randn(len(PACKS), heads, CONTEXT, 16, generator=draw) for heads in (4, 2, 2))
    expected = attend_inside(q, k, v, documents, causal=causal, dropout=0.0)
    assert torch.allclose(_attend_blocks(q, k, v, documents, causal), expected, rtol=1e-9, atol=1e-12)


def test_a_compiled_block_computes_the_same() -> None:
    model, packs = made("gpt, rotary"), batch()
    expected, wanted = gradients(model, [packs])
    for block in model.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    loss, found = gradients(model, [packs])
    assert torch.allclose(loss, expected, rtol=1e-12, atol=0)
    assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(found, wanted, strict=True))


def test_ranks_that_share_a_sequence_refuse_documents() -> None:
    attend = _of_whole_sequences(lambda q, k, v, causal, dropout: q)
    q = torch.zeros(1, 1, 2, 2)
    assert attend(q, q, q, causal=True, dropout=0.0) is q
    with pytest.raises(InputError, match=r"plan\.mesh\.context: the batch has several documents in a sequence"):
        attend(q, q, q, causal=True, dropout=0.0, documents_bt=torch.zeros(1, 2))


WIDTHS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
SIZES = {**WIDTHS, "num_hidden_layers": 2, "vocab_size": 61, "max_position_embeddings": 32, "pad_token_id": 0}
DROPOUTS = (
    *("hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    *("residual_dropout", "embedding_dropout"),
)


def pretrained(kind: str, attention: str = "sdpa", task: str = "CausalLM") -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **SIZES)
    for name in DROPOUTS:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    torch.manual_seed(1)
    model: nn.Module = getattr(transformers, f"AutoModelFor{task}").from_config(config, attn_implementation=attention)
    return adapted(model.double().train())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("gpt2", "llama") else pytest.mark.slow) for kind in KEPT_APART]
)
def test_a_hugging_face_model_keeps_documents_apart(kind: str) -> None:
    model, packs = pretrained(kind), batch()
    loss, together = gradients(model, [packs])
    expected, alone = gradients(model, one_by_one(packs))
    assert torch.allclose(loss, expected, rtol=1e-9, atol=0)
    for found, wanted in zip(together, alone, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-6, atol=1e-7)  # some have norms in float32


def test_its_own_keys_do_the_same() -> None:
    model, packs = pretrained("llama"), batch()
    positions = positions_in(packs["documents"])
    labels = torch.where(packs["targets"].ne(IGNORED) & positions.gt(0), packs["tokens"], IGNORED)
    loss = model(input_ids=packs["tokens"], labels=labels, position_ids=positions, use_cache=False).loss
    summed, count = 0.0, 0
    for one in one_by_one(packs):
        if one["tokens"].shape[1] > 1:
            logits = model(input_ids=one["tokens"], use_cache=False).logits[0, :-1]
            summed += nn.functional.cross_entropy(logits, one["tokens"][0, 1:], reduction="sum")
            count += len(logits)
    assert float(loss) == pytest.approx(float(summed / count), rel=1e-6)  # theirs is in float32


@pytest.mark.parametrize(
    ("kind", "task", "attention"),
    [("opt", "CausalLM", "sdpa"), ("bert", "MaskedLM", "sdpa"), ("llama", "CausalLM", "flex_attention")],
)
def test_one_that_would_not_is_refused(kind: str, task: str, attention: str) -> None:
    model = pretrained(kind, attention, task)
    with pytest.raises(InputError, match=r"data\.packing: found true, but .* the documents of a sequence apart"):
        model(**batch())
