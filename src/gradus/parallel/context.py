"""context: sequences divided over ranks, and attention that sees the whole of them.

A sequence is cut into 2 × ways chunks, and each rank holds two of them: one from the head and its mirror image from the
tail. In causal attention a late token sees more than an early one; so every rank has as much to do. Where all tokens
see each other, the order does not matter, and it stays the same.

    ways 2:   chunk  0 1 2 3            ways 4:   chunk  0 1 2 3 4 5 6 7
              rank   0 1 1 0                      rank   0 1 2 3 3 2 1 0

Attention is the one place where tokens meet. Every rank has the queries of its own tokens, and either

- `gather` collects the keys and values of all ranks, and attends to them as one process would; or
- `ring` sends them round from rank to rank while attending to those at hand, with torch's own ring attention: no rank
  ever holds those of a whole sequence.

Everything else in a transformer treats each token by itself, and the loss is a sum over tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# Private, and still the way in: the public `context_parallel` replaces torch's attention in the whole process, and goes
# through rules of DTensor that leave out the CPU. These two are the ring itself, for any kernel.
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

from gradus.parallel.world import World
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan

SEQUENCE = 2  # the dimension of queries, keys and values (batch, head, token, width) that is divided
# What the backward of the CUDA kernel wants to know besides, as its forward returns it: lengths of packed sequences
# (there are none), and where random numbers stood (without dropout, none are drawn).
CUDA_EXTRAS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
WIDTH_STEP, WIDEST = 8, 256  # of a head in the CUDA kernel


def apply_context(model: nn.Module, world: World, plan: Plan) -> None:
    """Let the model, in place, take a part of each sequence in place of the whole.

    Its attention layers must have a function `attend(q, k, v, causal=, dropout=)`, and what knows positions a function
    `positions(length, device)`, as attributes: both are replaced.
    """
    ways = plan.mesh.context
    if ways == 1:
        return
    attention = [module for module in model.modules() if callable(vars(module).get("attend"))]
    positioned = [module for module in model.modules() if callable(vars(module).get("positions"))]
    if not attention or not positioned:
        missing = "has no attention layer" if not attention else "has nothing"
        what = "that could attend to the tokens of other ranks" if not attention else "that says where its tokens are"
        raise InputError(
            f"plan.mesh.context: found {ways}, but {type(model).__name__} {missing} {what}",
            hint="gpt and bert have both; for other models use plan.mesh.shard or plan.recompute",
            field="plan.mesh.context",
            found=ways,
            allowed=1,
        )
    mesh = world.submesh("context")
    # In collectives and kernels there is nothing for a compiler to fuse, and some of this it cannot trace.
    attend = torch.compiler.disable(_of_whole_sequences(_attention(plan, world.device, mesh)))  # type: ignore[no-untyped-call]
    for module in attention:
        setattr(module, "attend", attend)  # noqa: B010  (for mypy, modules hold tensors)
    for module in positioned:
        setattr(module, "positions", partial(positions_of, world.place.context, ways))  # noqa: B010


def _of_whole_sequences(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same attention, and a refusal of sequences that are several documents."""

    def checked(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, documents_bt: Tensor | None = None
    ) -> Tensor:
        if documents_bt is not None:
            raise InputError(
                "plan.mesh.context: the batch has several documents in a sequence, which ranks that share it do not "
                "keep apart",
                hint="use plan.mesh.context=1, or data without `documents`",
                field="plan.mesh.context",
                allowed=1,
            )
        return attend(q, k, v, causal=causal, dropout=dropout)

    return checked


def split_sequence(inputs: Any, world: World) -> Any:
    """Of the sequences of a batch, the tokens of this rank: dimension 1 of every tensor is divided."""
    ways = world.mesh.context
    if ways == 1:
        return inputs
    named = dict(inputs) if isinstance(inputs, Mapping) else {f"entry {i}": value for i, value in enumerate(inputs)}
    parts = {name: _part_of_entry(name, value, world) for name, value in named.items()}
    return parts if isinstance(inputs, Mapping) else tuple(parts.values())


def _part_of_entry(name: str, value: Any, world: World) -> Any:
    if not isinstance(value, Tensor):
        return value
    ways, shape = world.mesh.context, tuple(value.shape)
    if len(shape) < 2 or shape[1] % (2 * ways):
        what = f"sequences of {shape[1]} tokens" if len(shape) > 1 else "one value for each sample"
        raise InputError(
            f"plan.mesh.context: found {ways}, but {name} of the batch has {what} (shape {shape}). Allowed: sequences "
            f"of a multiple of {2 * ways} tokens, two chunks for each rank",
            hint="change data.context" if len(shape) > 1 else "use plan.mesh.context=1",
            field="plan.mesh.context",
            found=ways,
            allowed=1,
        )
    return part_of(value, world.place.context, ways, dim=1)


