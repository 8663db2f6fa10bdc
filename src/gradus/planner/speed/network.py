"""Network: how long collectives take, by the links that a group of ranks has. No torch.

NCCL has a cost model of its own, by which it chooses how to send; this is that model (NCCL src/graph/tuning.cc, commit
01afd20a): the time is a latency and the bytes over a bandwidth, for rings and trees, each in three protocols, and
the fastest counts. With n ranks on N nodes, S bytes, and B bytes per second in one direction on the narrowest link:

    ring all-reduce                      2(n−1) hops      2(n−1)/n · S/B
    ring all-gather, reduce-scatter       (n−1) hops       (n−1)/n · S/B
    tree all-reduce      2(n/N − 1 + log2 N) hops             2 · S/B
    all-to-all                            (n−1) hops       (n−1)/n · S/B, S being what a rank sends to all

GPUs that are joined in pairs, without a switch, reach each other over the links of their pair alone: n of the g GPUs of
a node use (n−1)/(g−1) of what a GPU has, and a message from one to the next 1/(g−1).

A group that spans nodes shares the node's ports with the groups beside it: with one rank of it on each node of eight,
it has an eighth of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from gradus.hardware.links import Link, link_of
from gradus.parallel.layout import DIMENSIONS
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Mesh

# Of what vendors quote, what a ring reaches. NVLink: NCCL counts 20 of 25 GB/s for each link up to Ampere, 20.6 on
# Hopper, 40.1 of 50 on Blackwell (src/graph/topo.h); 8 × H200 measured 367.6 of 450 GB/s with rings
# (stas00/ml-engineering@c53741b network/benchmarks/results/all-reduce-8xH200.md). PCIe: NCCL counts 12 of 15.75 GB/s
# (the same file). Networks: NCCL counts 12 of 12.5 GB/s for 100 Gbit/s (the same file).
REACHED = {"nvlink": 0.81, "pcie": 0.76, "network": 0.96, "other": 0.8}
# NVSwitch of the Hopper generation and after adds up on the way: 482 against 367.6 GB/s of an all-reduce over 8 × H200
# (stas00/ml-engineering, the same file).
IN_SWITCH = 482.26 / 367.61
# Latencies of a hop where nobody quotes one: a message through the kernel's TCP stack takes some 20 to 50 µs.
UNKNOWN_LATENCY_US = {"nvlink": 1.9, "pcie": 2.5, "network": 30.0, "other": 2.5}
# Where the cluster says nothing at all.
UNKNOWN_INTRA = Link("PCIe 4.0 x16", 31.5, 2.5, {"bandwidth": "assumed", "latency": "assumed"})
UNKNOWN_INTER = Link("Ethernet 10", 1.25, None, {"bandwidth": "assumed"})


# Ranks that share a GPU talk through gloo, which copies to the host, adds up there and copies back. Assumed.
THROUGH_THE_HOST = 2e9


class Protocol(NamedTuple):
    """A way to send of NCCL's. Latencies of a hop are those of LL128 in the catalogue; others relative to it."""

    ring_base_us: float
    tree_base_us: float
    hop: float  # of a ring; relative
    tree_hop: float
    ring_share: float  # of the bandwidth
    tree_share: float


