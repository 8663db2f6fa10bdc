"""Pairs of nodes: in which order all of them are tried, and which node or link the slow or dead ones point to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Pair = tuple[str, str]


def tournament(players: int, most_rounds: int | None = None) -> list[list[tuple[int, int]]]:
    """Rounds in which everybody meets everybody once and nobody waits: n - 1 of them for an even number of players.

    One player stays, the others move around a circle. With fewer rounds than that, everybody still meets equally many.
    """
    if players < 2:
        return []
    seats: list[int | None] = [*range(players), *([None] if players % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds[:most_rounds]


@dataclass(frozen=True)
class Suspects:
    """What pairs that are too slow, or dead, have in common."""

    nodes: tuple[str, ...] = ()
    links: tuple[Pair, ...] = ()  # between nodes that are well otherwise
    everything: bool = False  # no pair is well: not a node, but what all of them share


def suspects(results: Mapping[Pair, float | None], enough: float) -> Suspects:
    """Blame by exclusion. `results` has what each pair reached, None where nothing arrived.

    A node is blamed if it does badly with at least two others, and with more than half of those that are not blamed
    themselves: then it, and not each of its partners, is the simplest explanation. A bad pair that no blamed node
    explains is a link, since with one bad pair either end could be at fault.
    """
    bad = {pair for pair, reached in results.items() if reached is None or reached < enough}
    if bad and len(bad) == len(results) and len(results) > 1:
        return Suspects(everything=True)
    blamed: list[str] = []
    left = dict.fromkeys(results)
    while True:
        counts = {node: _counts(node, left, bad) for pair in left for node in pair}
        guilty = {
            node: wrong for node, (wrong, all_of_them) in counts.items() if wrong >= 2 and 2 * wrong > all_of_them
        }
        if not guilty:
            break
        # The most bad pairs; between equals, the larger part of its pairs.
        worst = max(sorted(guilty), key=lambda node: (guilty[node], guilty[node] / counts[node][1]))
        blamed.append(worst)
        left = {pair: None for pair in left if worst not in pair}
    return Suspects(tuple(sorted(blamed)), tuple(sorted(pair for pair in left if pair in bad)))


def _counts(node: str, pairs: Mapping[Pair, None], bad: set[Pair]) -> tuple[int, int]:
    own = [pair for pair in pairs if node in pair]
    return sum(pair in bad for pair in own), len(own)
