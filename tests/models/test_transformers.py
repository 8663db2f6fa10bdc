"""The arithmetic of the transformers: causality, grouped queries, rotary positions, tied weights, wide norms."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gradus.models.bert import BERT
from gradus.models.gpt import GPT
from gradus.models.layers import Attention, LayerNorm, RMSNorm, Rotary
from gradus.models.settings import BERTSettings, GPTSettings
from gradus.parallel.materialise import materialise
from gradus.schema.errors import InputError


def small_gpt(**settings: object) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTSettings(**{"layers": 2, "width": 32, "context": 16, "vocabulary": 50, **settings}))


def rotary_tables(head_width: int, context: int) -> Rotary:
    rotary = Rotary(head_width, context, base=10_000.0)
    rotary.fill_tables()
    return rotary


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_later_token_does_not_change_earlier_logits(positions: str) -> None:
    model = small_gpt(positions=positions, kv_heads=2)
    tokens = torch.randint(0, 50, (2, 16))
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 50
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=0)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


def test_bert_sees_both_ways() -> None:
    torch.manual_seed(0)
    model = BERT(BERTSettings(layers=1, width=32, context=16, vocabulary=50))
    tokens = torch.randint(0, 50, (1, 16))
    changed = tokens.clone()
    changed[:, 10] = (tokens[:, 10] + 1) % 50
    assert not torch.equal(model(tokens)[:, 0], model(changed)[:, 0])


def test_grouped_query_attention_equals_repeated_keys_and_values() -> None:
    torch.manual_seed(0)
    width, heads, kv_heads, head_width = 32, 4, 2, 8
    grouped = Attention(width, heads, kv_heads=kv_heads, causal=True).double()
    repeated = Attention(width, heads, causal=True).double()
    repeated.out.load_state_dict(grouped.out.state_dict())

    def repeat(rows: torch.Tensor) -> torch.Tensor:
        """Each group's rows (two queries, a key, a value) as two groups that share the key and the value."""
        queries = heads // kv_heads
        groups = rows.unflatten(0, (kv_heads, queries + 2, head_width))
        shared = [[group[query], group[queries], group[queries + 1]] for group in groups for query in range(queries)]
        return torch.cat([part for group in shared for part in group])

    x = torch.randn(2, 6, width, dtype=torch.float64)
    mixed = grouped(x)
    copied = {"qkv." + key: repeat(value) for key, value in grouped.qkv.named_parameters()}
    expected = torch.func.functional_call(repeated, copied, (x,))
    torch.testing.assert_close(mixed, expected)

    # The repeats are differentiable, so the gradient of the grouped weights is comparable too.
    probe = torch.randn_like(mixed)
    weight = grouped.qkv.weight
    (found,) = torch.autograd.grad(mixed, weight, probe)
    (wanted,) = torch.autograd.grad(expected, weight, probe)
    torch.testing.assert_close(found, wanted)


def test_rotary_scores_depend_only_on_the_distance() -> None:
    rotary = rotary_tables(head_width=8, context=32)
    q, k = torch.randn(2, 8)
    turned_q, turned_k = rotary(q.expand(1, 1, 32, 8))[0, 0], rotary(k.expand(1, 1, 32, 8))[0, 0]
    scores = turned_q @ turned_k.T
    for distance in (0, 1, 5, 20):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)
    assert not torch.isclose(scores[0, 0], scores[0, 5])
    torch.testing.assert_close(turned_q[0], q)
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(32))


def test_rotary_tables_exist_once_and_are_not_saved() -> None:
    model = small_gpt(positions="rotary", layers=3)
    assert len(list(model.buffers())) == 2
    assert not [name for name in model.state_dict() if "rotary" in name]


def test_a_tied_head_is_the_embedding_also_if_memory_comes_later() -> None:
    for model in (small_gpt(), BERT(BERTSettings(layers=1, width=32))):
        output = model.head.output if isinstance(model, GPT) else model.head.decoder
        assert output.weight is model.embedding.token.weight
    with torch.device("meta"):
        deferred = small_gpt()
    assert deferred.head.output.weight is deferred.embedding.token.weight
    materialise(deferred, torch.device("cpu"))
    deferred.init_weights()
    assert deferred.head.output.weight is deferred.embedding.token.weight
    untied = small_gpt(tied=False)
    assert not torch.equal(untied.head.output.weight, untied.embedding.token.weight)


def test_residual_projections_start_smaller_with_depth() -> None:
    model = small_gpt(layers=8, width=128, heads=4)
    for block in model.blocks:
        assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
        assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
        assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_norms_compute_in_float32_or_wider_under_autocast(kind: type[torch.nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = kind(64, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    # A large offset: in bfloat16 the mean of squares would lose the signal.
    x = (torch.randn(8, 64) + 30).to(dtype)
    if dtype == torch.float64:
        norm.double()
    wide = torch.promote_types(dtype, torch.float32)
    function = F.layer_norm if kind is LayerNorm else F.rms_norm
    parameters = [parameter.to(wide) for parameter in norm.parameters()]
    expected = function(x.to(wide), (64,), *parameters, eps=1e-5).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = norm(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_bfloat16_weights_do_not_narrow_the_norms() -> None:
    norm = RMSNorm(64, eps=1e-5).bfloat16()
    x = torch.randn(8, 64)
    assert torch.equal(norm(x), F.rms_norm(x, (64,), torch.ones(64), eps=1e-5))


def test_the_loss_is_float32_under_autocast() -> None:
    model = small_gpt()
    tokens = torch.randint(0, 50, (2, 16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens).dtype == torch.bfloat16
        assert model(tokens, tokens).loss_sum.dtype == torch.float32


def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers() -> None:
    for model in (small_gpt(), small_gpt(positions="rotary"), BERT(BERTSettings(layers=1, width=32, context=16))):
        with pytest.raises(InputError, match=r"17 tokens.*at most 16"):
            model(torch.zeros(1, 17, dtype=torch.long))


def test_the_blocks_are_all_there_is_between_embedding_and_head() -> None:
    model = small_gpt(positions="rotary")
    assert [name for name, _ in model.named_children()] == ["embedding", "blocks", "head"]
    tokens = torch.randint(0, 50, (1, 16))
    x = model.embedding(tokens)
    for block in model.blocks:
        x = block(x)
    assert torch.equal(model.head(x, tokens).loss_sum, model(tokens, tokens).loss_sum)


def test_an_unused_pooler_waits_for_no_gradient() -> None:
    model = BERT(BERTSettings(layers=1, width=32, pooler=True))
    tokens = torch.randint(0, 256, (1, 16))
    model(tokens, tokens).loss_sum.backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None
    ]
    assert without == []
