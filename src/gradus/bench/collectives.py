"""Collectives: how fast ranks exchange data, for each size, and whether what arrives is exactly right.

Sizes and bus bandwidth are counted as NVIDIA's nccl-tests count them (its doc/PERFORMANCE.md), so that tables can be
compared: the size is that of the larger buffer of a rank, and the bus bandwidth says what the hardware had to carry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "p2p"]
OPERATIONS: tuple[Operation, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast", "p2p")
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
}
# How many of the integers from 0 on a type holds exactly.
_EXACT = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24, torch.float64: 2**53}
_EXACT |= {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    operation: Operation
    dtype: str
    bytes: int
    ranks: int
    seconds: float  # of one call, on the slowest rank
    wrong: int  # elements that are not what they must be, on all ranks

    @property
    def algorithm_gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def bus_gb_per_second(self) -> float:
        return self.algorithm_gb_per_second * bus_factor(self.operation, self.ranks)

    def document(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "algorithm_gb_per_second": self.algorithm_gb_per_second,
            "bus_gb_per_second": self.bus_gb_per_second,
        }


def bus_factor(operation: Operation, ranks: int) -> float:
    """What the busiest link carries for each byte of the size."""
    if operation == "all-reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("all-gather", "reduce-scatter", "all-to-all"):
        return (ranks - 1) / ranks
    return 1.0


def table(
    operations: Iterable[Operation],
    sizes: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    seconds_each: float = 0.5,
) -> Iterator[Row]:
    """Measure each operation at each size. All ranks of the group must call it, and all get the same rows."""
    for operation in operations:
        for size in sizes:
            yield measured(operation, size, dtype, device, group=group, seconds=seconds_each)


def measured(
    operation: Operation,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    group: dist.ProcessGroup | None = None,
    seconds: float = 0.5,
    most_calls: int = 100,
) -> Row:
    """One row: a call that is checked, a few to warm up, then as many as fit into about so many seconds."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    call, check = _prepared(operation, size, dtype, device, group, rank, ranks)
    elements = max(ranks, size // dtype.itemsize // ranks * ranks)
    call()
    wrong = torch.tensor(check(), dtype=torch.int64, device=device)
    dist.all_reduce(wrong, group=group)
    once = _slowest(_timed(call, 1, device), device, group)
    calls = max(1, min(most_calls, int(seconds / max(once, 1e-9))))
    dist.barrier(group=group)
    each = _slowest(_timed(call, calls, device) / calls, device, group)
    return Row(operation, str(dtype).removeprefix("torch."), elements * dtype.itemsize, ranks, each, int(wrong))


def _timed(call: Callable[[], None], calls: int, device: torch.device) -> float:
    _wait_for(device)
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    _wait_for(device)
    return time.perf_counter() - begun


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    worst = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=group)
    return float(worst)


def _prepared(
    operation: Operation,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup | None,
    rank: int,
    ranks: int,
) -> tuple[Callable[[], None], Callable[[], int]]:
    """What makes one call, and what counts wrong elements after the first one."""
    part = max(1, size // dtype.itemsize // ranks)  # elements; the larger buffer holds one part for each rank
    whole = part * ranks

    def filled(of: int, elements: int, start: int = 0) -> Tensor:
        return pattern(of, ranks, elements, dtype, device, start)

    if operation == "all-reduce":
        # Sums grow with each call: the data is put back, which costs a copy in memory, far faster than any network.
        buffer, fresh = filled(rank, whole), filled(rank, whole)

        def all_reduce() -> None:
            buffer.copy_(fresh)
            dist.all_reduce(buffer, group=group)

        return all_reduce, lambda: _wrong(buffer, summed(ranks, whole, dtype, device))
    if operation == "all-gather":
        mine, gathered = filled(rank, part), torch.empty(whole, dtype=dtype, device=device)
        expected = torch.cat([filled(of, part) for of in range(ranks)])
        return (
            lambda: _done(dist.all_gather_into_tensor(gathered, mine, group=group)),
            lambda: _wrong(gathered, expected),
        )
    if operation == "reduce-scatter":
        given, reduced = filled(rank, whole), torch.empty(part, dtype=dtype, device=device)
        return (
            lambda: _done(dist.reduce_scatter_tensor(reduced, given, group=group)),
            lambda: _wrong(reduced, summed(ranks, whole, dtype, device)[rank * part : (rank + 1) * part]),
        )
    if operation == "all-to-all":
        sent, received = filled(rank, whole), torch.empty(whole, dtype=dtype, device=device)
        expected = torch.cat([filled(of, part, rank * part) for of in range(ranks)])
        return (
            lambda: _done(dist.all_to_all_single(received, sent, group=group)),
            lambda: _wrong(received, expected),
        )
    if operation == "broadcast":
        told = filled(rank, whole)
        source = dist.get_global_rank(group, 0) if group is not None else 0
        return lambda: _done(dist.broadcast(told, source, group=group)), lambda: _wrong(told, filled(0, whole))
    return _ring(filled(rank, whole), filled((rank - 1) % ranks, whole), group, rank, ranks)


def _ring(
    mine: Tensor, expected: Tensor, group: dist.ProcessGroup | None, rank: int, ranks: int
) -> tuple[Callable[[], None], Callable[[], int]]:
    """Point to point: every rank sends to the next one, all at once."""
    received = torch.empty_like(mine)
    peers = [(rank + 1) % ranks, (rank - 1) % ranks]
    to, of = (dist.get_global_rank(group, peer) if group is not None else peer for peer in peers)

    def send_on() -> None:
        if ranks == 1:
            received.copy_(mine)
            return
        exchange = [dist.P2POp(dist.isend, mine, to, group), dist.P2POp(dist.irecv, received, of, group)]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()

    return send_on, lambda: _wrong(received, expected)


def _done(work: object) -> None:
    """Collectives that are not asynchronous give back nothing that one would have to wait for."""


def _wrong(found: Tensor, expected: Tensor) -> int:
    return int((found != expected).sum())


def pattern(rank: int, ranks: int, elements: int, dtype: torch.dtype, device: torch.device, start: int = 0) -> Tensor:
    """What a rank contributes: small integers that differ between ranks and neighbours, and whose sum is exact."""
    period = _period(ranks, dtype)
    one = (torch.arange(period, dtype=torch.int64) + rank) % period < _ones(ranks, period, dtype)
    return _repeated(one.to(dtype), elements, device, start)


def summed(ranks: int, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The sum of all ranks' patterns, counted in integers."""
    period = _period(ranks, dtype)
    total = torch.zeros(period, dtype=torch.int64)
    for rank in range(ranks):
        total += ((torch.arange(period) + rank) % period < _ones(ranks, period, dtype)).to(torch.int64)
    return _repeated(total.to(dtype), elements, device)


def _period(ranks: int, dtype: torch.dtype) -> int:
    """Prime for few ranks, so that a part that arrives in the wrong place is not right by chance."""
    return max(101, 2 * ranks // _EXACT[dtype] + 1)


def _ones(ranks: int, period: int, dtype: torch.dtype) -> int:
    """How many elements of a period are one: at most as many ranks meet in an element as the type can count."""
    return max(1, min(period // 2, _EXACT[dtype] * period // max(1, 2 * ranks)))


def _repeated(period: Tensor, elements: int, device: torch.device, start: int = 0) -> Tensor:
    shifted = period.roll(-(start % len(period))).to(device)
    return shifted.repeat(-(-elements // len(period)))[:elements].contiguous()
