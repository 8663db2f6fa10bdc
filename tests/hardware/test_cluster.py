"""The clusters that gradus brings along, and what the names in a cluster file stand for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gradus
from gradus.hardware.catalogue import find_gpu, peak_flops
from gradus.hardware.cluster import gpu_of, shipped_clusters
from gradus.hardware.links import link_of
from gradus.schema.cluster import Cluster, GpuNumbers

NAMES = [
    "dgx-h100",
    "dgx-h200",
    "frontera",
    "frontier",
    "leonardo",
    "lisa",
    "osu-ri2",
    "param-rudra",
    "selene",
    "summit",
]
NAMES += ["tcg-crest", "vista"]


def test_these_clusters_come_along() -> None:
    assert sorted(shipped_clusters()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_cluster_loads_from_any_folder_with_names_that_the_catalogues_know(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cluster = Cluster.load(name)
    assert cluster.name == name
    assert (gpu_of(cluster) is not None) == (cluster.gpus_per_node > 0)
    assert link_of(cluster.links.inter) is not None
    assert cluster.gpus_per_node <= 1 or link_of(cluster.links.intra) is not None
    assert cluster.price_per_gpu_hour is None


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_cluster_says_where_its_numbers_come_from(name: str) -> None:
    text = shipped_clusters()[name].read_text()
    assert re.search(r"^# Sources?: .{10,}", text, re.MULTILINE)


def test_gpus_of_well_known_machines_add_up() -> None:
    counts = {name: Cluster.load(name) for name in NAMES}
    totals = {name: cluster.nodes * cluster.gpus_per_node for name, cluster in counts.items()}
    assert totals["leonardo"] == 13_824
    assert totals["summit"] == 27_648
    assert totals["param-rudra"] == 54
    assert totals["dgx-h100"] == 4_608
    assert totals["frontera"] == 0


def test_the_published_failure_rate_of_llama_3_is_one_interruption_in_three_hours_on_its_2048_nodes() -> None:
    rate = Cluster.load("dgx-h100").failures_per_node_day
    assert rate is not None
    assert rate * 2048 * 54 == pytest.approx(419, rel=2e-3)


def test_the_repositorys_folder_and_the_packages_are_one() -> None:
    folder = Path(gradus.__file__).parents[2] / "clusters"
    assert folder.resolve() == next(iter(shipped_clusters().values())).parent.resolve()


def test_an_own_file_of_the_same_name_wins(tmp_path: Path) -> None:
    own = Cluster.load("leonardo").model_copy(update={"nodes": 4})
    own.save(tmp_path / "leonardo.yaml")
    assert Cluster.load("leonardo", folder=tmp_path).nodes == 4


def site(**gpu: object) -> Cluster:
    return Cluster.model_validate({"name": "s", "gpus_per_node": 4, "gpu": gpu, "cpu_cores": 8, "memory_gib": 64})


def test_numbers_of_a_cluster_go_before_those_of_the_catalogue() -> None:
    gpu = gpu_of(site(name="NVIDIA H200", memory_gib=139.8, peak_tflops={"bf16": 900}, power_watts=500))
    known = find_gpu("H200")
    assert gpu is not None
    assert known is not None
    assert gpu.memory_gb == pytest.approx(139.8 * 2**30 / 1e9)
    assert (peak_flops(gpu, "bf16"), peak_flops(gpu, "fp8")) == (900e12, peak_flops(known, "fp8"))
    assert (gpu.power_watts, gpu.multiprocessors) == (500, known.multiprocessors)
    assert gpu.memory_bandwidth_gb_per_second == known.memory_bandwidth_gb_per_second
    assert gpu.sources["power"] == gpu.sources["peak_tflops"] == "the cluster file"
    assert gpu.sources["chip"] == known.sources["chip"]


def test_a_gpu_that_nobody_knows_has_what_its_cluster_says_and_no_more() -> None:
    gpu = gpu_of(site(name="Own", memory_gib=40, memory_bandwidth_gb_per_second=1500, peak_tflops={"fp16": 100}))
    assert gpu is not None
    assert (peak_flops(gpu, "fp16"), peak_flops(gpu, "bf16")) == (100e12, None)
    assert (gpu.memory_bandwidth_gb_per_second, gpu.power_watts) == (1500, None)


def test_without_gpus_there_is_none() -> None:
    assert gpu_of(Cluster.load("frontera")) is None
    numbers = GpuNumbers(name="Own", memory_gib=40)
    assert gpu_of(Cluster(name="s", gpus_per_node=0, gpu=numbers, cpu_cores=8, memory_gib=64)) is None
