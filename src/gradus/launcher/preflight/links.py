"""Links: whether nodes reach each other, whether what they exchange is right, how fast, and over which network."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gradus.hardware.links import Link, link_of
from gradus.launcher.preflight.pairs import Pair, suspects
from gradus.launcher.preflight.report import Finding, Heard
from gradus.schema.cluster import Cluster

# Half: a link that lost half its lanes, or trained down one generation, runs at half or less; what other jobs take on a
# shared network, and what a protocol takes of the quoted number, is less than that.
SLOW = 0.5
# Over TCP between CPUs, where a busy core can halve it by itself: a port that fell back from 10 to 1 Gb/s has a tenth.
SLOW_OVER_TCP = 0.2


def connections(heard: Sequence[Heard]) -> Iterator[Finding]:
    """Whether each node can open a connection to each other one, both ways."""
    if len(heard) < 2:
        return
    names = [node.name for node in heard]
    by_fact = {node.facts.node: node.name for node in heard}
    whys: dict[Pair, str] = {}
    for node in heard:
        for other, why in node.said["unreachable"].items():
            there = by_fact.get(other, other)
            whys.setdefault(_pair(node.name, there), f"{node.name} cannot connect to {there} ({why})")
    results = {_pair(a, b): None if _pair(a, b) in whys else 1.0 for a in names for b in names if a < b}
    yield from _blamed("connections", results, 0.5, "cannot be reached by most other nodes", whys)
    if not whys:
        yield Finding("connections", "ok", f"each of {len(heard)} nodes can connect to each other one")


def _blamed(
    check: str, results: Mapping[Pair, float | None], enough: float, what: str, whys: Mapping[Pair, str]
) -> Iterator[Finding]:
    found = suspects(results, enough)
    first = next(iter(whys.values()), "")
    if found.everything:
        yield Finding(check, "error", f"no pair of nodes is well, for example: {first}")
    for name in found.nodes:
        of_it = [why for pair, why in whys.items() if name in pair]
        text = f"{name} {what}" + (f", for example: {of_it[0]}" if of_it else "")
        yield Finding(check, "error", text, (name,))
    for pair in found.links:
        text = f"{whys[pair]}, while both are well with other nodes" if len(results) > 1 else whys[pair]
        yield Finding(check, "error", text, link=pair, measured=results[pair])


def measurements(names: Sequence[str], heard: Sequence[Heard], cluster: Cluster | None) -> Iterator[Finding]:
    """What ranks have found."""
    ranks = [(node, rank) for node in heard for rank in node.ranks]
    if not ranks:
        if len(heard) > 1 or len(names) > 1:
            yield Finding("all-reduce", "note", "not tried, since not every node can be reached")
        return
    yield from _ended(heard, ranks)
    yield from _exact(ranks)
    over_gpus = any(rank.get("backend") == "nccl" for _, rank in ranks)
    if len(heard) > 1:
        yield from _pairs(names, heard, cluster, over_gpus)
    for where, given, title in (("node", "intra", "inside each node"), ("world", "inter", "over all ranks")):
        yield from _bandwidth(ranks, where, _promise(cluster, given) if over_gpus else None, title)
    yield from _fabric(heard, cluster)


def _ended(heard: Sequence[Heard], ranks: Sequence[tuple[Heard, Mapping[str, Any]]]) -> Iterator[Finding]:
    """Ranks that left badly, or not at all. One that was still loading torch is slow, and keeps all others waiting."""
    left = [(node, rank) for node, rank in ranks if rank.get("problem") and not rank.get("hung")]
    hung = [(node, rank) for node, rank in ranks if rank.get("hung")]
    for node, rank in left:
        blamed = (node.name,) if len({node.name for node, _ in left}) < len(heard) else ()
        yield Finding("ranks", "error", f"rank {rank.get('rank', '?')} on {node.name} {rank['problem']}", blamed)
    loading = list(dict.fromkeys(node.name for node, rank in hung if rank["stage"] == "started"))
    if loading and not left:
        text = f"{', '.join(loading)}: torch was not loaded in the time that was left, so that not everything was tried"
        yield Finding("ranks", "warning", text, tuple(loading))
    elif hung and not left:
        node, rank = hung[0]
        text = f"rank {rank.get('rank', '?')} on {node.name} (and {len(hung) - 1} more): {rank['problem']}"
        yield Finding("ranks", "error", text)


def _exact(ranks: Sequence[tuple[Heard, Mapping[str, Any]]]) -> Iterator[Finding]:
    rows = [(node, row) for node, rank in ranks for row in rank["rows"]]
    wrong = [(node, row) for node, row in rows if row["wrong"]]
    if wrong:
        _, row = wrong[0]
        text = f"{row['wrong']} elements of an {row['operation']} of {row['bytes']} bytes of {row['dtype']} are wrong"
        yield Finding("all-reduce", "error", text, measured=row["wrong"], promised=0, unit="elements")
    elif rows:
        kinds = sorted({row["dtype"] for _, row in rows})
        text = f"sums over {rows[-1][1]['ranks']} ranks are exact ({', '.join(kinds)}; {len(rows)} of them)"
        yield Finding("all-reduce", "ok", text, measured=0, promised=0, unit="elements")


def _pairs(names: Sequence[str], heard: Sequence[Heard], cluster: Cluster | None, over_gpus: bool) -> Iterator[Finding]:
    results = pair_results(names, heard)
    if not results:
        return
    reached = sorted(value for value in results.values() if value is not None)
    median = statistics.median(reached) if reached else 0.0
    link = _promise(cluster, "inter")
    share_a_host = len({node.facts.identity for node in heard}) < len(heard)
    promised = None
    if link is not None and cluster is not None and over_gpus:
        promised = link.gb_per_second * cluster.links.nics_per_node
    part = SLOW if over_gpus else SLOW_OVER_TCP
    enough = part * max(promised or 0.0, median)
    if share_a_host:
        enough = 0.0  # they take the processor from each other: only what is dead can be told
    slowest = min(results, key=lambda pair: results[pair] or 0.0)
    against = f"the cluster file promises {promised:g} GB/s" if promised else f"the median is {median:.3g} GB/s"
    whys = {
        pair: f"{pair[0]} and {pair[1]} reach {value:.3g} GB/s, and {against}"
        if value is not None
        else f"nothing arrives between {pair[0]} and {pair[1]}"
        for pair, value in results.items()
        if value is None or value < enough
    }
    yield from _blamed("pairs", results, enough, f"is slow with most other nodes (less than {part:g} of it)", whys)
    if not whys:
        if len(results) == 1:
            text = f"{slowest[0]} and {slowest[1]} exchange {median:.3g} GB/s in each direction"
        else:
            text = f"{len(results)} pairs of nodes exchange {median:.3g} GB/s in each direction (median; slowest "
            text += f"{results[slowest]:.3g}, {slowest[0]} and {slowest[1]})"
        if promised:
            text += f"; {against}, and less than half of that is an error"
        elif share_a_host:
            text += "; the nodes share one machine, so only whether data arrives is judged"
        elif link is not None:
            text += f"; over TCP between CPUs, which does not reach the {link.gb_per_second:g} GB/s of {link.name}"
        yield Finding("pairs", "ok", text, measured=median, promised=promised, unit="GB/s")


def pair_results(names: Sequence[str], heard: Sequence[Heard]) -> dict[Pair, float | None]:
    """What each pair of nodes reached in the slower direction, over all ranks of a node together."""
    sums: dict[tuple[str, str], float | None] = {}
    for node in heard:
        for rank in node.ranks:
            for other, reached in rank["pairs"]:
                key = (node.name, names[other])
                before = sums.get(key, 0.0)
                sums[key] = None if reached is None or before is None else before + reached
    found: dict[Pair, float | None] = {}
    for (one, other), value in sums.items():
        pair = _pair(one, other)
        before = found.get(pair, float("inf"))
        found[pair] = None if value is None or before is None else min(before, value)
    return found


def _bandwidth(
    ranks: Sequence[tuple[Heard, Mapping[str, Any]]], where: str, link: Link | None, title: str
) -> Iterator[Finding]:
    by_node: dict[str, float] = {}
    for node, rank in ranks:
        for row in rank["rows"]:
            if row.get("where") == where:
                by_node[node.name] = row["bus_gb_per_second"]
    if not by_node:
        return
    median = statistics.median(by_node.values())
    promised = link.gb_per_second if link is not None and where == "node" else None
    slow = {name: value for name, value in by_node.items() if value < SLOW * max(promised or 0.0, median)}
    for name, value in slow.items():
        against = (
            f"{link.name} is promised, {promised:g} GB/s" if promised and link else f"the others reach {median:.1f}"
        )
        text = f"all-reduce {title}: {name} reaches {value:.1f} GB/s on its links; {against}"
        yield Finding("bandwidth", "error", text, (name,), None, value, promised or median, "GB/s")
    if not slow:
        text = f"all-reduce {title}: {median:.2f} GB/s on the links (bus bandwidth, median over nodes)"
        text += f"; {promised:g} GB/s promised, and less than half is an error" if promised else ""
        yield Finding("bandwidth", "ok", text, measured=median, promised=promised, unit="GB/s")


def _fabric(heard: Sequence[Heard], cluster: Cluster | None) -> Iterator[Finding]:
    """A fast network that is there, or promised, while NCCL goes through the kernel's sockets."""
    said = [(node, node.said["nccl"]) for node in heard if node.said.get("nccl")]
    if len(heard) < 2 or not said:
        return
    link = _promise(cluster, "inter")
    promised = link.name if link is not None and not link.name.startswith("Ethernet") else None
    fallen = [(node, nccl) for node, nccl in said if nccl["over_sockets"] and (node.facts.fabric or promised)]
    for node, nccl in fallen:
        why = f"; NCCL says: {nccl['reasons'][0]}" if nccl["reasons"] else ""
        there = f"{node.facts.fabric[0]} is active" if node.facts.fabric else f"the cluster file promises {promised}"
        blamed = (node.name,) if len(fallen) < len(heard) else ()  # all of them: not one node, but how it is set up
        yield Finding("network", "error", f"{node.name}: NCCL talks over TCP sockets, though {there}{why}", blamed)
    if not fallen:
        used = Counter(nccl["network"] for _, nccl in said)
        text = ", ".join(f"{name or 'an unknown network'} on {count} nodes" for name, count in used.most_common())
        yield Finding("network", "warning" if len(used) > 1 else "ok", f"NCCL uses {text}")


def _promise(cluster: Cluster | None, which: str) -> Link | None:
    return link_of(getattr(cluster.links, which)) if cluster is not None else None


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one <= other else (other, one)
