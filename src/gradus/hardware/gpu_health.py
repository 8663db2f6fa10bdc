"""GPU health: what the driver says of each GPU's memory errors, temperature and brakes. Read, never changed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# NVML's bits for why a clock is lower than it could be (nvml.h: nvmlClocksEventReason..., before driver 535
# nvmlClocksThrottleReason...). Idle, a power cap and user settings are ordinary; these are not.
BRAKES = {
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "software thermal slowdown",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "hardware power brake",
}


@dataclass(frozen=True)
class GpuHealth:
    """One GPU. None: the driver does not say."""

    index: int
    name: str
    uuid: str
    temperature_celsius: int | None = None
    slowdown_celsius: int | None = None  # at which the GPU brakes
    ecc: bool | None = None
    uncorrected_errors: int | None = None  # of its memory since the driver was loaded
    corrected_errors: int | None = None
    retired_pages: int | None = None  # or rows that were remapped, on GPUs that do that
    pending_repair: bool | None = None  # a page or row that is repaired at the next reset only
    failed_repair: bool | None = None  # no spare rows are left: the GPU is to be replaced
    brakes: tuple[str, ...] = ()
    xid: int | None = None  # the last error that the kernel logged for it, where that log can be read

    @property
    def problems(self) -> tuple[str, ...]:
        """What makes a GPU unfit for a long run."""
        found = []
        if self.uncorrected_errors:
            found.append(f"{self.uncorrected_errors} uncorrected memory errors since the driver was loaded")
        if self.failed_repair:
            found.append("it has no spare memory rows left")
        if self.pending_repair:
            found.append("a memory repair waits for a reset of the GPU")
        if self.xid is not None:
            found.append(f"the kernel logged Xid {self.xid} for it")
        hot = self.temperature_celsius is not None and self.slowdown_celsius is not None
        if hot and self.temperature_celsius >= self.slowdown_celsius:  # type: ignore[operator]
            found.append(f"{self.temperature_celsius} °C, and it brakes from {self.slowdown_celsius} °C on")
        return (*found, *(f"it brakes: {brake}" for brake in self.brakes))


def read_gpu_health(nvml: Any = None, kernel_log: Callable[[], str] | None = None) -> tuple[GpuHealth, ...] | None:
    """All GPUs of this machine; None without an NVIDIA driver. `nvml` stands in for the pynvml module."""
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return None
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        log = (kernel_log or _kernel_log)()
        return tuple(_health(nvml, index, log) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:
        return ()
    finally:
        nvml.nvmlShutdown()


def _health(nvml: Any, index: int, log: str) -> GpuHealth:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(function: str, *arguments: Any) -> Any:
        """What the driver says; None for a GPU, a driver or a binding that does not know the question."""
        try:
            return getattr(nvml, function)(device, *arguments)
        except (nvml.NVMLError, AttributeError):
            return None

    def errors(kind: int) -> int | None:
        found: int | None = ask("nvmlDeviceGetTotalEccErrors", kind, nvml.NVML_VOLATILE_ECC)
        return found

    mode = ask("nvmlDeviceGetEccMode")
    remapped = ask("nvmlDeviceGetRemappedRows")  # corrected, uncorrected, pending, failed
    pages = [ask("nvmlDeviceGetRetiredPages", cause) for cause in (0, 1)]  # by many single-bit, by double-bit errors
    retired = sum(len(known) for known in pages if known is not None) if any(p is not None for p in pages) else None
    pending = ask("nvmlDeviceGetRetiredPagesPendingStatus")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
    pci = ask("nvmlDeviceGetPciInfo")
    return GpuHealth(
        index=index,
        name=_text(ask("nvmlDeviceGetName") or "?"),
        uuid=_text(ask("nvmlDeviceGetUUID") or "?"),
        temperature_celsius=ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        slowdown_celsius=ask("nvmlDeviceGetTemperatureThreshold", nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        ecc=bool(mode[0]) if mode is not None else None,
        uncorrected_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        corrected_errors=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        retired_pages=remapped[0] + remapped[1] if remapped is not None else retired,
        pending_repair=bool(remapped[2]) if remapped is not None else (None if pending is None else bool(pending)),
        failed_repair=bool(remapped[3]) if remapped is not None else None,
        brakes=tuple(name for bit, name in BRAKES.items() if reasons & bit),
        xid=last_xid(log, _text(pci.busId)) if pci is not None else None,
    )


def last_xid(log: str, bus_id: str) -> int | None:
    """The last error of a GPU in the kernel's log, whose lines read `NVRM: Xid (PCI:0000:1b:00): 79, pid=...`."""
    wanted = bus_id.lower()[-len("00:1b:00.0") :].removesuffix(".0")
    found = None
    for line in log.splitlines():
        _, marker, after = line.lower().partition("nvrm: xid (pci:")
        if marker:
            bus, _, rest = after.partition("):")
            number = rest.strip().partition(",")[0]
            if bus.strip().endswith(wanted) and number.isdigit():
                found = int(number)
    return found


def _kernel_log() -> str:
    """What is in the kernel's log now, if this user may read it."""
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        lines = []
        try:
            while True:
                lines.append(os.read(descriptor, 8192).decode(errors="replace"))
        except OSError:  # the end, for now
            return "\n".join(lines)
        finally:
            os.close(descriptor)
    return ""


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