# baseLat, hwLat (for a network: LL 2.7, LL128 4.0, Simple 9.6 µs) and the bandwidth corrections of tuning.cc.
PROTOCOLS = (
    Protocol(3.6, 4.4, 0.67, 1.25, 1 / 4, 0.9 / 3.8),  # LL: eight bytes in sixteen carry data, and no fences
    Protocol(10.0, 4.4, 1.0, 2.1, 0.92, 0.9 * 0.915),  # LL128: 120 of 128 bytes
    Protocol(8.4, 0.0, 2.4, 12.5, 1.0, 0.9),  # Simple: chunks, and a fence for each
)


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other: how many, on how many nodes."""

    size: int
    nodes: int = 1

    @property
    def per_node(self) -> float:
        return self.size / self.nodes


@dataclass(frozen=True)
class Fabric:
    """The links of a cluster, as fast as they are in practice."""

    intra_bytes_per_second: float  # of a GPU, in one direction
    inter_bytes_per_second: float  # of a node, over all its ports, in one direction
    intra_latency: float  # seconds of a hop
    inter_latency: float
    ranks_per_node: int
    in_switch: bool = False  # the switch inside a node adds up
    peers: int = 1  # that share a GPU's links: the others of its node, where nothing switches between them
    assumed: tuple[str, ...] = ()  # what the cluster did not say

    def bandwidth(self, group: Group) -> float:
        """Bytes per second in one direction that a ring of the group has at its narrowest."""
        inside = self.intra_bytes_per_second * min(1.0, max(1.0, group.per_node - 1) / self.peers)
        if group.nodes == 1:
            return inside
        ports = self.inter_bytes_per_second * group.per_node / max(1, self.ranks_per_node)
        return ports if group.per_node <= 1 else min(inside, ports)


SWITCHED = 8  # GPUs of a node: as in DGX and HGX systems with NVSwitch


def fabric_of(cluster: Cluster, ranks_per_gpu: int = 1) -> Fabric:
    """The links of a cluster; slow ones are assumed where it names none."""
    assumed = []
    intra, inter = link_of(cluster.links.intra), link_of(cluster.links.inter)
    if intra is None:
        intra = UNKNOWN_INTRA
        assumed.append(f"links.intra is not known: {intra.name} assumed")
    if inter is None:
        inter = UNKNOWN_INTER
        assumed.append(f"links.inter is not known: {inter.name} assumed")
    inside, outside = _kind(intra), "network"
    names_switch = "switch" in str(cluster.links.intra).lower()
    meshed = 1 < cluster.gpus_per_node < intra.meshed_below and not names_switch
    ranks = max(1, cluster.gpus_per_node) * ranks_per_gpu
    reached = intra.gb_per_second * 1e9 * REACHED[inside]
    if ranks_per_gpu > 1:
        reached = min(reached, THROUGH_THE_HOST / ranks_per_gpu)
        assumed.append("links.intra is nothing to ranks that share a GPU: 2 GB/s through the host assumed")
    return Fabric(
        intra_bytes_per_second=reached,
        inter_bytes_per_second=inter.gb_per_second * 1e9 * REACHED[outside] * cluster.links.nics_per_node,
        intra_latency=_latency(intra, inside),
        inter_latency=_latency(inter, outside),
        ranks_per_node=ranks,
        peers=cluster.gpus_per_node - 1 if meshed and ranks_per_gpu == 1 else 1,
        # From Hopper on switches add up.
        in_switch=inside == "nvlink"
        and intra.gb_per_second >= 450
        and (names_switch or cluster.gpus_per_node >= SWITCHED),
        assumed=tuple(assumed),
    )


def _kind(link: Link) -> str:
    name = link.name.lower()
    if "nvlink" in name or "nvswitch" in name:
        return "nvlink"
    return "pcie" if "pci" in name else "other"


def _latency(link: Link, kind: str) -> float:
    return (UNKNOWN_LATENCY_US[kind] if link.latency_us is None else link.latency_us) * 1e-6


@functools.lru_cache(maxsize=4096)
def group_of(mesh: Mesh, dimensions: tuple[str, ...], ranks_per_node: int) -> Group:
    """The group of the first rank along these dimensions. `expert` stands alone: neighbours of shard × context."""
    if dimensions == ("expert",):
        members = [number * mesh.tensor for number in range(mesh.expert)]
    else:
        stride, steps = 1, []
        for name in reversed(DIMENSIONS):
            ways = getattr(mesh, name)
            if name in dimensions and ways > 1:
                steps.append([number * stride for number in range(ways)])
            stride *= ways
        members = [sum(offsets) for offsets in product(*steps)]
    return Group(len(members), len({rank // ranks_per_node for rank in members}))


def all_reduce(size: float, group: Group, fabric: Fabric) -> float:
    """Seconds until every rank has the sum of `size` bytes of each."""
    n = group.size
    if n == 1 or size <= 0:
        return 0.0
    gain = IN_SWITCH if fabric.in_switch and group.nodes == 1 and n > 2 else 1.0
    bandwidth = fabric.bandwidth(group)
    ring = _ring(2 * size * (n - 1) / n, 2, group, fabric, gain)
    if n == 2:
        return ring
    hops_inside, hops_outside = 2 * (group.per_node - 1), 2 * math.log2(group.nodes)
    trees = (
        protocol.tree_base_us * 1e-6
        + protocol.tree_hop * (hops_inside * fabric.intra_latency + hops_outside * fabric.inter_latency)
        + 2 * size / (bandwidth * protocol.tree_share)
        for protocol in PROTOCOLS
    )
    return min(ring, *trees)


def all_gather(size: float, group: Group, fabric: Fabric) -> float:
    """Seconds until every rank has all of `size` bytes, of which each had its share."""
    if group.size == 1 or size <= 0:
        return 0.0
    return _ring(size * (group.size - 1) / group.size, 1, group, fabric)


def reduce_scatter(size: float, group: Group, fabric: Fabric) -> float:
    """Seconds until every rank has its share of the sum of `size` bytes of each."""
    return all_gather(size, group, fabric)


def all_to_all(size: float, group: Group, fabric: Fabric) -> float:
    """Seconds until every rank has got what others had for it, each having `size` bytes for all of them.

    Most of it leaves the node where the group spans several; inside, every pair has a way of its own.
    """
    n = group.size
    if n == 1 or size <= 0:
        return 0.0
    latency = PROTOCOLS[2].ring_base_us * 1e-6 + (n - 1) * 1e-6  # a launch, and a message to each
    if group.nodes == 1:
        return latency + size * (n - 1) / n / fabric.bandwidth(group)
    outside = size * (n - group.per_node) / n
    return latency + fabric.inter_latency + outside / (fabric.inter_bytes_per_second / fabric.ranks_per_node)


def send(size: float, fabric: Fabric, *, crosses_nodes: bool) -> float:
    """Seconds that `size` bytes take from one rank to the next, all ranks of a node doing so at the same time."""
    if size <= 0:
        return 0.0
    base = PROTOCOLS[2].ring_base_us * 1e-6
    if crosses_nodes:
        return base + fabric.inter_latency + size / (fabric.inter_bytes_per_second / fabric.ranks_per_node)
    return base + fabric.intra_latency + size * fabric.peers / fabric.intra_bytes_per_second


def _ring(moved: float, rounds: int, group: Group, fabric: Fabric, gain: float = 1.0) -> float:
    hops = rounds * (group.size - 1)
    outside = rounds * (group.nodes - 1) if group.nodes > 1 else 0
    bandwidth = fabric.bandwidth(group)
    return min(
        protocol.ring_base_us * 1e-6
        + protocol.hop * ((hops - outside) * fabric.intra_latency + outside * fabric.inter_latency)
        + moved / (bandwidth * protocol.ring_share * (gain if protocol is PROTOCOLS[-1] else 1.0))
        for protocol in PROTOCOLS
    )
