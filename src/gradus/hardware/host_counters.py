"""Host counters: how busy the cores and the memory that this job may use are, and what its processes read and write."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gradus.hardware.cgroup import cpu_quota, cpu_seconds_used, memory_left, memory_limit
from gradus.hardware.detect import within_quota
from gradus.hardware.host import physical_memory, text_of
from gradus.schema.device_sample import HostSample

_TICKS = os.sysconf("SC_CLK_TCK")
# Of a line of /proc/stat after the name of the core: idle and waiting for a disk are not busy, and what guests take is
# counted in user and nice already.
_BUSY = (0, 1, 2, 5, 6, 7)


@dataclass
class _Used:
    """By one process, so far."""

    parent: int
    cpu_seconds: float  # without its children
    # Of its children too, from when they have ended and it has asked how.
    read_bytes: int | None
    write_bytes: int | None


class HostCounters:
    """Read again and again: utilisation is what happened since the time before."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._cores = os.sched_getaffinity(0)  # with those of the job's processes: each may be bound to its own
        self._before: tuple[float, float] | None = None  # when, and the busy seconds of the cores until then
        self._processes: dict[int, _Used] = {}  # with those that have ended: what they used was used

    def read(self, processes: Iterable[int] = ()) -> HostSample:
        """Now. `processes` are the job's own."""
        alive = set()
        for pid in processes:
            used = self._used_by(pid)
            if used is not None:
                self._processes[pid] = used
                alive.add(pid)
                self._add_cores_of(pid)
        cores = within_quota(len(self._cores))
        utilisation = self._utilisation(cores)
        used_bytes, total_bytes = self._memory()
        known = list(self._processes.values())
        counted = [one for pid, one in self._processes.items() if pid in alive or one.parent not in self._processes]
        reads = [one.read_bytes for one in counted if one.read_bytes is not None]
        writes = [one.write_bytes for one in counted if one.write_bytes is not None]
        return HostSample(
            cpu_utilisation=utilisation,
            cores=cores,
            load_1min=os.getloadavg()[0],
            memory_used_bytes=used_bytes,
            memory_total_bytes=total_bytes,
            ranks_cpu_seconds=sum(one.cpu_seconds for one in known) if known else None,
            read_bytes=sum(reads) if reads else None,
            write_bytes=sum(writes) if writes else None,
        )

    def _add_cores_of(self, pid: int) -> None:
        try:
            theirs = os.sched_getaffinity(pid)
        except OSError:  # it has ended, or is another user's
            return
        if not theirs <= self._cores:
            self._cores = self._cores | theirs
            self._before = None  # was of fewer cores

    def _utilisation(self, cores: int) -> float | None:
        now, busy, before = time.monotonic(), self._busy_seconds(), self._before
        if busy is None:
            return None
        self._before = (now, busy)
        if before is None or now <= before[0]:
            return None
        return min(1.0, max(0.0, (busy - before[1]) / (cores * (now - before[0]))))

    def _busy_seconds(self) -> float | None:
        """Of the cores that the job may use; where it has only a share of them, what its group took."""
        if cpu_quota() is not None and (used := cpu_seconds_used()) is not None:
            return used
        mine = {f"cpu{number}" for number in self._cores}
        lines = [line.split() for line in text_of(self._proc / "stat").splitlines()]
        counted = [[int(word) for word in words[1:]] for words in lines if words and words[0] in mine]
        if not counted:
            return None
        return sum(sum(ticks[i] for i in _BUSY if i < len(ticks)) for ticks in counted) / _TICKS

    def _memory(self) -> tuple[int | None, int | None]:
        limit, left = memory_limit(), memory_left()
        total, available = physical_memory(self._proc)
        if limit is not None and left is not None and (total is None or limit < total):
            return max(0, limit - left), limit
        return (None if total is None or available is None else total - available), total

    def _used_by(self, pid: int) -> _Used | None:
        """None if it is gone."""
        # The name, in brackets, may have spaces in it.
        fields = text_of(self._proc / str(pid) / "stat").rpartition(")")[2].split()
        if len(fields) < 13:
            return None
        io = dict(line.split(": ", 1) for line in text_of(self._proc / str(pid) / "io").splitlines() if ": " in line)
        return _Used(
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / _TICKS,
            int(io["read_bytes"]) if "read_bytes" in io else None,
            int(io["write_bytes"]) if "write_bytes" in io else None,
        )
