"""Documents: several texts in one sequence, each of which sees itself alone and begins at position 0.

`documents` [batch, tokens] has the number of the document of each token; those of a document are next to each other.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

FLEX_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FLEX_NARROWEST = 16  # numbers in a head (torch/_inductor/kernel/flex/flex_attention.py, torch 2.13)
FLEX_WIDEST_BYTES = 512  # of a head: 192 numbers of float32 do not fit the shared memory of an H200 (torch 2.11)


def given(**named: Tensor | None) -> dict[str, Tensor]:
    """What there is of it. Without documents, parts of a model are called as if there were no such thing."""
    return {name: value for name, value in named.items() if value is not None}


def positions_in(documents_bt: Tensor) -> Tensor:
    """The position of each token in its document."""
    places_t = torch.arange(documents_bt.shape[1], device=documents_bt.device)
    begins = documents_bt[:, 1:] != documents_bt[:, :-1]
    starts_bt = F.pad(torch.where(begins, places_t[1:], 0), (1, 0))
    return places_t - starts_bt.cummax(dim=1).values


def attend_inside(
    q_bhtd: Tensor, k_bhtd: Tensor, v_bhtd: Tensor, documents_bt: Tensor, *, causal: bool, dropout: float
) -> Tensor:
    """Softmax attention of each token to those of its own document; if causal, to those before it and itself."""
    if q_bhtd.device.type == "cuda" and flex_can(q_bhtd, v_bhtd, dropout):
        # By itself it would compute all scores at once; inside a compiled block it is compiled with it.
        attend = _attend_blocks if torch.compiler.is_compiling() else _compiled()
        mixed: Tensor = attend(q_bhtd, k_bhtd, v_bhtd, documents_bt, causal)
        return mixed
    visible_b1tt = (documents_bt.unsqueeze(-1) == documents_bt.unsqueeze(-2)).unsqueeze(1)
    if causal:
        visible_b1tt = visible_b1tt.tril()
    grouped = k_bhtd.shape[1] != q_bhtd.shape[1]
    return F.scaled_dot_product_attention(q_bhtd, k_bhtd, v_bhtd, visible_b1tt, dropout_p=dropout, enable_gqa=grouped)


def flex_can(q_bhtd: Tensor, v_bhtd: Tensor, dropout: float) -> bool:
    """Whether a GPU computes it with flex_attention, which keeps no mask and leaves out what nobody sees."""
    narrow, wide = sorted((q_bhtd.shape[-1], v_bhtd.shape[-1]))
    fits = narrow >= FLEX_NARROWEST and wide * q_bhtd.element_size() <= FLEX_WIDEST_BYTES
    return not dropout and fits and q_bhtd.dtype == v_bhtd.dtype and q_bhtd.dtype in FLEX_DTYPES


def _attend_blocks(q: Tensor, k: Tensor, v: Tensor, documents_bt: Tensor, causal: bool) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def visible(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = documents_bt[sample, query] == documents_bt[sample, key]
        return same & (query >= key) if causal else same

    samples, length = documents_bt.shape
    mask = create_block_mask(visible, samples, None, length, length, device=q.device)
    mixed: Any = flex_attention(q, k, v, block_mask=mask, enable_gqa=k.shape[1] != q.shape[1])
    return mixed  # type: ignore[no-any-return]


@cache
def _compiled() -> Any:
    # Of a length that is not known, torch 2.11 cannot compile the blocks of the mask.
    return torch.compile(_attend_blocks, dynamic=False)
