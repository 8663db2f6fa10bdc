import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gradus.hardware import detect
from gradus.hardware.detect import detect_machine


class FakeNvml:
    """NVML of a machine with H200s, for machines that have none."""

    class NVMLError(Exception):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    class NVMLError_DriverNotLoaded(NVMLError):
        pass

    def __init__(self, gpus=4, init_error=None, lost=()):
        self._gpus, self._init_error, self._lost = gpus, init_error, lost

    def nvmlInit(self):
        if self._init_error:
            raise self._init_error

    def nvmlShutdown(self):
        pass

    def nvmlSystemGetDriverVersion(self):
        return b"580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self):
        return 12090

    def nvmlDeviceGetCount(self):
        return self._gpus

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self._lost:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        return 2

    def nvmlDeviceGetIndex(self, handle):
        return handle

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200" if isinstance(handle, int) else "NVIDIA H200 MIG 1g.18gb"

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=150_000_000_000)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        assert isinstance(handle, int)
        return 9, 0

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{'abcdefgh'[handle]}0000000" if isinstance(handle, int) else handle


@pytest.fixture(autouse=True)
def all_visible(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_and_driver_are_read_from_nvml():
    machine = detect_machine(FakeNvml())
    assert (machine.driver_version, machine.driver_cuda) == ("580.65.06", (12, 9))
    assert [gpu.index for gpu in machine.gpus] == [0, 1, 2, 3]
    assert machine.gpus[0].name == "NVIDIA H200"
    assert machine.gpus[0].compute_capability == (9, 0)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("GPU-b0000000, GPU-d", [1, 3]),
        ("GPU-", []),
        ("MIG-1234", [2]),
    ],
)
def test_cuda_visible_devices_means_what_it_means_to_cuda(monkeypatch, visible, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in detect_machine(FakeNvml()).gpus] == indices


def test_no_library_or_no_driver_is_a_machine_without_gpus():
    for error in (FakeNvml.NVMLError_LibraryNotFound(), FakeNvml.NVMLError_DriverNotLoaded()):
        machine = detect_machine(FakeNvml(init_error=error))
        assert (machine.gpus, machine.problems) == ((), ())


def test_a_driver_or_gpu_that_does_not_answer_is_a_problem_not_a_machine_without_gpus():
    mismatch = FakeNvml.NVMLError("Driver/library version mismatch")
    assert "version mismatch" in detect_machine(FakeNvml(init_error=mismatch)).problems[0]
    machine = detect_machine(FakeNvml(lost=(1,)))
    assert [gpu.index for gpu in machine.gpus] == [0, 2, 3]
    assert machine.problems == ("GPU 1: GPU is lost",)


def test_this_very_machine_has_cores_and_memory():
    machine = detect_machine()
    assert 1 <= machine.cpu_cores <= len(os.sched_getaffinity(0))
    assert 100 * 2**20 < machine.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_cores_are_those_the_process_may_run_on():
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{one}]);"
        "from gradus.hardware.detect import detect_machine; assert detect_machine().cpu_cores == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_quota_below_one_core_is_still_one_core(monkeypatch):
    monkeypatch.setattr(detect, "cpu_quota", lambda: 0.5)
    assert detect_machine().cpu_cores == 1
