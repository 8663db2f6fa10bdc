"""Recomputing: what a part does and keeps if forward is computed again when its backward begins.

As parallel/recompute.py arranges it, with torch's checkpoints that are not re-entrant:

- Forward keeps the part's inputs; selective recompute, also all that its matmuls, convolutions and attention gave.
- Backward begins by running forward again, up to the last operator whose result it needs and no further. What forward
  kept is taken from memory instead of being computed. What is computed for backward goes as backward uses it.
- What was kept and is not asked for again stays until the part's backward is over: the checkpoint holds it.
- Copies of parameters that autocast made are made again. Those of forward stay in autocast's cache until forward of the
  model ends. Computing again enters autocast anew, with a cache of its own that goes when it leaves.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import Literal

from gradus.planner.profile.program import Kind, Operator, Part, Storage

Policy = Literal["none", "selective", "full"]

KEPT: frozenset[Kind] = frozenset({"matmul", "convolution", "attention"})  # by selective recompute


def recomputed(part: Part, policy: Policy) -> Part:
    """The part with forward computed again for backward. Its storages count over forward, recompute and backward."""
    if policy == "none" or not part.backward:
        return part
    assert not part.recompute, f"{part.name} is recomputed already"
    return _Again(part, KEPT if policy == "selective" else frozenset()).part()


class _Again:
    """What becomes of each storage of a part whose forward runs a second time."""

    def __init__(self, part: Part, kept_kinds: frozenset[Kind]) -> None:
        self.old = part
        self.ends = len(part.forward)
        self.written_by: dict[int, int] = {}  # a storage, and the last operator of forward that writes it
        self.used_by: dict[int, int] = {}  # and the last one that reads or writes it
        for number, operator in enumerate(part.forward):
            for storage in (*operator.reads, *operator.writes):
                self.used_by[storage] = number
            for storage in operator.writes:
                self.written_by[storage] = number
        self.read_by_backward = {storage for operator in part.backward for storage in operator.reads}
        self.kept = {storage for op in part.forward if op.kind in kept_kinds for storage in op.writes}
        needed = [number for storage, number in self.written_by.items() if storage in self.read_by_backward]
        self.stop = 1 + max(needed, default=-1)
        while self.stop < self.ends and self._copies(part.forward[self.stop]):  # for an operator that is not run
            self.stop += 1
        self.running = [n for n in range(self.stop) if part.forward[n].kind not in kept_kinds]
        # Where an operator of forward is when it runs again; of one that does not, where the next one is.
        self.place = [bisect_left(self.running, number) for number in range(self.ends + 1)]
        self.read_again = {storage: n for n in self.running for storage in part.forward[n].reads}  # last by which
        self.written_by_backward = {storage for operator in part.backward for storage in operator.writes}

    def part(self) -> Part:
        storages = [self._of_forward(number, storage) for number, storage in enumerate(self.old.storages)]
        again: dict[int, int] = {}
        for number, storage in enumerate(self.old.storages):
            if (twin := self._made_again(number, storage)) is not None:
                again[number] = len(storages)
                storages.append(twin)

        def remapped(operator: Operator) -> Operator:
            reads = tuple(again.get(storage, storage) for storage in operator.reads)
            writes = tuple(again.get(storage, storage) for storage in operator.writes)
            return replace(operator, reads=reads, writes=writes)

        return replace(
            self.old,
            recompute=tuple(remapped(self.old.forward[number]) for number in self.running),
            backward=tuple(map(remapped, self.old.backward)),
            storages=tuple(storages),
        )

    def _copies(self, operator: Operator) -> bool:
        return bool(operator.writes) and all(self.old.storages[s].role == "copy" for s in operator.writes)

    def _is_own(self, number: int, storage: Storage) -> bool:
        """Whether forward of this part makes it. What it merely was given counts from its first operator on."""
        made_by_forward = number in self.written_by or storage.role == "workspace"
        return 0 <= storage.made < self.ends and made_by_forward

    def _later(self, place: int) -> int:
        return place + len(self.running)

    def _of_forward(self, number: int, storage: Storage) -> Storage:
        """A storage of the part as it was, with its new lifetime."""
        read = number in self.read_by_backward
        if storage.made >= self.ends:  # the gradient that backward is given is there while forward is computed again
            given = number not in self.written_by_backward
            made = storage.made if given and storage.made == self.ends else self._later(storage.made)
            return replace(storage, made=made, last=self._later(storage.last))
        if not self._is_own(number, storage):
            if not read and number not in self.read_again:
                return storage
            # An input: the checkpoint holds it until it is done. It counts where it was made, as an output does below.
            return replace(storage, made=-1, last=self._later(self.ends + len(self.old.backward)) - 1)
        if number in self.kept:
            return replace(storage, last=self._last_of_kept(number, storage, read))
        if storage.last < self.ends:  # an output is held by the checkpoint of the next block, which is recomputed too
            return storage if self._used_inside(number) else replace(storage, last=self.ends)
        if storage.role == "copy":
            return replace(storage, last=self.ends)
        if not read or not self._used_inside(number):  # handed on; another part decides how long it stays
            stays = storage.last if storage.last == self.ends else self._later(storage.last)
            return replace(storage, last=self.ends if read else stays)
        return replace(storage, last=max(storage.made, self.used_by[number]))

    def _used_inside(self, number: int) -> bool:
        """Whether forward of this part reads what it wrote there; a result that it does not read is its output."""
        if number not in self.written_by:
            return True
        written = self.written_by[number]
        first_result = self.old.forward[written].writes[0] == number
        return self.used_by[number] > written or not first_result

    def _last_of_kept(self, number: int, storage: Storage, read: bool) -> int:
        everything = self._later(self.ends + len(self.old.backward))
        if storage.last == self.ends + len(self.old.backward):
            return everything
        if self.written_by[number] >= self.stop:  # never asked for again
            return everything - 1
        if read:
            return self._later(storage.last)
        return self._when_again(number, storage)

    def _when_again(self, number: int, storage: Storage) -> int:
        """When the second run is done with something that backward does not read: as the first was, or at its end."""
        used = storage.last if storage.last < self.ends else self.used_by[number]
        return min(self._later(self.ends) - 1, self.ends + self.place[used])

    def _made_again(self, number: int, storage: Storage) -> Storage | None:
        """The storage that a second run makes in place of one of forward."""
        if not self._is_own(number, storage) or number in self.kept or storage.made >= self.stop:
            return None
        if storage.role == "workspace" and storage.made not in self.running:
            return None
        made = self.ends + self.place[storage.made]
        over = self._later(self.ends) - 1  # the last operator that runs again
        read = number in self.read_by_backward
        last = self._later(storage.last) if read else self._when_again(number, storage)
        if storage.role == "copy":
            last = max(last, over)
        return replace(storage, made=min(made, over), last=max(made, last))
