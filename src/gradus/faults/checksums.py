"""Checksums: whether ranks that should hold the same parameters do, bit for bit. Where they do not, memory has erred.

A tensor's checksum is the sum of its bits, read as whole numbers: exact, in any order, and changed by any one bit. Each
rank sends two numbers for each way in which tensors are divided: which parts it holds, and the checksum of all of them.
Ranks that hold the same parts must have the same checksum; only if they do not is it asked which tensor it was.

Tensors that no other rank has (those of shards without replicas) are compared with nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gradus.parallel.part import local_part
from gradus.parallel.world import World
from gradus.record.node import node_name
from gradus.schema.errors import GradusError
from gradus.schema.stable_hash import stable_hash

MOST_LAYOUTS = 8  # ways to divide tensors; a mixture of experts in tensor-parallel shards has four
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SilentCorruption(GradusError):
    """Replicas that were the same are not any more: hardware has changed a number without a word."""

    kind = "silent-corruption"


@dataclass(frozen=True)
class Difference:
    """Where ranks that should hold the same do not."""

    tensor: str  # the first one that differs: a parameter, or what the optimizer keeps for one
    odd_ranks: tuple[int, ...]  # those that are not as most are; all of them where there is no majority
    odd_nodes: tuple[str, ...]
    holders: tuple[int, ...]  # all ranks that should agree
    certain: bool  # whether a majority tells who is right

    def error(self, step: int, last_agreed_step: int | None) -> SilentCorruption:
        nodes = ", ".join(dict.fromkeys(self.odd_nodes))
        ranks = ("rank " if len(self.odd_ranks) == 1 else "ranks ") + ", ".join(map(str, self.odd_ranks))
        before = "" if last_agreed_step is None else f"; they agreed last at step {last_agreed_step}"
        if self.certain:
            told = f"{ranks} (node {nodes}) of the {len(self.holders)} that hold it has other bits than the rest"
        else:
            told = f"{ranks} (nodes {nodes}) hold it, and no majority tells which of them is wrong"
        return SilentCorruption(
            f"silent corruption of {self.tensor} at step {step}: {told}{before}",
            hint="memory, a bus or an arithmetic unit of that node has erred: have it tested, go on without it "
            "(--exclude in Slurm), from the last checkpoint, which was compared before it was written",
            step=step,
            tensor=self.tensor,
            rank=self.odd_ranks[0] if self.certain else None,
            node=self.odd_nodes[0] if self.certain else None,
            ranks=list(self.odd_ranks),
            nodes=list(dict.fromkeys(self.odd_nodes)),
            last_agreed_step=last_agreed_step,
        )


def checksum(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits as 64-bit numbers, modulo 2**64, on its device. Any bit that flips changes it."""
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        # Any order will do, and channels last is dense too: no copy is made for that.
        dense = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        flat = tensor.as_strided((dense,), (1,)) if dense == tensor.numel() else tensor.reshape(-1)
    else:
        flat = tensor.view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    size = flat.element_size()
    narrow = flat.view(_WHOLE_NUMBERS[size])
    if flat.storage_offset() * size % 8:
        return narrow.sum(dtype=torch.int64)
    # Eight bytes at a time need no widening, which is most of the work otherwise.
    whole = narrow.numel() - narrow.numel() % (8 // size)
    total = narrow[:whole].view(torch.int64).sum()
    return total if whole == narrow.numel() else total + narrow[whole:].sum(dtype=torch.int64)


@dataclass
class _Layout:
    """The tensors of this rank that are divided in one way."""

    names: list[str]
    part: int  # stands for which parts of which tensors these are
    weights: Tensor  # odd numbers, one for each tensor, so that differences of two do not cancel each other


class Comparison:
    """Checksums on their way between ranks; training goes on meanwhile."""

    def __init__(self, world: World, layouts: list[_Layout], sums: list[Tensor], sent: list[Tensor], work: Any) -> None:
        self._world, self._layouts, self._sums, self._sent, self._work = world, layouts, sums, sent, work

    def wait(self) -> Difference | None:
        """What came out, the same on all ranks, all of which must ask. Blocks only until the checksums are there."""
        table = self._received()
        groups = _holders(table)
        if all(len({digest for _, digest in members}) == 1 for members in groups.values()):
            return None
        mine = {
            layout.part: (layout.names, sums.tolist()) for layout, sums in zip(self._layouts, self._sums, strict=True)
        }
        told: list[Any] = [None] * self._world.size
        dist.all_gather_object(told, (node_name(), mine))
        return _difference(groups, [node for node, _ in told], [held for _, held in told])

    @property
    def finds_replicas(self) -> bool:
        """Whether any rank has another to compare with. To be asked after `wait`."""
        return any(len(members) > 1 for members in _holders(self._table).values())

    def _received(self) -> list[list[int]]:
        # On a stream of its own: on the usual one it would wait for the step that was launched since.
        device = self._sent[0].device
        aside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(aside) if aside is not None else nullcontext():
            self._work.wait()
            self._table: list[list[int]] = torch.stack(self._sent).tolist()
        return self._table


class Replicas:
    """Compares what ranks hold of the same tensors. All ranks must use it alike."""

    def __init__(self, world: World, *, alike_over_tensor: bool) -> None:
        """`alike_over_tensor`: whether what each rank of a tensor group computes by itself has the same bits there."""
        self._world, self._alike_over_tensor = world, alike_over_tensor
        self._known: tuple[int, ...] = ()
        self._layouts: list[_Layout] = []

    @torch.no_grad()
    def start(self, tensors: Mapping[str, Tensor]) -> Comparison:
        """Sum up and send. Nothing here waits for the device."""
        world = self._world
        grouped: dict[Any, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            grouped.setdefault(_division(tensor), {})[name] = tensor
        assert len(grouped) <= MOST_LAYOUTS, f"{len(grouped)} ways to divide tensors"
        signature = tuple(id(tensor) for tensor in tensors.values())
        if signature != self._known:
            self._layouts = [self._layout(division, members) for division, members in grouped.items()]
            self._known = signature
        mine = torch.zeros(2 * MOST_LAYOUTS, dtype=torch.int64, device=world.device)
        all_sums = []
        for number, (layout, members) in enumerate(zip(self._layouts, grouped.values(), strict=True)):
            sums = torch.stack([checksum(_local(tensor)).to(world.device) for tensor in members.values()])
            mine[2 * number] = layout.part
            mine[2 * number + 1] = (sums * layout.weights).sum()
            all_sums.append(sums)
        sent = [torch.empty_like(mine) for _ in range(world.size)]
        work = dist.all_gather(sent, mine, async_op=True)
        return Comparison(world, self._layouts, all_sums, sent, work)

    def _layout(self, division: Any, members: Mapping[str, Tensor]) -> _Layout:
        place = self._world.place
        parts = []
        for name, tensor in members.items():
            box = local_part(tensor)
            parts.append((name, str(tensor.dtype), tuple(tensor.shape), tuple(box.tensor.shape), box.offset))
        alone = not self._alike_over_tensor and "tensor" not in division
        part = stable_hash(place.pipeline, place.tensor if alone else -1, str(parts)) % 2**63 or 1
        weights = [stable_hash("checksum", name) % 2**63 | 1 for name in members]
        return _Layout(list(members), part, torch.tensor(weights, dtype=torch.int64, device=self._world.device))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _division(tensor: Tensor) -> tuple[str, ...]:
    """How a tensor is divided, as something that is the same for all that are divided so: names of dimensions first."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    names = tuple(part for name in mesh.mesh_dim_names or () for part in name.split("_"))
    return (*names, *map(str, tensor.placements))


def _holders(table: list[list[int]]) -> dict[int, list[tuple[int, int]]]:
    """By parts of tensors: the ranks that hold them, each with its checksum."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for rank, row in enumerate(table):
        for part, digest in zip(row[::2], row[1::2], strict=True):
            if part:
                groups.setdefault(part, []).append((rank, digest))
    return groups


Held = Mapping[int, tuple[list[str], list[int]]]  # by part: the tensors' names and checksums


def _difference(groups: Mapping[int, list[tuple[int, int]]], nodes: list[str], held: list[Held]) -> Difference:
    """The first tensor that differs, of the ranks that are fewest."""
    found: list[Difference] = []
    for part, members in groups.items():
        votes = Counter(digest for _, digest in members)
        if len(votes) == 1:
            continue
        (most, number), *_ = votes.most_common()
        certain = number > len(members) / 2
        odd = [rank for rank, digest in members if digest != most or not certain]
        reference = next(rank for rank, digest in members if digest == most)
        other = next(rank for rank, digest in members if digest != most)
        names, sums = held[reference][part]
        tensor = next(name for name, a, b in zip(names, sums, held[other][part][1], strict=True) if a != b)
        holders = tuple(rank for rank, _ in members)
        found.append(Difference(tensor, tuple(odd), tuple(nodes[rank] for rank in odd), holders, certain))
    return next((one for one in found if one.certain), found[0])


def trained_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that a step changes and that replicas have alike: parameters, and what the optimizer keeps for them."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    for name, parameter in list(tensors.items()):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name} (optimizer: {key})"] = value
    return tensors
