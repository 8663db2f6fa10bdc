"""Times of collectives: the formulas they tend to, what was published of them, and who shares which link."""

from __future__ import annotations

import pytest

from gradus.parallel.layout import groups, node_of
from gradus.planner.speed.network import (
    Fabric,
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    fabric_of,
    group_of,
    reduce_scatter,
    send,
)
from gradus.schema.cluster import Cluster, Links
from gradus.schema.plan import Mesh

MIB, GIB = 2**20, 2**30


def cluster(intra: str | None = "NVLink 4", inter: str | None = "InfiniBand NDR", nics: int = 8) -> Cluster:
    links = Links(intra=intra, inter=inter, nics_per_node=nics)
    return Cluster(name="c", nodes=4, gpus_per_node=8, gpu="H100-SXM", cpu_cores=8, memory_gib=64.0, links=links)


FABRIC = fabric_of(cluster())


def test_a_large_all_reduce_takes_what_the_ring_formula_says():
    plain = Fabric(100e9, 100e9, 1e-6, 1e-6, 8)
    for ranks in (2, 4, 8):
        ideal = 2 * (ranks - 1) / ranks * 8 * GIB / 100e9
        assert all_reduce(8 * GIB, Group(ranks), plain) == pytest.approx(ideal, rel=0.01)


def test_a_gather_and_a_scatter_are_halves_of_an_all_reduce():
    plain = Fabric(100e9, 100e9, 1e-6, 1e-6, 8)
    halves = all_gather(GIB, Group(8), plain) + reduce_scatter(GIB, Group(8), plain)
    assert halves == pytest.approx(all_reduce(GIB, Group(8), plain), rel=0.01)


# busbw in GB/s of an all-reduce over 8 × H200, torch 2.9.1, NCCL 2.27.7
# (stas00/ml-engineering@c53741b network/benchmarks/results/all-reduce-8xH200.md); of these, only the last was used.
MEASURED = {1: 39.93, 2: 64.53, 4: 107.16, 8: 155.53, 16: 219.89, 64: 346.51, 256: 436.15, 1024: 463.58, 16384: 482.26}


@pytest.mark.parametrize("mib", MEASURED)
def test_all_reduces_inside_a_node_are_as_fast_as_published(mib):
    seconds = all_reduce(mib * MIB, Group(8), FABRIC)
    assert mib * MIB * 2 * 7 / 8 / seconds / 1e9 == pytest.approx(MEASURED[mib], rel=0.2)


def test_a_small_message_takes_as_long_as_a_smaller_one():
    assert all_reduce(8, Group(8), FABRIC) == pytest.approx(all_reduce(1024, Group(8), FABRIC), rel=0.02)
    assert all_reduce(8, Group(8), FABRIC) > 5e-6


def test_alone_or_with_nothing_to_say_no_time_passes():
    for collective in (all_reduce, all_gather, reduce_scatter, all_to_all):
        assert collective(GIB, Group(1), FABRIC) == 0.0
        assert collective(0.0, Group(8), FABRIC) == 0.0
    assert send(0.0, FABRIC, crosses_nodes=True) == 0.0


def test_groups_beside_each_other_share_the_ports_of_a_node():
    whole_nodes, one_of_each = Group(16, nodes=2), Group(2, nodes=2)
    assert FABRIC.bandwidth(one_of_each) == pytest.approx(FABRIC.inter_bytes_per_second / 8)
    assert FABRIC.bandwidth(whole_nodes) == pytest.approx(
        min(FABRIC.intra_bytes_per_second, FABRIC.inter_bytes_per_second)
    )
    one_port = fabric_of(cluster(nics=1))
    assert one_port.bandwidth(one_of_each) == pytest.approx(FABRIC.bandwidth(one_of_each) / 8)


def test_leaving_the_node_is_slower_than_staying():
    assert all_gather(GIB, Group(8, nodes=2), fabric_of(cluster(nics=1))) > 5 * all_gather(GIB, Group(8), FABRIC)
    assert send(MIB, FABRIC, crosses_nodes=True) > send(MIB, FABRIC, crosses_nodes=False)
    assert all_to_all(GIB, Group(16, nodes=2), FABRIC) > all_to_all(GIB, Group(8), FABRIC)