def part_of(whole: Tensor, rank: int, ways: int, dim: int) -> Tensor:
    """What a rank holds of a sequence: one chunk from the head, and its mirror image from the tail."""
    chunks = whole.chunk(2 * ways, dim)
    return torch.cat((chunks[rank], chunks[-1 - rank]), dim)


def whole_of(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The parts of all ranks, in their order, as the sequence that they were cut from."""
    heads, tails = zip(*(part.chunk(2, dim) for part in parts), strict=True)
    return torch.cat((*heads, *reversed(tails)), dim)


def positions_of(rank: int, ways: int, length: int, device: torch.device) -> Tensor:
    """Where in the sequence the tokens of a rank are that holds `length` of them."""
    return part_of(torch.arange(ways * length, device=device), rank, ways, dim=0)


def _attention(plan: Plan, device: torch.device, mesh: DeviceMesh) -> Callable[..., Tensor]:
    """The function for the model's attention layers. Ring and gather divide a sequence alike, so either can do it."""
    if plan.context_attention == "gather" or (plan.context_attention == "auto" and device.type == "cpu"):
        return partial(attend_gathered, mesh=mesh)
    return partial(attend_in_ring, mesh=mesh, otherwise_gather=plan.context_attention == "auto")


def attend_gathered(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, mesh: DeviceMesh) -> Tensor:
    """Attention of a rank's queries to the keys and values of all ranks."""
    kv = _gathered(torch.cat((k, v), dim=-1), mesh)
    k_all, v_all = torch.split(kv, [k.shape[-1], v.shape[-1]], dim=-1)
    if not causal:
        return F.scaled_dot_product_attention(q, k_all, v_all, dropout_p=dropout, enable_gqa=_is_grouped(q, k))
    # A chunk of queries sees the keys up to its own last one: as if it were the end of a sequence of that length.
    rank, ways = mesh.get_local_rank(), mesh.size()
    mixed = []
    for number, q_chunk in zip((rank, 2 * ways - 1 - rank), q.chunk(2, dim=SEQUENCE), strict=True):
        seen = (number + 1) * q_chunk.shape[SEQUENCE]
        mixed.append(_attend_at_the_end(q_chunk, k_all[:, :, :seen], v_all[:, :, :seen], dropout))
    return torch.cat(mixed, dim=SEQUENCE)


def _attend_at_the_end(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal attention of the last tokens of a sequence to all of it."""
    length, seen = q.shape[SEQUENCE], k.shape[SEQUENCE]
    if q.device.type == "cuda" and why_no_flash(q, v) is None:
        # Called by itself, as `torch.nn.attention.bias` does: here the last query sees all keys, while in torch's
        # function for all kernels the first query sees the first key alone. So there is no mask in memory.
        scale, wanted = q.shape[-1] ** -0.5, v.shape[-1]
        mixed: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
            *_padded(q, k, v), dropout, is_causal=True, scale=scale
        )[0]
        return mixed[..., :wanted]
    mask = torch.ones(length, seen, dtype=torch.bool, device=q.device).tril(seen - length)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, enable_gqa=_is_grouped(q, k))


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] != k.shape[1]


def _gathered(part: Tensor, mesh: DeviceMesh) -> Tensor:
    """What all ranks hold, in the order of the sequence."""
    parts: Tensor = _GatheredParts.apply(part, mesh.get_group())  # type: ignore[no-untyped-call]
    return whole_of(parts.unbind(0), dim=SEQUENCE)


class _GatheredParts(torch.autograd.Function):
    """The parts of all ranks. In backward each gets the sum of what all ranks say about its own.

    Not by way of DTensor: its all-gather of CUDA tensors ends the process (SIGSEGV, torch 2.11) where ranks share a GPU
    and talk through gloo.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ways = dist.get_world_size(group)
        parts = part.new_empty(ways * len(part), *part.shape[1:])
        dist.all_gather_into_tensor(parts, part.contiguous(), group=group)
        return parts.view(ways, *part.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = torch.empty_like(grad[0])
        dist.reduce_scatter_tensor(mine, grad.flatten(0, 1).contiguous(), group=ctx.group)
        return mine, None


def attend_in_ring(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float, mesh: DeviceMesh, otherwise_gather: bool
) -> Tensor:
    """Attention of a rank's queries to the keys and values of all ranks, which come by one rank at a time."""
    reason = why_no_ring(q, v, dropout)
    if reason is None:
        scale, wanted = q.shape[-1] ** -0.5, v.shape[-1]
        mixed: Tensor = _Ring.apply(*_padded(q, k, v), causal, scale, mesh.get_group())  # type: ignore[no-untyped-call]
        return mixed[..., :wanted]
    if otherwise_gather:
        return attend_gathered(q, k, v, causal=causal, dropout=dropout, mesh=mesh)
    raise InputError(
        f"plan.context_attention: found ring, but {reason}",
        hint="use plan.context_attention=gather",
        field="plan.context_attention",
        found="ring",
        allowed="gather, auto",
    )


def why_no_ring(q: Tensor, v: Tensor, dropout: float) -> str | None:
    """Why torch's ring cannot compute this attention, if it cannot: the same answer on all ranks."""
    if dropout:
        # Each kernel call of forward draws its own random numbers, and backward is given those of the last one.
        return f"it cannot repeat in backward what dropout ({dropout:g}) left out"
    return why_no_flash(q, v) if q.device.type == "cuda" else None


def why_no_flash(q: Tensor, v: Tensor) -> str | None:
    """Why the CUDA kernel of flash attention cannot compute this, if it cannot."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel computes in bf16 and fp16, and attention is in {str(q.dtype).removeprefix('torch.')}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"its kernel needs compute capability 8.0, and {torch.cuda.get_device_name(q.device)} has less"
    if _padded_width(q, v) > WIDEST:
        return f"its kernel takes heads of at most {WIDEST} numbers, and theirs have {_padded_width(q, v)}"
    return None


def _padded(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """As wide as a kernel wants them. Zeros at the end of queries and keys change no score; those of values give zeros,
    to be cut off again."""
    width = _padded_width(q, v)
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v)]


def _padded_width(q: Tensor, v: Tensor) -> int:
    return -(-max(q.shape[-1], v.shape[-1]) // WIDTH_STEP) * WIDTH_STEP


class _Ring(torch.autograd.Function):
    """torch's ring attention with a kernel of its own for each device, and the backward that goes with it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, group: ProcessGroup) -> Tensor:
        aten = torch.ops.aten
        cuda = q.device.type == "cuda"
        kernel = aten._scaled_dot_product_flash_attention if cuda else aten._scaled_dot_product_flash_attention_for_cpu
        with _ring_options(causal, q.dtype):
            mixed, log_sum, *rest = _templated_ring_attention(
                group, SEQUENCE, kernel, q, k, v, is_causal=causal, dropout_p=0.0, scale=scale
            )
        ctx.more = dict(zip(CUDA_EXTRAS, rest[: len(CUDA_EXTRAS)], strict=True)) if cuda else {}
        ctx.causal, ctx.scale, ctx.group = causal, scale, group
        ctx.save_for_backward(q, k, v, mixed, log_sum)
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, log_sum = ctx.saved_tensors
        aten = torch.ops.aten
        kernel = (
            aten._scaled_dot_product_flash_attention_backward
            if q.device.type == "cuda"
            else aten._scaled_dot_product_flash_attention_for_cpu_backward
        )
        with _ring_options(ctx.causal, q.dtype):
            q_grad, k_grad, v_grad, *_ = _templated_ring_attention_backward(
                ctx.group,
                SEQUENCE,
                kernel.default,
                grad_out=grad.contiguous(),
                grad_out_name="grad_out",
                query=q,
                key=k,
                value=v,
                out=mixed,
                logsumexp=log_sum,
                is_causal=ctx.causal,
                dropout_p=0.0,
                scale=ctx.scale,
                **ctx.more,
            )
        return q_grad, k_grad, v_grad, None, None, None


@contextmanager
def _ring_options(causal: bool, dtype: torch.dtype) -> Iterator[None]:
    """torch's ring reads its options from one place in the process. Load balance is the order of `part_of`."""
    wanted = {
        "enable_load_balance": causal,
        "convert_to_f32": dtype != torch.float64,  # in which the shares of the ranks are added up
        "rotate_method": _RotateMethod.ALL_TO_ALL,  # from rank to rank; its default gathers everything at once
    }
    before = {name: getattr(_cp_options, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(_cp_options, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(_cp_options, name, value)
