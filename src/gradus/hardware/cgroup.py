"""What a batch system or container leaves of the machine: the limits of this process's control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROCESS_GROUPS = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def cpu_quota(process_groups: Path = _PROCESS_GROUPS, mount: Path = _MOUNT) -> float | None:
    """Cores' worth of time that may be used, or None without a limit. Fractions are possible."""
    quotas = []
    for folder in _folders("cpu", process_groups, mount):
        v2 = _words(folder / "cpu.max")
        v1 = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        for limit in (v2, v1):
            if len(limit) == 2 and limit[0] not in ("max", "-1"):
                quotas.append(int(limit[0]) / int(limit[1]))
    return min(quotas, default=None)


def memory_limit(process_groups: Path = _PROCESS_GROUPS, mount: Path = _MOUNT) -> int | None:
    """Bytes that may be used, or None without a limit."""
    limits = []
    for folder in _folders("memory", process_groups, mount):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limits += [int(word) for word in _words(folder / name) if word != "max"]
    return min(limits, default=None)


def memory_left(process_groups: Path = _PROCESS_GROUPS, mount: Path = _MOUNT) -> int | None:
    """Bytes of the limit that are not in use, or None without a limit. What caches can drop counts as free."""
    left = []
    for folder in _folders("memory", process_groups, mount):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            words = _words(folder / limit) + _words(folder / used)
            if len(words) == 2 and words[0] != "max":
                counted = _words(folder / "memory.stat")
                numbers = dict(zip(counted[::2], counted[1::2], strict=False))
                # v1 counts the groups below in `total_…` only.
                cached = int(numbers.get("total_inactive_file", numbers.get("inactive_file", "0")))
                left.append(int(words[0]) - int(words[1]) + cached)
    return min(left, default=None)


def cpu_seconds_used(process_groups: Path = _PROCESS_GROUPS, mount: Path = _MOUNT) -> float | None:
    """Processor time that the innermost group of this process which has a limit has taken, or None without one."""
    for folder in _folders("cpu", process_groups, mount):
        limit, period = _words(folder / "cpu.max"), _words(folder / "cpu.cfs_quota_us")
        if len(limit) == 2 and limit[0] != "max":
            counted = _words(folder / "cpu.stat")
            numbers = dict(zip(counted[::2], counted[1::2], strict=False))
            if "usage_usec" in numbers:
                return int(numbers["usage_usec"]) / 1e6
        if period and period[0] != "-1" and (used := _words(folder / "cpuacct.usage")):
            return int(used[0]) / 1e9
    return None


def _folders(controller: str, process_groups: Path, mount: Path) -> Iterator[Path]:
    """The group of this process and those around it: the tightest limit on the way up counts.

    In a container the listed path may lie outside of what is mounted; then only its existing parents count.
    """
    try:
        lines = process_groups.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        # cgroup v2 has one tree and lists no controllers; v1 has a tree for each (set of) controllers.
        tops = [mount / controllers, mount / controller] if controllers else [mount, mount / "unified"]
        for top in tops:
            inner = Path(path.lstrip("/"))
            yield from (top / folder for folder in (inner, *inner.parents))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []
