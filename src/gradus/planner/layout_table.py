"""Layout table: node by node, which ranks hold which stage, shard, context part and tensor slice; and in words, which
groups lie inside a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from gradus.parallel.layout import DIMENSIONS, group_size, node_of, nodes_spanned, place_of
from gradus.parallel.stages import stages_of
from gradus.record.format import count_text
from gradus.schema.plan import Mesh, Plan

MOST_LINES = 24  # of a table for people; where it would be longer, what repeats is folded
SHOWN_AT_THE_END = 4
ALONG = (*DIMENSIONS, "expert")
COLUMNS = {"replicate": "replica", "pipeline": "stage"}  # what people call a number along a dimension
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight")


@dataclass(frozen=True)
class Line:
    """Neighbouring ranks of a node that hold all combinations of these numbers."""

    node: int
    ranks: range
    numbers: dict[str, Sequence[int]]  # along each dimension

    def document(self) -> dict[str, Any]:
        return {"node": self.node, "ranks": list(self.ranks), **{name: list(n) for name, n in self.numbers.items()}}


def layout_document(plan: Plan, ranks_per_node: int) -> dict[str, Any]:
    """All of it, nothing folded."""
    lines = [line.document() for line in layout_lines(plan.mesh, ranks_per_node)]
    return {"ranks_per_node": ranks_per_node, "lines": lines, "summary": layout_words(plan, ranks_per_node)}


def layout_text(plan: Plan, ranks_per_node: int) -> str:
    """The layout for people: a table, folded where it is long, and the summary."""
    mesh = plan.mesh
    lines, notes = _folded(list(layout_lines(mesh, ranks_per_node)), mesh, ranks_per_node)
    split = [name for name in ALONG if getattr(mesh, name) > 1]
    rows = [["node", "ranks", *(COLUMNS.get(name, name) for name in split)]]
    for line in lines:
        if line is None:
            rows.append(["…"] * len(rows[0]))
        else:
            numbers = {**line.numbers, "pipeline": _stages(line.numbers["pipeline"], plan)}
            rows.append([str(line.node), _span(line.ranks), *(_span(numbers[name]) for name in split)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*table, *notes, "", *layout_words(plan, ranks_per_node)])


def layout_words(plan: Plan, ranks_per_node: int) -> list[str]:
    """How many stages a node has, and which groups lie inside one."""
    mesh = plan.mesh
    nodes = _nodes(mesh, ranks_per_node)
    on = f"{nodes} nodes of {ranks_per_node}" if nodes > 1 else "one node"
    words = [f"{count_text(mesh.world_size, 'rank')} on {on}: {mesh}."]
    if mesh.pipeline > 1:
        words.append(_stages_in_words(plan, ranks_per_node))
    for name in ("tensor", "context", "expert", "shard", "pipeline", "replicate"):
        if getattr(mesh, name) > 1:
            spanned = nodes_spanned(mesh, name, ranks_per_node)
            across = f"{name} groups of {group_size(mesh, [name])} ranks reach across {spanned} nodes."
            words.append(f"No {name} group across nodes." if spanned == 1 else across[0].upper() + across[1:])
    return words


def layout_lines(mesh: Mesh, ranks_per_node: int) -> Iterator[Line]:
    for node in range(_nodes(mesh, ranks_per_node)):
        first = node * ranks_per_node
        for ranks in _boxes(range(first, min(first + ranks_per_node, mesh.world_size)), mesh):
            places = [place_of(rank, mesh) for rank in ranks]
            yield Line(node, ranks, {name: sorted({getattr(place, name) for place in places}) for name in ALONG})


def _nodes(mesh: Mesh, ranks_per_node: int) -> int:
    return node_of(mesh.world_size - 1, ranks_per_node) + 1


def _boxes(ranks: range, mesh: Mesh) -> Iterator[range]:
    """Neighbours in as few parts as can be, such that each part holds all combinations of its numbers.

    Replicas and stages have a part of their own, unless each is a single rank.
    """
    first, last = place_of(ranks[0], mesh), place_of(ranks[-1], mesh)
    outer = next((name for name in DIMENSIONS if getattr(first, name) != getattr(last, name)), None)
    if outer is None:
        yield ranks
        return
    inner = group_size(mesh, DIMENSIONS[DIMENSIONS.index(outer) + 1 :])  # ranks in one step along `outer`
    whole = ranks.start % inner == 0 and ranks.stop % inner == 0
    if whole and (inner == 1 or outer not in ("replicate", "pipeline")):
        yield ranks
        return
    cuts = [ranks.start, *range(ranks.start - ranks.start % inner + inner, ranks.stop, inner), ranks.stop]
    for start, stop in pairwise(cuts):
        yield from _boxes(range(start, stop), mesh)


def _folded(lines: list[Line], mesh: Mesh, ranks_per_node: int) -> tuple[list[Line | None], list[str]]:
    """As many lines as people read (None: some are left out), and what is to be said of the rest."""
    notes = []
    of_a_replica = mesh.world_size // mesh.replicate
    nodes = _nodes(mesh, ranks_per_node)
    if len(lines) > MOST_LINES and mesh.replicate > 1 and mesh.world_size % ranks_per_node == 0:
        # What repeats: a replica on its own nodes, or a node with its own replicas.
        repeats = max(1, of_a_replica // ranks_per_node)
        if of_a_replica % ranks_per_node == 0 or ranks_per_node % of_a_replica == 0:
            lines = [line for line in lines if line.node < repeats]
            shown = max(1, ranks_per_node // of_a_replica)
            these = f"nodes 0-{repeats - 1}" if repeats > 1 else "node 0"
            rest = f"Nodes {_span(range(repeats, nodes))} and replicas {_span(range(shown, mesh.replicate))}"
            notes.append(f"{rest} repeat {these}.")
    if len(lines) <= MOST_LINES:
        return [*lines], notes
    left_out = len(lines) - MOST_LINES
    notes.append(f"{left_out} lines like these are left out; --json has all.")
    return [*lines[: MOST_LINES - SHOWN_AT_THE_END], None, *lines[-SHOWN_AT_THE_END:]], notes


def _stages(places: Sequence[int], plan: Plan) -> list[int]:
    """The stages of the ranks at these places of the pipeline, of which each may have several."""
    ways, per_rank = plan.mesh.pipeline, plan.stages_per_rank
    return sorted(stage for place in places for stage in stages_of(place, ways, per_rank))


def _stages_in_words(plan: Plan, ranks_per_node: int) -> str:
    held: dict[int, set[int]] = {}
    for rank in range(plan.mesh.world_size):
        held.setdefault(node_of(rank, ranks_per_node), set()).update(
            _stages([place_of(rank, plan.mesh).pipeline], plan)
        )
    fewest, most = min(map(len, held.values())), max(map(len, held.values()))
    each = f", {plan.stages_per_rank} on each rank" if plan.stages_per_rank > 1 else ""
    if fewest == most:
        count = WORDS[most] if most < len(WORDS) else str(most)
        return f"{count.capitalize()} stage{'s' if most > 1 else ''} per node{each}."
    return f"{fewest} to {most} stages per node{each}."


def _span(numbers: Sequence[int]) -> str:
    """Numbers in order as people write them: 0-3, 8."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)
