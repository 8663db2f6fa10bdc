"""AdamW in one pass: reads each gradient once, as narrow as backward made it, and writes weights in both widths.

With narrow weights an update would otherwise go over memory five times: gradients are widened, scaled by clipping and
applied, and the new weights are rounded. One kernel for all tensors does it with 28 bytes for each parameter in
place of 52. Its state is that of torch's AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

PART, BLOCK, WARPS = 8192, 1024, 8  # numbers of a program, and at once: four to a thread


@triton.jit
def _updated(gradient, weight, first, second, lr, decay, left1, left2, correction1, correction2, eps):  # type: ignore[no-untyped-def]
    weight -= lr * decay * weight
    first += left1 * (gradient - first)
    second += left2 * (gradient * gradient - second)
    weight -= lr / correction1 * first / (tl.sqrt(second) / tl.sqrt(correction2) + eps)
    return weight, first, second


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    addresses,
    sizes,
    owners,
    starts,
    lr_pointer,
    factor_pointer,
    left1,
    left2,
    log_beta1,
    log_beta2,
    eps,
    decay,
    tensors,
    GRADIENT: tl.constexpr,
    NARROW: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of one tensor. `addresses`: of gradients, weights, both moments, step numbers and narrow weights.

    Of each beta, what it leaves to 1, and its logarithm: numbers near 1 lose their digits in fp32.
    """
    part = tl.program_id(0)
    owner = tl.load(owners + part)
    start = tl.load(starts + part).to(tl.int64) * PART
    size = tl.load(sizes + owner)
    addresses += owner
    # Tensors begin at multiples of 16 bytes: without knowing it, the compiler reads one number at a time.
    gradients = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(GRADIENT)), 16)
    weights = tl.multiple_of(tl.load(addresses + tensors).to(tl.pointer_type(tl.float32)), 16)
    firsts = tl.multiple_of(tl.load(addresses + 2 * tensors).to(tl.pointer_type(tl.float32)), 16)
    seconds = tl.multiple_of(tl.load(addresses + 3 * tensors).to(tl.pointer_type(tl.float32)), 16)
    step = tl.load(tl.load(addresses + 4 * tensors).to(tl.pointer_type(tl.float32)))
    narrow = tl.multiple_of(tl.load(addresses + 5 * tensors).to(tl.pointer_type(NARROW)), 16)
    correction1 = (1 - tl.exp((step * log_beta1).to(tl.float64))).to(tl.float32)
    correction2 = (1 - tl.exp((step * log_beta2).to(tl.float64))).to(tl.float32)
    lr = tl.load(lr_pointer)
    factor = tl.load(factor_pointer)
    if start + PART <= size:  # without a mask, sixteen bytes at a time
        for block in range(PART // BLOCK):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            weight, first, second = _updated(
                tl.load(gradients + at).to(tl.float32) * factor,
                tl.load(weights + at),
                tl.load(firsts + at),
                tl.load(seconds + at),
                lr,
                decay,
                left1,
                left2,
                correction1,
                correction2,
                eps,
            )
            tl.store(weights + at, weight)
            tl.store(firsts + at, first)
            tl.store(seconds + at, second)
            tl.store(narrow + at, weight.to(NARROW))
    else:
        for block in range(PART // BLOCK):
            at = start + block * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            weight, first, second = _updated(
                tl.load(gradients + at, mask=inside, other=0.0).to(tl.float32) * factor,
                tl.load(weights + at, mask=inside, other=0.0),
                tl.load(firsts + at, mask=inside, other=0.0),
                tl.load(seconds + at, mask=inside, other=0.0),
                lr,
                decay,
                left1,
                left2,
                correction1,
                correction2,
                eps,
            )
            tl.store(weights + at, weight, mask=inside)
            tl.store(firsts + at, first, mask=inside)
            tl.store(seconds + at, second, mask=inside)
            tl.store(narrow + at, weight.to(NARROW), mask=inside)


_NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class _Table:
    """The tensors of one parameter group, as the kernel finds them."""

    def __init__(self, parameters: Sequence[Tensor], device: torch.device) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        parts = [(number, start) for number, size in enumerate(sizes) for start in range(math.ceil(size / PART))]
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self.owners = torch.tensor([owner for owner, _ in parts], dtype=torch.int32, device=device)
        self.starts = torch.tensor([start for _, start in parts], dtype=torch.int32, device=device)
        self.addresses = torch.empty(6, len(sizes), dtype=torch.int64, device=device)
        self.lr = torch.empty((), dtype=torch.float32, device=device)
        self.known: list[list[int]] = []  # what `addresses` holds, or will hold when a capture has ended

    def point_at(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """While a graph is captured nothing runs, so that the addresses are written when it has ended (`settle`)."""
        found = [[tensor.data_ptr() for tensor in column] for column in columns]
        if found == self.known:
            return
        self.known = found
        if not (self.addresses.is_cuda and torch.cuda.is_current_stream_capturing()):
            self.settle()

    def settle(self) -> None:
        self.addresses.copy_(torch.tensor(self.known, dtype=torch.int64))


class OnePassAdamW(torch.optim.AdamW):
    """torch's fused AdamW, and `update`, which does the same to parameters that a model has narrow copies of."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, lr=lr, fused=True, **options)
        self._tables: dict[int, _Table] = {}

    @torch.no_grad()
    def update(self, gradients: dict[Tensor, Tensor], narrow: dict[Tensor, Tensor], factor: Tensor) -> None:
        """Apply `gradients`, each times `factor`, and round the new weights into `narrow`."""
        for number, group in enumerate(self.param_groups):
            trained = [p for p in group["params"] if p in gradients]
            if trained:
                self._update_group(number, group, trained, gradients, narrow, factor)

    def _update_group(
        self,
        number: int,
        group: dict[str, Any],
        trained: list[nn.Parameter],
        gradients: dict[Tensor, Tensor],
        narrow: dict[Tensor, Tensor],
        factor: Tensor,
    ) -> None:
        for parameter in trained:
            if not self.state[parameter]:
                self.state[parameter] |= _new_state(parameter)
        states = [self.state[parameter] for parameter in trained]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        table = self._tables.get(number)
        if table is None or len(table.sizes) != len(trained):
            table = self._tables[number] = _Table(trained, trained[0].device)
        moments = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        mine = [gradients[p] for p in trained]
        copies = [narrow[p] for p in trained]
        table.point_at([mine, trained, *moments, steps, copies])
        self._set_rate(group, table)
        beta1, beta2 = group["betas"]
        _update[(len(table.owners),)](
            table.addresses,
            table.sizes,
            table.owners,
            table.starts,
            table.lr,
            factor,
            1 - beta1,
            1 - beta2,
            math.log(beta1),
            math.log(beta2),
            group["eps"],
            group["weight_decay"],
            len(trained),
            GRADIENT=_NAMES[mine[0].dtype],
            NARROW=_NAMES[copies[0].dtype],
            PART=PART,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )

    def set_rates(self) -> None:
        """The groups' learning rates, for an update that was captured in a graph."""
        for number, group in enumerate(self.param_groups):
            if number in self._tables:
                self._tables[number].lr.fill_(group["lr"])

    def settle(self) -> None:
        """After an update was captured."""
        for table in self._tables.values():
            table.settle()

    @staticmethod
    def _set_rate(group: dict[str, Any], table: _Table) -> None:
        if not (table.lr.is_cuda and torch.cuda.is_current_stream_capturing()):
            table.lr.fill_(group["lr"])


def _new_state(parameter: Tensor) -> dict[str, Tensor]:
    """As torch's fused AdamW begins."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }
