"""Latent attention makes all keys and values from one narrow vector, and keeps the position in a part of its own."""

from __future__ import annotations

import math

import pytest
import torch

from gradus.models.latent_attention import LatentAttention
from gradus.models.layers import Rotary, attend

WIDTH, HEADS, PLAIN, TURNED, VALUE, QUERY_RANK, KV_RANK, LENGTH = 12, 3, 5, 4, 7, 6, 8, 9


def attention(query_rank: int | None = QUERY_RANK) -> LatentAttention:
    torch.manual_seed(2)
    rotary = Rotary(TURNED, 32, 10_000.0)
    made = LatentAttention(
        WIDTH,
        HEADS,
        query_rank=query_rank,
        kv_rank=KV_RANK,
        plain_width=PLAIN,
        rotary_width=TURNED,
        value_width=VALUE,
        rotary=rotary,
        norm_eps=1e-6,
    )
    made.double()
    rotary.fill_tables()  # in float64
    return made


def tokens() -> torch.Tensor:
    return torch.randn(2, LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("query_rank", [None, QUERY_RANK])
def test_it_is_the_published_formula_head_by_head(query_rank):
    of, x = attention(query_rank), tokens()
    narrow = x if of.q_down is None else rms(x @ of.q_down.weight.T)
    latent, shared = (x @ of.kv_down.weight.T).split([KV_RANK, TURNED], dim=-1)
    turned_key = of.rotary(shared.unsqueeze(1)).squeeze(1)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    mixed = []
    for head in range(HEADS):
        q = narrow @ of.q_up.weight.view(HEADS, PLAIN + TURNED, -1)[head].T
        kv = rms(latent) @ of.kv_up.weight.view(HEADS, PLAIN + VALUE, KV_RANK)[head].T
        turned_query = of.rotary(q[..., PLAIN:].unsqueeze(1)).squeeze(1)
        scores = q[..., :PLAIN] @ kv[..., :PLAIN].mT + turned_query @ turned_key.mT
        shares = (scores / math.sqrt(PLAIN + TURNED)).masked_fill(later, -math.inf).softmax(-1)
        mixed.append(shares @ kv[..., PLAIN:])
    expected = torch.cat(mixed, dim=-1) @ of.out.weight.T
    assert torch.allclose(of(x), expected, rtol=1e-10, atol=1e-12)


def test_a_token_sees_no_later_one():
    of, x = attention(), tokens()
    changed = x.clone()
    changed[:, -1] += 1.0
    assert torch.allclose(of(changed)[:, :-1], of(x)[:, :-1], rtol=1e-12, atol=1e-14)
    assert not torch.allclose(of(changed)[:, -1], of(x)[:, -1])


def test_only_distances_between_positions_matter():
    of, x = attention(), tokens()
    here = of(x)
    of.rotary.positions = lambda length, device: torch.arange(length) + 11
    assert torch.allclose(of(x), here, rtol=1e-9, atol=1e-12)
    of.rotary.positions = lambda length, device: 2 * torch.arange(length)
    assert not torch.allclose(of(x), here, rtol=1e-3)


def test_attention_itself_can_be_replaced_and_gets_a_key_for_each_head():
    of, seen = attention(), []

    def watched(q, k, v, *, causal, dropout):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), causal, dropout))
        return attend(q, k, v, causal=causal, dropout=dropout)

    of.attend = watched
    of(tokens())
    shape = (2, HEADS, LENGTH, PLAIN + TURNED)
    assert seen == [(shape, shape, (2, HEADS, LENGTH, VALUE), True, 0.0)]
