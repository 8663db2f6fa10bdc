"""Mixture of experts: in place of one MLP several, of which a router chooses a few for each token.

The experts' weights are stacked, [experts, ...], so that they can be spread over ranks along the first dimension.
Tokens are sorted by expert and sent through all of them at once. No token is dropped unless the settings have a
capacity: then an expert takes of each sequence, in the order of its tokens, at most `capacity_factor` times its even
share. It is counted for each sequence, and not for each batch, so that it does not matter how a batch is cut up, and
no token depends on later ones.

Experts are kept equally busy by a loss, `experts × Σ (share of choices × mean score)`, which is 1 at best; or by a bias
that is added to the scores for choosing only, and moves after each step towards the experts with too little to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # private, as is all of FakeTensorMode

from gradus.models.layers import widened

GROUPED_ALIGNMENT = 8  # numbers of 16 bits in the 16 bytes that grouped matrix multiplication wants rows to align to


class Routing(NamedTuple):
    chosen_btk: Tensor  # numbers of experts
    weights_btk: Tensor  # how much each of them adds to the token's output
    scores_bte: Tensor  # of all experts; they add up to 1


class Router(nn.Module):
    """Scores every expert for every token, in float32 or wider, and chooses the best."""

    bias: Tensor | None

    def __init__(
        self,
        width: int,
        experts: int,
        per_token: int,
        *,
        scores: Literal["softmax", "sigmoid"],
        scale: float,
        biased: bool,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.per_token = per_token
        self.scores = scores
        self.scale = scale
        self.weight = nn.Parameter(torch.empty(experts, width))
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("bias", torch.zeros(experts, dtype=dtype) if biased else None)

    def forward(self, x_btd: Tensor) -> Routing:
        device = x_btd.device
        with torch.autocast(device.type, enabled=False) if _autocasts(device) else nullcontext():
            logits_bte = F.linear(widened(x_btd), widened(self.weight))
            raw_bte = logits_bte.softmax(-1) if self.scores == "softmax" else logits_bte.sigmoid()
            preferred_bte = raw_bte.detach() if self.bias is None else raw_bte.detach() + self.bias
            chosen_btk = preferred_bte.topk(self.per_token, dim=-1).indices
            weights_btk = raw_bte.gather(-1, chosen_btk)
            if self.per_token > 1:  # a single weight must stay a score: as a share it would be 1, and teach nothing
                weights_btk = weights_btk / weights_btk.sum(-1, keepdim=True)
            scores_bte = raw_bte if self.scores == "softmax" else raw_bte / raw_bte.sum(-1, keepdim=True)
        return Routing(chosen_btk, weights_btk * self.scale, scores_bte)

    def reset_bias(self) -> None:
        if self.bias is not None:
            self.bias.zero_()


class Experts(nn.Module):
    """The weights of all experts, or of those that this rank has, as three or two stacked matrices without biases."""

    def __init__(self, experts: int, width: int, inner: int, activation: str) -> None:
        super().__init__()
        self.activation = activation
        self.local: Callable[[Tensor], Tensor] = _itself  # replaced where experts are spread over ranks
        self.gate = nn.Parameter(torch.empty(experts, inner, width)) if activation == "swiglu" else None
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x_md: Tensor, counts_e: Tensor) -> Tensor:
        """Each row through its expert: the first `counts_e[0]` rows through expert 0, and so on."""
        dtype = torch.get_autocast_dtype(x_md.device.type) if _autocasts(x_md.device) else x_md.dtype
        x_md = x_md.to(dtype)
        gate, up, down = (None if w is None else self.local(w).to(dtype) for w in (self.gate, self.up, self.down))
        assert up is not None
        assert down is not None
        times = _grouped_product(counts_e) if _groups(x_md, up) else _looped_product(_sizes(counts_e, len(x_md)))
        inner = times(x_md, up)
        if gate is not None:
            return times(F.silu(times(x_md, gate)) * inner, down)
        return times(F.gelu(inner, approximate="tanh" if self.activation == "gelu-tanh" else "none"), down)


class MixtureOfExperts(nn.Module):
    """Takes the place of an MLP in a block."""

    load: Tensor
    statistics = ("load",)  # counted in forward, and not read there
    eager = True  # not for a compiler: how many tokens an expert gets is known only when they are there

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: nn.Module | None,
        *,
        capacity_factor: float | None,
        balance_weight: float | None,  # of the loss; None: no loss
        balance_rate: float | None,  # of the bias; None: no bias
    ) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared
        self.capacity_factor = capacity_factor
        self.balance_weight = balance_weight
        self.balance_rate = balance_rate
        self.counting = False  # whether choices are counted; not while evaluating, or computing once more in backward
        self.real_samples: int | None = None  # so many first samples are no padding; None: all
        # Replaced where ranks share the experts, and where they have other tokens of the same batch.
        self.spread: Callable[[Experts, Tensor, Tensor], Tensor] | None = None
        self.sum_over_ranks: Callable[[Tensor], Tensor] = _itself
        self._collected: list[tuple[MixtureOfExperts, Routing]] | None = None
        # How often each expert was chosen since the last optimizer step and, as its last number, how often in vain.
        self.register_buffer("load", torch.zeros(router.experts + 1, dtype=torch.int64), persistent=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        routing = self.router(x_btd)
        chosen = routing.chosen_btk if self.capacity_factor is None else self._within_capacity(routing.chosen_btk)
        if self.counting:
            self._count(routing, chosen)
        if self._collected is not None:
            self._collected.append((self, routing))
        y_btd = self._chosen_experts(x_btd.flatten(0, -2), chosen.flatten(0, -2), routing.weights_btk.flatten(0, -2))
        y_btd = y_btd.view_as(x_btd)
        return y_btd if self.shared is None else y_btd + self.shared(x_btd)

    def _chosen_experts(self, x_nd: Tensor, chosen_nk: Tensor, weights_nk: Tensor) -> Tensor:
        count, (tokens, per_token) = self.router.experts, chosen_nk.shape
        chosen = chosen_nk.flatten()
        order = chosen.argsort(stable=True)
        experts = torch.arange(count + 1, device=chosen.device)
        bounds = torch.searchsorted(chosen[order], experts)
        if self.capacity_factor is not None:
            order = order[: _number(bounds[-1], len(order))]  # what was dropped comes last
        sent_md = x_nd.index_select(0, order // per_token)
        compute = self.experts if self.spread is None else self._spread_experts
        done_md = compute(sent_md, bounds.diff())
        # Back in the order of tokens, and added up in the order of choices: no matter who computed what.
        done_nkd = done_md.new_zeros(tokens * per_token, x_nd.shape[-1]).index_copy(0, order, done_md)
        return (done_nkd.view(tokens, per_token, -1) * weights_nk.unsqueeze(-1)).sum(1).to(x_nd.dtype)

    def _spread_experts(self, x_md: Tensor, counts_e: Tensor) -> Tensor:
        assert self.spread is not None
        return self.spread(self.experts, x_md, counts_e)

    def _within_capacity(self, chosen_btk: Tensor) -> Tensor:
        """The choices, with an expert that does not exist in place of those above capacity."""
        assert self.capacity_factor is not None
        count = self.router.experts
        chosen_bm = chosen_btk.flatten(1)
        capacity = math.ceil(self.capacity_factor * chosen_bm.shape[1] / count)
        sorted_bm, order_bm = chosen_bm.sort(dim=1, stable=True)
        experts = torch.arange(count, device=chosen_bm.device).expand(len(chosen_bm), -1).contiguous()
        first_be = torch.searchsorted(sorted_bm, experts)
        turn_bm = torch.arange(chosen_bm.shape[1], device=chosen_bm.device) - first_be.gather(1, sorted_bm)
        kept_bm = torch.where(turn_bm < capacity, sorted_bm, count)
        return torch.empty_like(chosen_bm).scatter_(1, order_bm, kept_bm).view_as(chosen_btk)

    @torch.no_grad()
    def _count(self, routing: Routing, chosen_btk: Tensor) -> None:
        wanted = routing.chosen_btk[: self.real_samples].flatten()
        self.load[:-1].scatter_add_(0, wanted, torch.ones_like(wanted))
        self.load[-1] += (chosen_btk[: self.real_samples] == self.router.experts).sum()

    def balance_loss(self, routing: Routing) -> Tensor:
        """What this layer adds to the mean loss: its weight if the tokens of all ranks choose alike, more if not."""
        assert self.balance_weight is not None
        count = self.router.experts
        scores_ne = routing.scores_bte[: self.real_samples].flatten(0, -2)
        wanted = routing.chosen_btk[: self.real_samples].flatten()
        wanted_e = scores_ne.new_zeros(count).scatter_add(0, wanted, torch.ones_like(wanted, dtype=scores_ne.dtype))
        tokens = scores_ne.new_full((1,), len(scores_ne))
        sums = self.sum_over_ranks(torch.cat((scores_ne.sum(0), wanted_e, tokens)))
        scores, choices, total = sums[:count], sums[count:-1].detach(), sums[-1].detach()
        return self.balance_weight * count * (choices / (total * self.router.per_token) * scores / total).sum()

    @torch.no_grad()
    def settle(self, load: Tensor) -> None:
        """After an optimizer step, with the load of the whole step on all ranks: move the bias, and count anew."""
        if self.balance_rate is not None:
            assert self.router.bias is not None
            wanted = load[:-1].double()
            self.router.bias += self.balance_rate * torch.sign(wanted.mean() - wanted).to(self.router.bias.dtype)
        self.load.zero_()

    def fill_tables(self) -> None:
        self.load.zero_()


@contextmanager
def collected_routings(blocks: nn.Module) -> Iterator[list[tuple[MixtureOfExperts, Routing]]]:
    """Inside, mixtures that are balanced by a loss add to the list what they have chosen while they are trained.

    Losses are made of it outside of the blocks: a block that is computed once more in backward has to do the same as
    the first time, and must not leave a second loss, and all of its graph, behind.
    """
    balanced = [m for m in blocks.modules() if isinstance(m, MixtureOfExperts) and m.balance_weight is not None]
    collected: list[tuple[MixtureOfExperts, Routing]] = []
    for mixture in balanced:
        mixture._collected = collected if mixture.training else None
    try:
        yield collected
    finally:
        for mixture in balanced:
            mixture._collected = None


def _sizes(counts_e: Tensor, rows: int) -> list[int]:
    """How many rows each expert gets; here the host waits for the device. Without values, all get the same."""
    if _has_values(counts_e):
        return [int(count) for count in counts_e.tolist()]
    return [rows // len(counts_e) + (number < rows % len(counts_e)) for number in range(len(counts_e))]


def _number(value: Tensor, otherwise: int) -> int:
    return int(value) if _has_values(value) else otherwise


def _has_values(x: Tensor) -> bool:
    """Not where a model is only measured: on the meta device, or as fake tensors."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def _itself(x: Tensor) -> Tensor:
    return x


