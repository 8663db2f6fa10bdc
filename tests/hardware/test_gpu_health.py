"""GPU health, read from a driver that stands in: no machine here has a GPU with errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gradus.hardware.gpu_health import last_xid, read_gpu_health


class Error(Exception):
    pass


class Driver:
    """As much of pynvml as is asked. `answers` replaces what a function says; an exception is raised."""

    NVMLError = Error
    NVML_VOLATILE_ECC = 0
    NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1

    def __init__(self, **answers: Any) -> None:
        self.answers = {
            "nvmlInit": None,
            "nvmlShutdown": None,
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "gpu",
            "nvmlDeviceGetName": b"NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetTemperature": 41,
            "nvmlDeviceGetTemperatureThreshold": 90,
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetRetiredPages": Error("not supported"),
            "nvmlDeviceGetRetiredPagesPendingStatus": Error("not supported"),
            "nvmlDeviceGetCurrentClocksEventReasons": 1,  # idle
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId="00000000:1B:00.0"),
        } | answers

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def answer(*arguments: Any) -> Any:
            value = self.answers[name]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def health_of(log: str = "", **answers: Any) -> Any:
    found = read_gpu_health(Driver(**answers), lambda: log)
    assert found is not None
    return found[0]


def test_a_healthy_gpu_has_no_problems():
    found = health_of()
    assert (found.name, found.ecc, found.problems) == ("NVIDIA H100 80GB HBM3", True, ())


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"nvmlDeviceGetTotalEccErrors": 3}, "3 uncorrected memory errors"),
        ({"nvmlDeviceGetRemappedRows": (1, 0, 1, 0)}, "waits for a reset"),
        ({"nvmlDeviceGetRemappedRows": (0, 9, 0, 1)}, "no spare memory rows"),
        ({"nvmlDeviceGetTemperature": 93}, "93 °C"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x40}, "hardware thermal slowdown"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x80}, "hardware power brake"),
    ],
)
def test_what_makes_a_gpu_unfit_is_said(answers, said):
    assert said in " ".join(health_of(**answers).problems)


def test_ordinary_brakes_are_no_problem():
    assert health_of(nvmlDeviceGetCurrentClocksEventReasons=0x1 | 0x4).problems == ()  # idle, power cap


def test_older_gpus_retire_pages_instead_of_rows():
    found = health_of(
        nvmlDeviceGetRemappedRows=Error("not supported"),
        nvmlDeviceGetRetiredPages=[1, 2],
        nvmlDeviceGetRetiredPagesPendingStatus=1,
    )
    assert found.retired_pages == 4
    assert "waits for a reset" in " ".join(found.problems)


def test_a_question_that_the_driver_does_not_know_has_no_answer():
    found = health_of(nvmlDeviceGetEccMode=Error("not supported"), nvmlDeviceGetTotalEccErrors=Error("not supported"))
    assert (found.ecc, found.uncorrected_errors, found.problems) == (None, None, ())


def test_without_a_driver_nothing_is_known():
    assert read_gpu_health(Driver(nvmlInit=Error("no driver"))) is None


LOG = """\
6,1,1,-;NVRM: Xid (PCI:0000:1b:00): 63, pid=1, Row Remapper
6,2,2,-;NVRM: Xid (PCI:0000:1c:00): 79, pid=2, GPU has fallen off the bus
6,3,3,-;NVRM: Xid (PCI:0000:1b:00): 94, pid=3, Contained ECC error
"""


def test_the_last_error_of_each_gpu_is_found_in_the_kernel_log():
    assert last_xid(LOG, "00000000:1B:00.0") == 94
    assert last_xid(LOG, "00000000:1C:00.0") == 79
    assert last_xid(LOG, "00000000:1D:00.0") is None
    assert "Xid 94" in " ".join(health_of(LOG).problems)
