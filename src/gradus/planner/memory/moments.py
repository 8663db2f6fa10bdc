"""Moments: what comes and goes on a rank while a micro-batch passes through a stage, and where there is most of it.

A stage is the whole model, or a rank's piece of a pipeline. Its parts run one after another and back again; between
them lie what earlier parts keep for backward, the gradients that there are by now, and, where parameters are sharded,
those that are gathered. What lies there all the time is not counted here. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from gradus.planner.memory.timeline import NOTHING_LIVE, Division, Live, PartMemory
from gradus.planner.profile.program import Part


@dataclass(frozen=True)
class Moment:
    """What is there at one moment, beside what is there all the time."""

    where: str
    live: Live = NOTHING_LIVE
    gathered: int = 0  # parameters that other ranks have sent their rows of
    communication: int = 0  # on its way

    @property
    def total(self) -> int:
        return self.live.total + self.gathered + self.communication


@dataclass(frozen=True)
class Rules:
    """What becomes of gradients and of gathered parameters, as a plan says it. Sizes are bytes of a number."""

    adding: bool  # gradients are there from the start, and new ones are added to them
    gradients: int = 0  # bytes of those that are there from the start
    piling_up: bool = False  # new ones are beside those until backward is done
    sharded: bool = False
    gathering: Literal["all", "so far", "one block"] = "all"  # what is gathered while a block runs
    narrow: int = 4  # of gathered parameters
    gradient_share: float = 1.0  # of what the profile says gradients take
    wide: int = 4  # of gradients that are added up
    reduced: int = 4  # of gradients on their way to the ranks that they belong to
    row: float = 4.0  # of a gradient after that, for each element of the whole: it is divided over ranks
    pile_rows: bool = True  # rows appear as backward goes on; otherwise they are in `gradients`
    # When gradients are divided: in each micro-batch, or, added up as a whole until then, in the last one or after it.
    reducing: Literal["each", "last", "at the end"] = "each"
    lingers: bool = False  # what was sent last of a micro-batch stays until the next one sends something
    # Bytes of the gradient of what the last part shares with the first: until both have theirs, it belongs to nobody.
    tied: int = 0


@dataclass(frozen=True)
class Call:
    """One part at its place in a stage."""

    part: Part
    name: str  # "block 3"
    memory: PartMemory
    parameters: int  # elements on this rank, unless they are sharded
    trained: int
    # The same as a share of which ranks hold rows: experts are on some ranks only, and fewer divide them further.
    shared_parameters: int
    shared_trained: int
    exchanged: int = 0  # bytes that ranks of a context or expert group send each other while the part runs
    on_host: int = 0  # bytes that wait in host memory between forward and backward


@dataclass(frozen=True)
class Stage:
    """Calls in the order of forward."""

    calls: Sequence[Call]
    rules: Rules

    @cached_property
    def kept(self) -> Live:
        """What a micro-batch leaves between its forward and its backward."""
        return self._kept_before[-1]

    @cached_property
    def forward(self) -> Moment:
        """The worst moment of forward."""
        return max((self._forward(number) for number in self._edges), key=lambda moment: moment.total)

    @cached_property
    def backward(self) -> Moment:
        """The worst moment of backward."""
        found = [moment for number in self._edges for moment in self._backward(number)]
        return max(found, key=lambda moment: moment.total)

    @cached_property
    def end(self) -> Moment | None:
        """After backward of the last micro-batch, if anything is left to be done then."""
        return self._end() if self.rules.sharded else None

    @property
    def parameters(self) -> int:
        return sum(call.parameters for call in self.calls)

    # --- sums over the calls before and after one

    @cached_property
    def _edges(self) -> list[int]:
        """Calls at the ends of runs of like blocks, and their neighbours: along a run all changes by equal steps."""
        last = len(self.calls) - 1
        changes = [n for n in range(last) if self.calls[n].part is not self.calls[n + 1].part]
        near = {number + offset for number in changes for offset in (-1, 0, 1, 2)}
        return sorted(number for number in near | {0, 1, last - 1, last} if 0 <= number <= last)

    @cached_property
    def _kept_before(self) -> list[Live]:
        return list(accumulate((call.memory.kept for call in self.calls), Live.plus, initial=NOTHING_LIVE))

    @cached_property
    def _cached_before(self) -> list[int]:
        return list(accumulate((call.memory.cached for call in self.calls), initial=0))

    @cached_property
    def _left_after(self) -> list[int]:
        return _after(call.memory.left for call in self.calls)

    @cached_property
    def _gradients_after(self) -> list[int]:
        return _after(call.memory.gradients for call in self.calls)

    @cached_property
    def _outer_gradients_after(self) -> list[int]:
        return _after(0 if call.part.block else call.memory.gradients for call in self.calls)

    @cached_property
    def _trained_in_blocks_after(self) -> list[int]:
        return _after(call.shared_trained if call.part.block else 0 for call in self.calls)

    @cached_property
    def _in_blocks_until(self) -> list[int]:
        return list(accumulate(call.parameters if call.part.block else 0 for call in self.calls))

    @cached_property
    def _outside(self) -> int:
        return self.parameters - self._in_blocks_until[-1]

    @cached_property
    def _trained_outside(self) -> int:
        return sum(call.trained for call in self.calls if not call.part.block)

    @property
    def _adds_whole(self) -> bool:
        return self.rules.reducing != "each" and self.rules.narrow == self.rules.wide

    @property
    def _lingering(self) -> int:
        return self.rules.reduced * self._trained_outside if self.rules.lingers else 0

    # --- moments

    def _forward(self, number: int) -> Moment:
        call = self.calls[number]
        live = self._kept_before[number].plus(call.memory.forward).plus(Live(copies=self._cached_before[number]))
        live = live._replace(gradients=self.rules.gradients)
        arriving = self.rules.narrow * self._block(number) if self.rules.sharded else 0
        moving = arriving + self._lingering + call.exchanged
        return Moment(_where("forward", call, live), live, self._gathered(number), moving)

    def _backward(self, number: int) -> Iterator[Moment]:
        call, rules = self.calls[number], self.rules
        memory = call.memory
        # Sharded parameters' gradients pile up inside a block, unless there are whole ones of the same format already.
        adds = rules.adding and not rules.piling_up and (not rules.sharded or self._adds_whole)
        own = memory.backward_adding if adds else memory.backward
        before = self._kept_before[number].plus(Live(activations=self._left_after[number]))
        live = before.plus(own)
        arriving = rules.narrow * self._block(number - 1) if rules.gathering == "one block" else 0
        leaving = 0
        if rules.sharded and rules.reducing == "each":
            leaving = rules.reduced * self._trained_block(number + 1) or self._lingering
        yield Moment(
            _where("backward", call, live),
            live._replace(gradients=round(rules.gradient_share * own.gradients) + self._other_gradients(number)),
            self._gathered(number),
            arriving + leaving + call.exchanged,
        )
        if rules.sharded and call.part.block and rules.reducing != "at the end":
            # What was computed with goes before gradients are sent.
            yield Moment(
                f"reducing the gradients of {call.name}",
                before._replace(gradients=self._gradients_to_reduce(number)),
                self._gathered(number) - rules.narrow * call.parameters,
                arriving + rules.reduced * call.trained,
            )

    def _end(self) -> Moment:
        """Backward is done, and gradients of what is outside the blocks are on their way."""
        rules = self.rules
        in_blocks = sum(call.shared_trained for call in self.calls if call.part.block)
        outer = self._outer_gradients_after[0] + (0 if self.calls[0].part.block else self.calls[0].memory.gradients)
        where = "reducing gradients after backward"
        if rules.reducing == "each":
            rows = round(rules.row * in_blocks) if rules.pile_rows else rules.gradients
            live = Live(gradients=rows + round(rules.gradient_share * outer))
            return Moment(where, live, communication=rules.reduced * self._trained_outside)
        if rules.reducing == "last":
            divided = round((rules.wide - rules.row) * in_blocks)
            live = Live(gradients=rules.gradients - divided)
            return Moment(where, live, communication=rules.reduced * self._trained_outside)
        # In a pipeline: one group after another, while all is gathered still.
        groups = [self._trained_outside, *(call.trained for call in self.calls if call.part.block)]
        return Moment(
            where, Live(gradients=rules.gradients), self._gathered(0), communication=rules.reduced * max(groups)
        )

    def _other_gradients(self, number: int) -> int:
        """Of parts whose backward is done, and those that were there before."""
        rules = self.rules
        pending = rules.tied if 0 < number < len(self.calls) - 1 else 0
        if not rules.sharded:
            piled = self._gradients_after[number] if rules.piling_up or not rules.adding else 0
            return pending + rules.gradients + piled
        # Those outside the blocks are reduced at the end.
        waiting = 0 if self._adds_whole else round(rules.gradient_share * self._outer_gradients_after[number])
        rows = round(rules.row * self._trained_in_blocks_after[number]) if rules.pile_rows else 0
        return rules.gradients + pending + waiting + rows

    def _gradients_to_reduce(self, number: int) -> int:
        """With those of the block that is being reduced, whose new ones are added to older ones that are whole."""
        rules = self.rules
        if rules.reducing == "last":
            return self._other_gradients(number) - round(
                (rules.wide - rules.row) * self._trained_in_blocks_after[number]
            )
        return self._other_gradients(number) + round(rules.gradient_share * self.calls[number].memory.gradients)

    def _gathered(self, number: int) -> int:
        rules = self.rules
        if not rules.sharded:
            return 0
        in_blocks = {
            "all": self._in_blocks_until[-1],
            "so far": self._in_blocks_until[number],
            "one block": self._block(number),
        }[rules.gathering]
        return rules.narrow * (self._outside + in_blocks)

    def _block(self, number: int) -> int:
        """Elements of the block at a place, if one is there."""
        there = 0 <= number < len(self.calls) and self.calls[number].part.block
        return self.calls[number].parameters if there else 0

    def _trained_block(self, number: int) -> int:
        there = 0 <= number < len(self.calls) and self.calls[number].part.block
        return self.calls[number].trained if there else 0


def _after(values: Iterator[int]) -> list[int]:
    """For each call, the sum over those that come after it in forward."""
    backwards = list(accumulate(reversed(list(values)), initial=0))
    return backwards[-2::-1]


def _where(phase: str, call: Call, live: Live) -> str:
    return "loss" if call.memory.forward.logits and not call.part.block and live.logits else f"{phase} of {call.name}"


def elements(part: Part, division: Division, *, trained_only: bool = False) -> int:
    """Parameters of a part that a rank holds, before sharding."""
    counted = 0.0
    for weights in part.weights:
        if weights.trained or not trained_only:
            ways = division.ways(weights.divides) if weights.divides == "tensor" else 1
            counted += weights.elements / (ways * (division.expert if weights.expert else 1))
    return round(counted)
