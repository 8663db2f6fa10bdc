"""A cluster is a path, a name, or this machine."""

import os

import pytest

from gradus.schema.calibration import Calibration
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
GPU = "gpu: {name: My GPU, memory_gib: 40, compute_capability: [8, 0]}"


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


def test_without_any_cluster_file_those_that_come_along_are_named(tmp_path):
    with pytest.raises(InputError, match=r"Allowed: dgx-h100, .*, vista"):
        Cluster.load("small", tmp_path)
    with pytest.raises(InputError, match="did you mean 'leonardo'"):
        Cluster.load("Leonard", tmp_path)


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
        (GPU, "gpu: 5", "gpu", "allowed: text"),
        (GPU, "gpu: H100-SMX", "gpu", "did you mean 'H100-SXM'"),
        (GPU, "gpu: a100", "gpu", "did you mean 'A100-"),
        (GPU, "gpu: CPU", "gpu", "unknown GPU 'CPU'"),
        ("memory_gib: 40", "memory_gib: -1", "gpu.memory_gib", "more than 0"),
        ("memory_gib: 40", "memory_gib: 40, peak_tflops: {bf17: 9}", "gpu.peak_tflops.bf17", "did you mean 'bf16'"),
        ("memory_gib: 40", "memory_gib: 40, peak_tflops: {bf16: 0}", "gpu.peak_tflops.bf16", "more than 0"),
        ("[8, 0]", "[8]", "gpu.compute_capability", "a list as long as 2"),
        ("nodes: 2", "nodes: 2\nprice_per_gpu_hour: -1", "price_per_gpu_hour", "at least 0"),
        ("nodes: 2", "nodes: 2\nprice_per_gpu_hour: .inf", "price_per_gpu_hour", "a finite number"),
        ("nodes: 2", "nodes: 2\nlinks: {inter: InfiniBand NRD}", "links.inter", "did you mean 'InfiniBand NDR'"),
        ("nodes: 2", "nodes: 2\nlinks: {intra: nvlink}", "links.intra", "did you mean 'NVLink "),
        ("nodes: 2", "nodes: 2\nlinks: {inter: {name: x}}", "links.inter.gb_per_second", "missing"),
        ("nodes: 2", "nodes: 2\nlinks: {inter: {name: x, gb_per_second: 0}}", "links.inter.gb_per_second", "more than"),
        ("nodes: 2", "nodes: 2\nlinks: {nics_per_node: 0}", "links.nics_per_node", "at least 1"),
        ("nodes: 2", "nodes: 2\ncalibration: {factors: {comput: 1.1}}", "calibration.factors.comput", "'compute'"),
        ("nodes: 2", "nodes: 2\ncalibration: {factors: {compute: 0}}", "calibration.factors.compute", "more than 0"),
        ("nodes: 2", "nodes: 2\ncalibration: {date: today}", "calibration.date", "a day, such as"),
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
    assert "Numbers" not in caught.value.message
    assert "[key]" not in caught.value.message


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


def test_links_are_names_or_numbers(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(
        TEXT + "links: {intra: NVLink 3, inter: {name: ours, gb_per_second: 20, latency_us: 3}, nics_per_node: 2}"
    )
    links = Cluster.load(path).links
    assert (links.intra, links.inter.gb_per_second, links.nics_per_node) == ("NVLink 3", 20, 2)


def test_a_gpu_by_numbers_may_give_all_that_a_prediction_uses(tmp_path):
    path = tmp_path / "small.yaml"
    numbers = "peak_tflops: {bf16: 300, fp8: 600}, memory_bandwidth_gb_per_second: 2000, power_watts: 400"
    path.write_text(TEXT.replace("memory_gib: 40", f"memory_gib: 40, {numbers}"))
    gpu = Cluster.load(path).gpu
    assert (gpu.peak_tflops["fp8"], gpu.memory_bandwidth_gb_per_second, gpu.power_watts) == (600, 2000, 400)


CALIBRATION = Calibration(
    device="NVIDIA H200",
    software="torch 2.11.0+cu130",
    date="2026-11-15",
    factors={"compute": 1.07, "activations": 0.98},
)


def test_what_is_not_calibrated_has_a_factor_of_one():
    assert CALIBRATION.factor("compute") == 1.07
    assert CALIBRATION.factor("data") == 1.0
    assert CALIBRATION.measured
    assert not Calibration().measured


def test_saving_a_calibration_keeps_the_rest_of_the_file_with_its_comments(tmp_path):
    path = tmp_path / "small.yaml"
    text = "# our cluster\n" + TEXT.replace("nodes: 2", "nodes: 2   # since May\n# the old ones are gone")
    text += "failures_per_node_day: 0.0  # none yet\n"
    path.write_text(text)
    before = Cluster.load(path)
    before.model_copy(update={"calibration": CALIBRATION}).save(path)
    assert path.read_text().startswith(text)
    after = Cluster.load(path)
    assert after.calibration == CALIBRATION
    assert after.model_copy(update={"calibration": Calibration()}) == before
    newer = CALIBRATION.model_copy(update={"factors": {"compute": 1.02}})
    after.model_copy(update={"calibration": newer, "nodes": 3}).save(path)
    assert Cluster.load(path).calibration == newer
    assert Cluster.load(path).nodes == 3
    assert "# our cluster" in path.read_text()
    assert [file.name for file in tmp_path.iterdir()] == ["small.yaml"]


def test_saving_into_a_file_of_one_line_writes_it_anew(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text("{name: small, cpu_cores: 4, memory_gib: 8}")
    Cluster.load(path).model_copy(update={"calibration": CALIBRATION}).save(path)
    assert Cluster.load(path).calibration == CALIBRATION
    assert Cluster.load(path).cpu_cores == 4


def test_saving_never_replaces_a_file_that_is_no_cluster(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("model: {use: gpt}\n")
    with pytest.raises(InputError, match="unknown key 'model'"):
        Cluster(name="small", cpu_cores=4, memory_gib=8).save(path)
    assert path.read_text() == "model: {use: gpt}\n"


def test_a_new_file_has_its_folder_made_for_it(tmp_path):
    cluster = Cluster(name="small", cpu_cores=4, memory_gib=8, calibration=CALIBRATION)
    cluster.save(tmp_path / "clusters" / "small.yaml")
    assert Cluster.load("small", tmp_path / "clusters") == cluster


def test_a_date_need_not_be_quoted(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(TEXT + "calibration: {date: 2026-11-15, factors: {compute: 1.1}}\n")
    assert Cluster.load(path).calibration.date == "2026-11-15"