def _autocasts(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def _groups(x_md: Tensor, stacked: Tensor) -> bool:
    """Whether one kernel can multiply all groups: bf16 on a GPU that has it; elsewhere a loop is exact and as good."""
    if x_md.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    aligned = all(size % GROUPED_ALIGNMENT == 0 for size in stacked.shape[1:])
    if isinstance(x_md, FakeTensor):  # measured for a GPU that is not here
        capability = getattr(x_md.fake_mode, "capability", (0, 0))
    else:
        capability = torch.cuda.get_device_capability(x_md.device) if x_md.device.type == "cuda" else (0, 0)
    return aligned and capability >= (9, 0)


def _grouped_product(counts_e: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    ends = counts_e.cumsum(0).to(torch.int32)

    def times(x_md: Tensor, stacked: Tensor) -> Tensor:
        y: Tensor = F.grouped_mm(x_md, stacked.transpose(-2, -1), offs=ends)
        return y

    return times


def _looped_product(sizes: list[int]) -> Callable[[Tensor, Tensor], Tensor]:
    def times(x_md: Tensor, stacked: Tensor) -> Tensor:
        # An expert without tokens takes part with no rows: its gradient is zero, and not missing.
        parts = torch.split(x_md, sizes)
        return torch.cat([x @ w.T for x, w in zip(parts, stacked.unbind(), strict=True)])

    return times
