"""Multi-head latent attention, as DeepSeek-V2 and V3 have it.

Keys and values of all heads are made from one narrow vector for each token, which is all that has to be kept of the
token later on; queries may come from a narrow vector too. What was squeezed like that cannot be turned by rotary
positions without undoing it, so the position has a part of its own: some numbers of each query, and one key that all
heads share.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gradus.models.documents import given
from gradus.models.layers import RMSNorm, Rotary, attend


class LatentAttention(nn.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        *,
        query_rank: int | None,
        kv_rank: int,
        plain_width: int,
        rotary_width: int,
        value_width: int,
        rotary: Rotary,
        norm_eps: float,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.parts = (plain_width, rotary_width)  # of a head
        self.kv_rank = kv_rank
        self.dropout = dropout
        self.rotary = rotary
        self.attend = attend  # replaced where the sequence is split over ranks
        head_width = plain_width + rotary_width
        if query_rank is None:
            self.q_down, self.q_norm = None, None
        else:
            self.q_down = nn.Linear(width, query_rank, bias=bias)
            self.q_norm = RMSNorm(query_rank, eps=norm_eps)
        # Rows of these two come head by head, so that any share of the heads is attention of its own.
        self.q_up = nn.Linear(query_rank or width, heads * head_width, bias=bias)
        self.kv_up = nn.Linear(kv_rank, heads * (plain_width + value_width), bias=bias)
        self.kv_down = nn.Linear(width, kv_rank + rotary_width, bias=bias)
        self.kv_norm = RMSNorm(kv_rank, eps=norm_eps)
        self.out = nn.Linear(heads * value_width, width, bias=bias)

    def forward(self, x_btd: Tensor, documents: Tensor | None = None) -> Tensor:
        plain_width, rotary_width = self.parts
        narrow = x_btd if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x_btd))
        q_bhtd = self.q_up(narrow).unflatten(-1, (-1, plain_width + rotary_width)).transpose(1, 2)
        q_plain, q_rotary = q_bhtd.split([plain_width, rotary_width], dim=-1)

        latent_btr, shared_btd = self.kv_down(x_btd).split([self.kv_rank, rotary_width], dim=-1)
        kv_bhtd = self.kv_up(self.kv_norm(latent_btr)).unflatten(-1, (q_bhtd.shape[1], -1)).transpose(1, 2)
        k_plain, v = kv_bhtd.split([plain_width, kv_bhtd.shape[-1] - plain_width], dim=-1)
        k_rotary = self.rotary(shared_btd.unsqueeze(1), documents).expand(-1, q_bhtd.shape[1], -1, -1)

        q = torch.cat((q_plain, self.rotary(q_rotary, documents)), dim=-1)
        k = torch.cat((k_plain, k_rotary), dim=-1)
        dropout = self.dropout if self.training else 0.0
        mixed_bhtd = self.attend(q, k, v, causal=True, dropout=dropout, **given(documents_bt=documents))
        mixed_btd: Tensor = self.out(mixed_bhtd.transpose(1, 2).flatten(2))
        return mixed_btd
