"""A cluster is a path, a name, or this machine."""

import os

import pytest

from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError

TEXT = """\
name: small
nodes: 2
gpus_per_node: 4
gpu: {name: My GPU, memory_gib: 40, compute_capability: [8, 0]}
cpu_cores: 64
memory_gib: 512
scheduler: {kind: slurm, partition: gpu}
"""


def test_a_cluster_written_and_read_again_is_equal(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(TEXT)
    cluster = Cluster.load(path)
    assert cluster.gpu_name == "My GPU"
    (tmp_path / "again.yaml").write_text(cluster.to_yaml())
    assert Cluster.load(tmp_path / "again.yaml") == cluster


def test_a_cluster_is_found_by_name_and_a_near_miss_is_told(tmp_path):
    (tmp_path / "small.yaml").write_text(TEXT)
    assert Cluster.load("small", tmp_path).nodes == 2
    with pytest.raises(InputError, match="did you mean 'small'") as caught:
        Cluster.load("smal", tmp_path)
    assert caught.value.details["field"] == "--cluster"


def test_without_any_cluster_file_the_error_says_so(tmp_path):
    with pytest.raises(InputError, match="none is known here"):
        Cluster.load("small", tmp_path)


@pytest.mark.parametrize(
    ("replace", "by", "field", "words"),
    [
        ("nodes: 2", "nods: 2", "nods", "did you mean 'nodes'"),
        ("kind: slurm", "kind: slrm", "scheduler.kind", "did you mean 'slurm'"),
        ("nodes: 2", "nodes: 0", "nodes", "at least 1"),
        ("cpu_cores: 64\n", "", "cpu_cores", "missing"),
        ("memory_gib: 40", "memory_gb: 40", "gpu.memory_gib", "missing"),
        ("memory_gib: 40", "memory_gib: 40, nmae: x", "gpu.nmae", "did you mean 'name'"),
        ("memory_gib: 40", "memory_gib: forty", "gpu.memory_gib", "a number"),
        ("gpu: {name: My GPU, memory_gib: 40, compute_capability: [8, 0]}", "gpu: 5", "gpu", "allowed: text"),
    ],
)
def test_what_is_wrong_is_named_where_it_is_written(tmp_path, replace, by, field, words):
    path = tmp_path / "small.yaml"
    path.write_text(TEXT.replace(replace, by))
    with pytest.raises(InputError) as caught:
        Cluster.load(path)
    details = caught.value.details
    assert (details["file"], details["field"]) == (str(path), field)
    assert {"found", "allowed"} <= details.keys()
    assert words in caught.value.message
    assert "GpuNumbers" not in caught.value.message


def test_a_near_miss_of_a_gpu_key_is_told_although_a_name_alone_would_do(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(TEXT.replace("memory_gib: 40", "memry_gib: 40"))
    with pytest.raises(InputError, match="did you mean 'memory_gib'") as caught:
        Cluster.load(path)
    assert "allowed: text" not in caught.value.message


def test_this_machine_is_detected():
    cluster = Cluster.detect()
    assert 1 <= cluster.cpu_cores <= (os.cpu_count() or 1)
    assert cluster.memory_gib > 0
    assert cluster.nodes == 1
    assert (cluster.gpus_per_node > 0) == (cluster.gpu is not None)
