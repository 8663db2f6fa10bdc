import pytest

from gradus.hardware.catalogue import all_gpus, find_gpu, gpus_named_like, peak_flops


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("AMD Instinct MI300X", "MI300X"),
        ("rtx-4090", "RTX 4090"),
        ("NVIDIA A100-SXM-64GB", "A100-SXM-64GB"),
        ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"),
        ("nvidia_h100_80gb_hbm3", "H100-SXM"),
        ("H100-SXM5-80GB", "H100-SXM"),
    ],
)
def test_a_gpu_is_found_by_the_name_its_driver_gives_it(driver_name, name):
    assert find_gpu(driver_name).name == name


@pytest.mark.parametrize("name", ["NVIDIA H200 NVL", "NVIDIA H100 NVL", "A100", "GeForce GTX 1080", "NVIDIA"])
def test_a_variant_with_other_numbers_is_not_taken_for_its_sibling(name):
    assert find_gpu(name) is None


@pytest.mark.parametrize("gpu", all_gpus(), ids=lambda gpu: gpu.name)
def test_every_number_has_a_source_and_a_plausible_size(gpu):
    assert {"memory", "peak_tflops"} <= set(gpu.sources)
    assert ("power" in gpu.sources) == (gpu.power_watts is not None)
    assert ("matmul_tflops" in gpu.sources) == bool(gpu.matmul_tflops)
    assert "chip" in gpu.sources
    assert gpu.multiprocessors is not None
    assert all(gpu.sources.values())
    peaks = [gpu.peak_tflops[kind] for kind in ("fp32", "tf32", "fp16", "fp8") if kind in gpu.peak_tflops]
    assert peaks == sorted(peaks)
    assert gpu.peak_tflops.get("bf16", gpu.peak_tflops["fp16"]) == gpu.peak_tflops["fp16"]
    assert 300 < gpu.memory_bandwidth_gb_per_second < 10_000
    assert 64 < gpu.multiprocessors < 400
    for precision, reached in gpu.matmul_tflops.items():
        assert 0.5 < reached / gpu.peak_tflops[precision] < 0.9


def test_each_name_stands_for_one_gpu():
    names = [(name, gpu) for gpu in all_gpus() for name in (gpu.name, *gpu.driver_names, *gpu.also_called)]
    assert all(find_gpu(name) is gpu for name, gpu in names)


def test_peak_is_in_flops_and_unknown_where_the_hardware_has_no_such_type():
    assert peak_flops(find_gpu("H200"), "bf16") == 989e12
    assert peak_flops(find_gpu("V100-SXM2-32GB"), "bf16") is None


def test_a_beginning_of_a_name_means_all_that_begin_so():
    assert {gpu.name for gpu in gpus_named_like("h100")} == {"H100-SXM", "H100-PCIe"}
    assert [gpu.name for gpu in gpus_named_like("RTX_4090")] == ["RTX 4090"]
    assert gpus_named_like("h1") == []


OFFERED = "V100-SXM2-16GB V100-PCIe-32GB A100-SXM4-40GB A100-SXM4-80GB A100-PCIe-40GB A100-PCIe-80GB A100-SXM-64GB"
OFFERED += " H100-SXM H100-PCIe H200 GH200 B200 GB200 MI250X MI300X L40S"


@pytest.mark.parametrize("name", [*OFFERED.split(), "RTX 4090"])
def test_the_gpus_of_todays_clusters_are_there(name):
    assert find_gpu(name).name == name
