"""Saving: which values compiled code keeps from forward for backward, and which backward computes again.

This is what AOTAutograd decides with its min-cut partitioner (torch/_functorch/partitioners.py, read in torch 2.13): of
all sets of values from which backward can compute what it needs, the one with the fewest bytes. Backward may do again
what is done element by element, because that goes into kernels that run anyway; it may not do again

- what takes long (matmuls, convolutions, attention), what is drawn at random, reductions, whose results are small;
- what a library's kernel reads in backward, since it would have to be written to memory once more, and what the part
  hands on;
- what uses something that was made before a kernel that does not fuse: both uses could not share a kernel;
- a chain of more than a hundred operators.

Bytes are weighed as there: by 1.1 for each operator between a value and backward, and twice if all its users fuse with
it, since it would not be in memory otherwise. Parameters are there in any case and cost nothing.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from gradus.planner.rewritten.dataflow import Flow, Node
from gradus.planner.rewritten.minimum_cut import UNLIMITED, Network

_NEARER = 1.1
_FARTHEST = 100
_LONGEST_CHAIN = 100
_TORCH_NODES = 3  # of torch's graph for one of ours, with views and casts: chains are measured in those


def saved_values(flow: Flow) -> set[int]:
    """Of the values that forward has, those that backward finds in memory. A part's inputs may be among them."""
    return _Cut(flow).saved()


class _Cut:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.nodes = flow.forward
        self.maker = {value: number for number, node in enumerate(self.nodes) for value in node.writes}
        self.users: dict[int, list[int]] = defaultdict(list)
        for number, node in enumerate(self.nodes):
            for value in node.reads:
                self.users[value].append(number)
        self.known = [*(value for value in flow.given.values() if value in self.users), *self.maker]
        available = set(self.known)
        self.needed = {value for node in flow.backward for value in node.reads} & available
        self.written_out = {v for node in flow.backward if not node.fuses for v in node.reads} & available
        self.banned = {number for number, node in enumerate(self.nodes) if not node.again}
        self.banned |= {self.maker[value] for value in self.written_out | flow.handed_on if value in self.maker}
        self._ban_far_uses()
        self._ban_long_chains()

    def saved(self) -> set[int]:
        network = Network()
        ins = {value: network.node() for value in self.known}
        outs = {value: network.node() for value in self.known}
        for value, weight in self._weights().items():
            maker = self.maker.get(value)
            if maker is None or maker in self.banned:
                network.pipe(Network.SOURCE, ins[value], UNLIMITED)
            if value in self.needed:
                network.pipe(outs[value], Network.SINK, UNLIMITED)
            network.pipe(ins[value], outs[value], weight)
            for user in self.users[value]:
                for result in self.nodes[user].writes:
                    network.pipe(outs[value], ins[result], UNLIMITED)
        reached = network.reached()
        return {value for value in self.known if ins[value] in reached and outs[value] not in reached}

    def _weights(self) -> dict[int, float]:
        distance: dict[int, int] = {}
        weights = {}
        for value in reversed(self.known):
            beyond = [distance[v] for user in self.users[value] for v in self.nodes[user].writes if v in distance]
            near = [0] if value in self.needed else []
            distance[value] = min(_FARTHEST, 1 + min([*near, *beyond], default=_FARTHEST))
            weights[value] = self.flow.size(value) * _NEARER ** distance[value]
            if value in self.maker and self._fuses_with_all(value):
                weights[value] *= 2
        return weights

    def _fuses_with_all(self, value: int) -> bool:
        """What a library's kernel made is in memory in any case."""
        node = self.nodes[self.maker[value]]
        return node.fuses_on and value not in self.written_out and all(self.nodes[n].fuses for n in self.users[value])

    # --- rules against doing it again

    def _after(self, number: int) -> list[tuple[int, bool]]:
        """The nodes that use a node's results, and whether they fuse with it."""
        node = self.nodes[number]
        users = {user for value in node.writes for user in self._users_in_forward(value)}
        return [(user, self._fuse(node, self.nodes[user])) for user in sorted(users)]

    def _users_in_forward(self, value: int) -> list[int]:
        return [number for number in self.users[value] if not self.nodes[number].for_backward]

    @staticmethod
    def _fuse(node: Node, user: Node) -> bool:
        return node.fuses_on and user.fuses

    def _ban_far_uses(self) -> None:
        for value in self.known:
            users = self._users_in_forward(value)
            maker = self.maker.get(value)
            if len(users) < 2 or maker is None:  # an input fuses with nothing
                continue
            first = self._first_unfusible(users, max(users))
            for user in users:
                if user > first and self._fuse(self.nodes[maker], self.nodes[user]):
                    self.banned.add(user)

    def _first_unfusible(self, start: list[int], furthest: int) -> int:
        waiting = [(number, True) for number in start]
        heapq.heapify(waiting)
        seen = set(waiting)
        while waiting:
            number, fuses = heapq.heappop(waiting)
            if not fuses:
                return number
            for after in self._after(number):
                if after[0] <= furthest and after not in seen:
                    seen.add(after)
                    heapq.heappush(waiting, after)
        return furthest

    def _ban_long_chains(self) -> None:
        visited: set[int] = set()
        for start in range(len(self.nodes)):
            waiting = [start]
            while waiting:
                number = heapq.heappop(waiting)
                if number in visited:
                    continue
                visited.add(number)
                if (number - start) * _TORCH_NODES > _LONGEST_CHAIN and not waiting:
                    self.banned.add(number)
                    break
                for user, fuses in self._after(number):
                    if fuses and user not in self.banned:
                        heapq.heappush(waiting, user)
