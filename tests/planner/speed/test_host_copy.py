"""For how long a copy to host memory stops training."""

from __future__ import annotations

import pytest

from gradus.planner.speed.device import device_of
from gradus.planner.speed.host_copy import host_copy
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Plan


def rate(gpu: str, plan: Plan) -> float:
    device = device_of(Cluster(name="site", gpus_per_node=8, gpu=gpu, cpu_cores=64, memory_gib=512))
    return host_copy(plan, device).bytes_per_second / 1e9


def test_a_gpu_copies_as_fast_as_its_link_to_the_host():
    """H200: 268,435,456 bytes to pinned memory in 4.877 ms (benchmarks/measured/h200_speeds.json)."""
    assert rate("H200", Plan()) == pytest.approx(268_435_456 / 4.877e-3 / 1e9, rel=0.01)
    assert rate("A100-SXM4-80GB", Plan()) < 31.5, "PCIe 4.0"
    assert rate("V100-SXM2-32GB", Plan()) < 15.75, "PCIe 3.0"


def test_ranks_on_one_gpu_share_its_link():
    assert rate("H200", Plan(ranks_per_gpu=2)) == rate("H200", Plan()) / 2


def test_what_is_in_host_memory_does_not_cross_the_link():
    offloaded = rate("H200", Plan(offload="cpu"))
    assert offloaded == host_copy(Plan(), None).bytes_per_second / 1e9 == 12.5
