"""Pairs of nodes: everybody meets everybody in as few rounds as can be, and bad pairs point to a node or to a link."""

from __future__ import annotations

import itertools

import pytest

from gradus.launcher.preflight.pairs import Suspects, suspects, tournament

NODES = ["n1", "n2", "n3", "n4", "n5"]


def all_pairs(value: float = 10.0, nodes: list[str] = NODES) -> dict[tuple[str, str], float | None]:
    return dict.fromkeys(itertools.combinations(nodes, 2), value)


@pytest.mark.parametrize("players", range(2, 13))
def test_everybody_meets_everybody_once_and_nobody_twice_in_a_round(players):
    rounds = tournament(players)
    assert len(rounds) == (players - 1 if players % 2 == 0 else players)
    assert sorted(match for matches in rounds for match in matches) == list(itertools.combinations(range(players), 2))
    for matches in rounds:
        busy = [player for match in matches for player in match]
        assert len(busy) == len(set(busy))


def test_with_fewer_rounds_everybody_still_meets_equally_many():
    rounds = tournament(64, 7)
    assert len(rounds) == 7
    met = [player for matches in rounds for match in matches for player in match]
    assert {met.count(player) for player in range(64)} == {7}


def test_one_player_has_nobody_to_meet():
    assert tournament(1) == []


def test_nothing_is_suspect_where_all_is_well():
    assert suspects(all_pairs(), 5.0) == Suspects()


@pytest.mark.parametrize("value", [1.0, None], ids=["slow", "dead"])
def test_a_node_that_does_badly_with_everybody_is_the_suspect_and_none_of_its_partners(value):
    results = {pair: value if "n3" in pair else 10.0 for pair in all_pairs()}
    assert suspects(results, 5.0) == Suspects(nodes=("n3",))


@pytest.mark.parametrize("value", [1.0, None], ids=["slow", "dead"])
def test_one_bad_pair_between_nodes_that_are_well_otherwise_is_a_link(value):
    results = all_pairs() | {("n2", "n4"): value}
    assert suspects(results, 5.0) == Suspects(links=(("n2", "n4"),))


def test_two_bad_nodes_and_a_bad_link_are_told_apart():
    nodes = [f"n{number}" for number in range(1, 9)]
    results = {pair: None if {"n2", "n7"} & set(pair) else 10.0 for pair in all_pairs(nodes=nodes)}
    results[("n4", "n5")] = 1.0
    assert suspects(results, 5.0) == Suspects(nodes=("n2", "n7"), links=(("n4", "n5"),))


def test_a_node_that_is_slow_with_most_others_but_not_with_all_is_still_the_suspect():
    results = {pair: 1.0 if "n1" in pair else 10.0 for pair in all_pairs()} | {("n1", "n2"): 10.0}
    assert suspects(results, 5.0) == Suspects(nodes=("n1",))


def test_of_two_nodes_only_their_link_can_be_named():
    assert suspects({("n1", "n2"): None}, 5.0) == Suspects(links=(("n1", "n2"),))


def test_where_every_pair_is_bad_no_node_is_to_blame():
    assert suspects(all_pairs(1.0), 5.0) == Suspects(everything=True)


def test_few_rounds_are_enough_to_name_a_node_among_many():
    names = [f"n{number:03}" for number in range(64)]
    results = {(names[a], names[b]): 1.0 if 17 in (a, b) else 10.0 for matches in tournament(64, 7) for a, b in matches}
    assert suspects(results, 5.0) == Suspects(nodes=("n017",))
