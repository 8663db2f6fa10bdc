"""The cut that is found is the cheapest there is."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.planner.rewritten.minimum_cut import UNLIMITED, Network

NODES = 6  # with source and sink


def cost(pipes: list[tuple[int, int, int]], reached: set[int]) -> int:
    return sum(capacity for start, end, capacity in pipes if start in reached and end not in reached)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1), st.integers(0, 9)), max_size=16))
def test_no_other_cut_is_cheaper(pipes):
    network = Network()
    for _ in range(NODES - 2):
        network.node()
    for start, end, capacity in pipes:
        network.pipe(start, end, capacity)
    reached = network.reached()
    assert Network.SOURCE in reached
    assert Network.SINK not in reached
    sides = product((False, True), repeat=NODES - 2)
    every = ({Network.SOURCE, *(n + 2 for n, near in enumerate(side) if near)} for side in sides)
    assert cost(pipes, reached) == min(cost(pipes, other) for other in every)


def test_what_has_no_limit_is_never_cut():
    network = Network()
    first, second = network.node(), network.node()
    network.pipe(Network.SOURCE, first, UNLIMITED)
    network.pipe(first, second, 3.0)
    network.pipe(second, Network.SINK, UNLIMITED)
    assert network.reached() == {Network.SOURCE, first}
