"""The host: what its processor is called, and how much of its memory is left to this process."""

from __future__ import annotations

from pathlib import Path

from gradus.hardware.cgroup import memory_left

_PROC = Path("/proc")


def cpu_name(proc: Path = _PROC) -> str | None:
    """What the processor calls itself; some say nothing."""
    lines = text_of(proc / "cpuinfo").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def physical_memory(proc: Path = _PROC) -> tuple[int | None, int | None]:
    """Bytes that the machine has, and those of them that are available to new work."""
    found = dict(line.split(":", 1) for line in text_of(proc / "meminfo").splitlines() if ":" in line)
    total, available = (found[name].split()[0] if name in found else None for name in ("MemTotal", "MemAvailable"))
    return (int(total) * 1024 if total else None), (int(available) * 1024 if available else None)


def available_memory() -> int | None:
    """Bytes that this process can still take, within the limits of its group. None where nobody says."""
    known = [left for left in (physical_memory()[1], memory_left()) if left is not None]
    return min(known, default=None)


def text_of(file: Path) -> str:
    """What a file of /proc says; nothing where there is none, or not any more."""
    try:
        return file.read_text()
    except OSError:
        return ""
