"""What a device is taken to reach, and what that rests on."""

from __future__ import annotations

import pytest

from gradus.hardware.catalogue import all_gpus
from gradus.planner.speed.device import device_of, speeds_for
from gradus.schema.cluster import Cluster, GpuNumbers


def cluster(gpu: str | GpuNumbers | None) -> Cluster:
    return Cluster(name="c", gpus_per_node=0 if gpu is None else 8, gpu=gpu, cpu_cores=8, memory_gib=64.0)


def test_every_gpu_of_the_catalogue_with_a_peak_has_speeds():
    for gpu in all_gpus():
        device = device_of(cluster(gpu.name))
        assert (device is not None) == bool(gpu.peak_tflops and gpu.memory_bandwidth_gb_per_second), gpu.name
        if device is not None:
            assert device.notes, f"{gpu.name}: where its speeds come from"


def test_shares_are_shares_and_have_a_source():
    for gpu, era in (("H200", "modern"), ("A100-SXM4-80GB", "2021")):
        speeds, note = speeds_for(gpu, None, era)
        assert speeds.source in note
        shares = [*speeds.matmul.values(), *speeds.bandwidth.values(), *speeds.convolution.values()]
        shares += [share for kernel in speeds.attention.values() for share in kernel.forward.values()]
        assert all(0 < share < 1 for share in shares)


def test_a_gpu_that_was_not_measured_says_so():
    device = device_of(cluster("MI300X"))
    assert device is not None
    assert "were not measured" in device.notes[0]
    measured = device_of(cluster("H200"))
    assert measured is not None
    assert "were not measured" not in measured.notes[0]


def test_products_of_a_gpu_are_what_was_published_of_it():
    """271.2 of 312 TFLOP/s on an A100, in a short run (stas00/ml-engineering@744d01e)."""
    device = device_of(cluster("A100-SXM4-80GB"))
    assert device is not None
    assert device.speeds.matmul["bf16"] == pytest.approx(device.speeds.sustained * 271.2 / 312)
    assert any("ml-engineering" in note for note in device.notes)


def test_a_gpu_may_be_given_by_numbers():
    numbers = GpuNumbers(
        name="mine",
        memory_gib=100.0,
        compute_capability=[9, 0],
        peak_tflops={"bf16": 500.0, "fp32": 50.0},
        memory_bandwidth_gb_per_second=2000.0,
    )
    device = device_of(cluster(numbers))
    assert device is not None
    assert device.peak_of("bf16") == 500e12
    assert device.bytes_per_second == 2e12


@pytest.mark.parametrize("gpu", [None, GpuNumbers(name="mine", memory_gib=100.0)])
def test_without_a_peak_there_is_no_device(gpu):
    assert device_of(cluster(gpu)) is None


def test_fp32_products_run_in_tf32_where_training_lets_them():
    device = device_of(cluster("H200"))
    assert device is not None
    assert device.running("fp32").precision_of("float32") == "fp32"
    assert device.running("tf32").precision_of("float32") == "tf32"
    assert device.running("bf16").precision_of("float32") == "tf32"
    assert device.running("fp8").precision_of("float8_e4m3fn") == "fp8"


def test_what_a_device_lacks_runs_in_what_it_has():
    volta = device_of(cluster("V100-SXM2-32GB"))
    assert volta is not None
    assert volta.peak_of("bf16") == volta.peak["fp16"]
    assert volta.running("tf32").precision_of("float32") == "fp32"


def test_fp32_is_never_as_fast_as_what_tensor_cores_do():
    """B200: nobody quotes fp32, so it is assumed, and the device says so."""
    device = device_of(Cluster(name="b", gpus_per_node=8, gpu="B200", cpu_cores=8, memory_gib=64))
    assert device is not None
    assert device.peak_of("fp32") < device.peak_of("tf32") / 4
    assert any("fp32" in note for note in device.notes)
