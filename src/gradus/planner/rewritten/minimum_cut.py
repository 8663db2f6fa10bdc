"""Minimum cut: the cheapest edges without which nothing flows from the source to the sink, by Dinic's algorithm."""

from __future__ import annotations

import math
from collections import deque

UNLIMITED = math.inf


class Network:
    """Pipes with capacities. Nodes are numbers; 0 is the source, 1 is the sink."""

    SOURCE, SINK = 0, 1

    def __init__(self) -> None:
        self._edges: list[list[int]] = [[], []]  # of each node, the numbers of its edges
        self._to: list[int] = []  # edge e goes there; its reverse is e ^ 1
        self._free: list[float] = []  # what can still flow along it

    def node(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def pipe(self, start: int, end: int, capacity: float) -> None:
        for here, there, free in ((start, end, capacity), (end, start, 0.0)):
            self._edges[here].append(len(self._to))
            self._to.append(there)
            self._free.append(free)

    def reached(self) -> set[int]:
        """Nodes on the source's side of a cheapest cut. It is the cut nearest to the source."""
        while (levels := self._levels())[self.SINK] >= 0:
            next_edge = [0] * len(self._edges)
            while self._push(levels, next_edge):
                pass
        return {node for node, level in enumerate(levels) if level >= 0}

    def _levels(self) -> list[int]:
        """How many edges away from the source each node is; -1 where nothing more can flow to."""
        levels = [-1] * len(self._edges)
        levels[self.SOURCE] = 0
        waiting = deque([self.SOURCE])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges[node]:
                if self._free[edge] > 0 and levels[self._to[edge]] < 0:
                    levels[self._to[edge]] = levels[node] + 1
                    waiting.append(self._to[edge])
        return levels

    def _push(self, levels: list[int], next_edge: list[int]) -> bool:
        """Send as much as one path takes; False if there is none left. With no recursion: paths can be long."""
        path: list[int] = []
        node = self.SOURCE
        while node != self.SINK:
            edges = self._edges[node]
            while next_edge[node] < len(edges):
                edge = edges[next_edge[node]]
                if self._free[edge] > 0 and levels[self._to[edge]] == levels[node] + 1:
                    break
                next_edge[node] += 1
            else:
                if not path:
                    return False
                node = self._to[path.pop() ^ 1]
                next_edge[node] += 1
                continue
            path.append(edge)
            node = self._to[edge]
        sent = min(self._free[edge] for edge in path)
        assert sent < UNLIMITED, "nothing bounds what has to be kept"
        for edge in path:
            self._free[edge] -= sent
            self._free[edge ^ 1] += sent
        return True
