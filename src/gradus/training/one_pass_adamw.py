"""AdamW in one pass: reads each gradient once, as narrow as backward made it, and writes weights in both widths.

With narrow weights an update would otherwise go over memory five times: gradients are widened, scaled by clipping and
applied, and the new weights are rounded. One kernel for all tensors does it with 28 bytes for each parameter in
place of 52. Its state is that of torch's AdamW; or its moments are in bf16 (narrow_moments.py), which leaves 20.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradus.training.narrow_moments import NarrowMomentsAdamW

PART, BLOCK, WARPS = 8192, 1024, 8  # numbers of a program, and at once: four to a thread


@triton.jit  # type: ignore[untyped-decorator]
def _read(pointer, at, size, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Without a mask, sixteen bytes at a time."""
    return tl.load(pointer + at) if WHOLE else tl.load(pointer + at, mask=at < size, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _write(pointer, at, size, values, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    if WHOLE:
        tl.store(pointer + at, values)
    else:
        tl.store(pointer + at, values, mask=at < size)


@triton.jit
def _chance(at, step):  # type: ignore[no-untyped-def]
    """As narrow_moments.py has it."""
    bits = at.to(tl.uint32) + step.to(tl.uint32) * 0x9E3779B9
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _rounded(values, noise):  # type: ignore[no-untyped-def]
    """Up or down to what bf16 has. What is not finite stays so."""
    bits = values.to(tl.int32, bitcast=True)
    up_or_down = ((bits + noise.to(tl.int32)) & -65536).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, values, up_or_down)


@triton.jit  # type: ignore[untyped-decorator]
def _update_part(  # type: ignore[no-untyped-def]
    gradients,
    weights,
    firsts,
    seconds,
    narrow,
    start,
    size,
    factor,
    lr,
    decay,
    left1,
    left2,
    correction1,
    correction2,
    eps,
    step,
    STATE: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_NARROW: tl.constexpr,
    WHOLE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for block in range(PART // BLOCK):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        gradient = _read(gradients, at, size, WHOLE).to(tl.float32) * factor
        weight = _read(weights, at, size, WHOLE)
        first = (1 - left1) * _read(firsts, at, size, WHOLE).to(tl.float32) + left1 * gradient
        second = (1 - left2) * _read(seconds, at, size, WHOLE).to(tl.float32) + left2 * gradient * gradient
        weight -= lr * decay * weight
        weight -= lr / correction1 * first / (tl.sqrt(second) / tl.sqrt(correction2) + eps)
        if STATE.primitive_bitwidth < 32:
            noise = _chance(at, step)
            first, second = _rounded(first, noise >> 16), _rounded(second, noise & 0xFFFF)
        _write(weights, at, size, weight, WHOLE)
        _write(firsts, at, size, first.to(STATE), WHOLE)
        _write(seconds, at, size, second.to(STATE), WHOLE)
        if HAS_NARROW:
            _write(narrow, at, size, weight.to(NARROW), WHOLE)


@triton.jit  # type: ignore[untyped-decorator]
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
    STATE: tl.constexpr,
    NARROW: tl.constexpr,
    HAS_NARROW: tl.constexpr,
    ALIGNED: tl.constexpr,
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
    # Without knowing that tensors begin at multiples of 16 bytes, the compiler reads one number at a time.
    gradients = tl.multiple_of(tl.load(addresses).to(tl.pointer_type(GRADIENT)), ALIGNED)
    weights = tl.multiple_of(tl.load(addresses + tensors).to(tl.pointer_type(tl.float32)), ALIGNED)
    firsts = tl.multiple_of(tl.load(addresses + 2 * tensors).to(tl.pointer_type(STATE)), ALIGNED)
    seconds = tl.multiple_of(tl.load(addresses + 3 * tensors).to(tl.pointer_type(STATE)), ALIGNED)
    step = tl.load(tl.load(addresses + 4 * tensors).to(tl.pointer_type(tl.float32)))
    narrow = tl.multiple_of(tl.load(addresses + 5 * tensors).to(tl.pointer_type(NARROW)), ALIGNED)
    correction1 = (1 - tl.exp((step * log_beta1).to(tl.float64))).to(tl.float32)
    correction2 = (1 - tl.exp((step * log_beta2).to(tl.float64))).to(tl.float32)
    lr = tl.load(lr_pointer)
    factor = tl.load(factor_pointer)
    if start + PART <= size:
        _update_part(
            gradients,
            weights,
            firsts,
            seconds,
            narrow,
            start,
            size,
            factor,
            lr,
            decay,
            left1,
            left2,
            correction1,
            correction2,
            eps,
            step,
            STATE,
            NARROW,
            HAS_NARROW,
            True,
            PART,
            BLOCK,
        )
    else:
        _update_part(
            gradients,
            weights,
            firsts,
            seconds,
            narrow,
            start,
            size,
            factor,
            lr,
            decay,
            left1,
            left2,
            correction1,
            correction2,
            eps,
            step,
            STATE,
            NARROW,
            HAS_NARROW,
            False,
            PART,
            BLOCK,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _squares(  # type: ignore[no-untyped-def]
    addresses,
    sizes,
    owners,
    starts,
    sums,
    GRADIENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the squares of a part of one gradient."""
    part = tl.program_id(0)
    owner = tl.load(owners + part)
    start = tl.load(starts + part).to(tl.int64) * PART
    size = tl.load(sizes + owner)
    gradients = tl.multiple_of(tl.load(addresses + owner).to(tl.pointer_type(GRADIENT)), ALIGNED)
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(PART // BLOCK):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        gradient = tl.load(gradients + at, mask=at < size, other=0.0).to(tl.float32)
        total += gradient * gradient
    tl.store(sums + part, tl.sum(total, 0))


_torchs = import_module("torch.optim.optimizer")  # a name that torch takes away from torch.optim
_NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class _Table:
    """Tensors of one parameter group that are updated alike, as the kernel finds them."""

    gradient_dtype: torch.dtype
    state_dtype: torch.dtype  # of both moments
    narrow_dtype: torch.dtype | None  # of the copies, if they have such
    steps: list[Tensor]

    def __init__(self, group: int, parameters: Sequence[Tensor]) -> None:
        device, self.parameters, self.group = parameters[0].device, parameters, group
        self.numbers = sizes = [parameter.numel() for parameter in parameters]
        parts = [(number, start) for number, size in enumerate(sizes) for start in range(math.ceil(size / PART))]
        self.sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
        self.owners = torch.tensor([owner for owner, _ in parts], dtype=torch.int32, device=device)
        self.starts = torch.tensor([start for _, start in parts], dtype=torch.int32, device=device)
        self.addresses = torch.empty(6, len(sizes), dtype=torch.int64, device=device)
        self.lr = torch.empty((), dtype=torch.float32, device=device)
        self.sums = torch.empty(len(parts), dtype=torch.float32, device=device)
        self.known: list[list[int]] = []  # what `addresses` holds, or will hold when a recording has ended

    def point_at(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """While a graph is recorded nothing runs, so that addresses are written when it has ended (`settle`)."""
        found = [[tensor.data_ptr() for tensor in column] for column in columns]
        if found != self.known:
            self.known = found
            if not _recording(self.lr):
                self.settle()

    @property
    def aligned(self) -> bool:
        return all(address % 16 == 0 for number, column in enumerate(self.known) if number != 4 for address in column)

    def settle(self) -> None:
        known = torch.tensor(self.known, dtype=torch.int64)
        self.addresses.copy_(known.pin_memory() if self.addresses.is_cuda else known, non_blocking=True)


class OnePassAdamW(torch.optim.AdamW):
    """torch's fused AdamW, and `update`, which does the same to parameters that a model has narrow copies of."""

    takes_narrow_gradients = True

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, lr=lr, fused=True, **options)
        self._tables: dict[tuple[int, bool, bool], _Table] = {}

    @classmethod
    def take_over(cls, optimizer: torch.optim.AdamW) -> None:
        """Turn torch's AdamW into this, in place: whoever holds it, such as a scheduler, holds it still."""
        optimizer.__class__ = cls
        assert isinstance(optimizer, cls)
        optimizer._tables = {}
        for settings in (optimizer.defaults, *optimizer.param_groups):
            settings.update(fused=True, foreach=False)  # so that torch's own `step` finds its numbers of steps
        optimizer._step_supports_amp_scaling = True
        for parameter, state in optimizer.state.items():
            if state:
                state["step"] = state["step"].to(parameter.device, torch.float32)

    @torch.no_grad()
    def update(self, gradients: Mapping[Tensor, Tensor], narrow: Mapping[Tensor, Tensor], factor: Tensor) -> None:
        """Apply `gradients`, each times `factor`, and round the new weights into those that are `narrow`."""
        if self._has_hooks:
            self._step_with_hooks(gradients, narrow, factor)
            return
        self._opt_called = True  # a scheduler of torch's asks for it
        for table in self._tables_of(gradients, narrow):
            self._update(table, factor)

    @torch.no_grad()
    def norm(self, gradients: Mapping[Tensor, Tensor], narrow: Mapping[Tensor, Tensor]) -> Tensor:
        """Of all gradients as one, in fp32. torch's kernel for many tensors takes four times as long for 16 bits."""
        sums = []
        for table in self._tables_of(gradients, narrow):
            _squares[(len(table.owners),)](
                table.addresses,
                table.sizes,
                table.owners,
                table.starts,
                table.sums,
                GRADIENT=_NAMES[table.gradient_dtype],
                ALIGNED=16 if table.aligned else 1,
                PART=PART,
                BLOCK=BLOCK,
                num_warps=WARPS,
            )
            sums.append(table.sums.sum())
        if not sums:
            return torch.zeros((), device=self.param_groups[0]["params"][0].device)
        return torch.stack(sums).sum().sqrt()

    def _tables_of(self, gradients: Mapping[Tensor, Tensor], narrow: Mapping[Tensor, Tensor]) -> list[_Table]:
        """Those of the parameters that have a gradient, each filled with where their tensors are now."""
        found = []
        for number, group in enumerate(self.param_groups):
            trained = [p for p in group["params"] if p in gradients]
            for alike in ([p for p in trained if p in narrow], [p for p in trained if p not in narrow]):
                if alike:
                    found.append(self._table(number, alike, gradients, narrow))
        return found

    def _table(
        self, number: int, trained: list[Tensor], gradients: Mapping[Tensor, Tensor], narrow: Mapping[Tensor, Tensor]
    ) -> _Table:
        states, has_narrow = [self._state_of(parameter) for parameter in trained], trained[0] in narrow
        # A recorded graph has a table of its own: steps between its launches have their gradients elsewhere.
        key = (number, has_narrow, _recording(trained[0]))
        table = self._tables.get(key)
        if table is None or table.numbers != [p.numel() for p in trained]:
            table = self._tables[key] = _Table(number, trained)
        columns = [[state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step")]
        mine = [gradients[p] for p in trained]
        copies = [narrow[p] if has_narrow else p for p in trained]
        assert all(gradient.dtype == mine[0].dtype for gradient in mine), "one kernel reads them all"
        assert all(moment.dtype == columns[0][0].dtype for column in columns[:2] for moment in column)
        table.gradient_dtype = mine[0].dtype
        table.state_dtype = columns[0][0].dtype
        table.narrow_dtype = copies[0].dtype if has_narrow else None
        table.steps = columns[-1]
        table.point_at([mine, trained, *columns, copies])
        return table

    def _update(self, table: _Table, factor: Tensor) -> None:
        torch._foreach_add_(table.steps, 1)
        group = self.param_groups[table.group]
        if not _recording(table.lr):
            table.lr.fill_(group["lr"])
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
            *(math.log(beta) if beta else -math.inf for beta in (beta1, beta2)),
            group["eps"],
            group["weight_decay"],
            len(table.numbers),
            GRADIENT=_NAMES[table.gradient_dtype],
            STATE=_NAMES[table.state_dtype],
            NARROW=_NAMES[table.narrow_dtype or torch.float32],
            HAS_NARROW=table.narrow_dtype is not None,
            ALIGNED=16 if table.aligned else 1,
            PART=PART,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )

    @property
    def _has_hooks(self) -> bool:
        of_all = (getattr(_torchs, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post"))
        return any((self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks, *of_all))

    def _step_with_hooks(
        self, gradients: Mapping[Tensor, Tensor], narrow: Mapping[Tensor, Tensor], factor: Tensor
    ) -> None:
        """Hooks upon a step expect gradients where torch has them."""
        for parameter, gradient in gradients.items():
            parameter.grad = gradient.to(parameter.dtype) * factor
        self.step()
        torch._foreach_copy_(list(narrow.values()), list(narrow.keys()))

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= self._new_state(parameter)
        elif not state["step"].is_cuda and parameter.is_cuda:  # of a state that an AdamW made which is not fused
            state["step"] = state["step"].to(parameter.device, torch.float32)
        return state

    def _new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """As torch's fused AdamW begins."""
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }

    def set_rates(self) -> None:
        """The groups' learning rates, for an update that was recorded."""
        for (number, _, recorded), table in self._tables.items():
            if recorded:
                table.lr.fill_(self.param_groups[number]["lr"])

    def expect_recording(self) -> None:
        """Before an update is recorded, which cannot make tables: one for each that there is."""
        for (number, narrow, recorded), table in list(self._tables.items()):
            if not recorded:
                self._tables[number, narrow, True] = _Table(number, table.parameters)

    def settle(self) -> None:
        """After an update was recorded."""
        for (_, _, recorded), table in self._tables.items():
            if recorded:
                table.settle()


class OnePassNarrowMoments(NarrowMomentsAdamW, OnePassAdamW):
    """The same with moments in bf16. Its `step` is that of the first: the kernel is for narrow weights."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, lr=lr, **options)
        self._step_supports_amp_scaling = False  # which is for torch's kernels
        for settings in (self.defaults, *self.param_groups):
            settings["fused"] = None  # so are they


def _recording(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()