def test_many_small_steps_are_better_sent_along_a_tree():
    """On 512 nodes a ring of one rank each has 1,022 hops."""
    large = Group(512, nodes=512)
    hops = 2 * 511 * FABRIC.inter_latency
    assert all_reduce(1024, large, FABRIC) < hops / 10


@pytest.mark.parametrize(
    "mesh",
    [
        Mesh(replicate=2, pipeline=4, tensor=4),
        Mesh(shard=8, context=2, tensor=2),
        Mesh(replicate=2, pipeline=2, shard=4, context=2, tensor=2, expert=4),
        Mesh(replicate=3, pipeline=2, shard=2, tensor=1),
    ],
)
def test_groups_are_those_of_the_layout(mesh):
    for dimensions in [
        ("tensor",),
        ("context",),
        ("shard", "context"),
        ("replicate",),
        ("replicate", "shard", "context"),
    ]:
        first = next(group for group in groups(mesh, dimensions) if 0 in group)
        found = group_of(mesh, dimensions, 8)
        assert (found.size, found.nodes) == (len(first), len({node_of(rank, 8) for rank in first})), dimensions
    first = next(group for group in groups(mesh, ["expert"]) if 0 in group)
    assert group_of(mesh, ("expert",), 8).size == len(first)


def test_tensor_groups_stay_inside_a_node():
    assert group_of(Mesh(replicate=2, pipeline=4, tensor=4), ("tensor",), 8) == Group(4, 1)


def test_what_the_cluster_does_not_say_is_assumed_and_told():
    silent = fabric_of(cluster(intra=None, inter=None))
    assert len(silent.assumed) == 2
    assert silent.intra_bytes_per_second < FABRIC.intra_bytes_per_second / 10


def node(gpus: int, intra: str) -> Fabric:
    links = Links(intra=intra, inter="InfiniBand NDR")
    site = Cluster(name="n", nodes=2, gpus_per_node=gpus, gpu="H100-SXM", cpu_cores=8, memory_gib=64, links=links)
    return fabric_of(site)


@pytest.mark.parametrize(
    ("gpus", "intra", "adds"), [(4, "NVLink 4", False), (4, "NVSwitch 3", True), (8, "NVLink 4", True)]
)
def test_only_a_switch_adds_up(gpus, intra, adds):
    assert node(gpus, intra).in_switch is adds


def test_without_a_switch_a_pair_of_gpus_has_a_part_of_their_links():
    """Four H100: each pair is joined by six of a GPU's eighteen links."""
    four = node(4, "NVLink 4")
    assert four.intra_bytes_per_second == node(8, "NVLink 4").intra_bytes_per_second
    for ranks, part in ((2, 1 / 3), (3, 2 / 3), (4, 1.0)):
        assert four.bandwidth(Group(ranks)) == pytest.approx(four.intra_bytes_per_second * part)
    assert four.bandwidth(Group(4, nodes=2)) <= four.bandwidth(Group(2))
    switched = node(4, "NVSwitch 3")
    assert switched.bandwidth(Group(2)) == switched.intra_bytes_per_second
    for seconds in (
        lambda fabric: send(GIB, fabric, crosses_nodes=False),
        lambda fabric: all_to_all(GIB, Group(2), fabric),
        lambda fabric: all_gather(GIB, Group(2), fabric),
        lambda fabric: all_reduce(GIB, Group(2), fabric),
    ):
        assert seconds(four) == pytest.approx(3 * seconds(switched), rel=0.01)
    assert all_to_all(GIB, Group(4), four) == pytest.approx(all_to_all(GIB, Group(4), switched))


@pytest.mark.parametrize(
    ("gpus", "intra", "peers"),
    [(2, "NVLink 3", 1), (4, "NVLink 3", 3), (8, "NVLink 3", 1), (8, "Infinity Fabric MI300X", 7), (4, "NVLink 5", 1)],
)
def test_which_gpus_are_joined_in_pairs(gpus, intra, peers):
    assert node(gpus, intra).peers == peers
