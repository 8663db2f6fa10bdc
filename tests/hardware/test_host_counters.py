"""What the host says: of this process as the kernel has it, and of files that are known."""

from __future__ import annotations

import os
import time

from gradus.hardware import host_counters
from gradus.hardware.cgroup import cpu_seconds_used
from gradus.hardware.host_counters import HostCounters


def test_utilisation_is_what_happened_since_the_sample_before():
    counters = HostCounters()
    assert counters.read().cpu_utilisation is None
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    found = counters.read().cpu_utilisation
    assert found is not None
    assert 0 < found <= 1


def test_processor_time_and_memory_of_this_process_are_there():
    found = HostCounters().read([os.getpid()])
    assert found.cores is not None
    assert found.cores >= 1
    assert found.ranks_cpu_seconds is not None
    assert found.ranks_cpu_seconds > 0
    assert found.memory_used_bytes is not None
    assert found.memory_total_bytes is not None
    assert 0 < found.memory_used_bytes < found.memory_total_bytes


def test_without_processes_nothing_is_said_of_them():
    found = HostCounters().read()
    assert (found.ranks_cpu_seconds, found.read_bytes, found.write_bytes) == (None, None, None)


def machine(folder, *, busy: int, cpu: int, read: int) -> None:
    cores = "".join(f"cpu{number} {busy} 0 0 {busy} 0 0 0 0 0 0\n" for number in os.sched_getaffinity(0))
    (folder / "stat").write_text(f"cpu  1 2 3\n{cores}intr 5\n")
    (folder / "meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n")
    process(folder, 7, parent=1, cpu=cpu, read=read)


def process(folder, pid: int, *, parent: int, cpu: int, read: int) -> None:
    own = folder / str(pid)
    own.mkdir(exist_ok=True)
    (own / "stat").write_text(f"{pid} (a (strange) name) S {parent} {' '.join(['0'] * 9)} {cpu} {cpu} 0 0")
    (own / "io").write_text(f"rchar: 9\nread_bytes: {read}\nwrite_bytes: 3\n")


def test_what_an_ended_process_used_was_used(tmp_path, monkeypatch):
    monkeypatch.setattr(host_counters, "memory_limit", lambda: None)
    machine(tmp_path, busy=0, cpu=host_counters._TICKS, read=100)
    counters = HostCounters(tmp_path)
    first = counters.read([7])
    assert (first.ranks_cpu_seconds, first.read_bytes, first.write_bytes) == (2.0, 100, 3)
    assert (first.memory_used_bytes, first.memory_total_bytes) == (600 * 1024, 1000 * 1024)
    (tmp_path / "7" / "stat").unlink()
    last = counters.read([7])
    assert (last.ranks_cpu_seconds, last.read_bytes) == (2.0, 100)


def test_what_a_child_has_read_counts_once(tmp_path):
    machine(tmp_path, busy=0, cpu=host_counters._TICKS, read=100)
    process(tmp_path, 8, parent=7, cpu=host_counters._TICKS, read=1000)
    counters = HostCounters(tmp_path)
    assert counters.read([7, 8]).read_bytes == 1100
    (tmp_path / "8" / "stat").unlink()
    process(tmp_path, 7, parent=1, cpu=host_counters._TICKS, read=1100)  # the kernel adds what its child had read
    found = counters.read([7])
    assert (found.read_bytes, found.ranks_cpu_seconds) == (1100, 4.0)


def test_cores_are_those_that_any_process_of_the_job_may_use(tmp_path, monkeypatch):
    monkeypatch.setattr(host_counters, "within_quota", lambda cores: cores)
    bound = {0: {0, 1}, 7: {0, 1}, 8: {2, 3}}
    monkeypatch.setattr(host_counters.os, "sched_getaffinity", lambda pid: bound[pid])
    machine(tmp_path, busy=0, cpu=0, read=0)
    process(tmp_path, 8, parent=1, cpu=0, read=0)
    counters = HostCounters(tmp_path)
    assert counters.read([7]).cores == 2
    assert counters.read([7, 8]).cores == 4
    assert counters.read([7]).cores == 4


def test_half_of_the_cores_busy_is_a_half(tmp_path, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(host_counters.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(host_counters, "cpu_quota", lambda: None)
    monkeypatch.setattr(host_counters, "within_quota", lambda cores: cores)
    machine(tmp_path, busy=0, cpu=0, read=0)
    counters = HostCounters(tmp_path)
    counters.read()
    now[0] += 10.0
    machine(tmp_path, busy=5 * host_counters._TICKS, cpu=0, read=0)
    assert counters.read().cpu_utilisation == 0.5


def test_processor_time_of_a_group_with_a_limit_is_the_groups(tmp_path):
    (tmp_path / "groups").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.max").write_text("200000 100000")
    (tmp_path / "job" / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert cpu_seconds_used(tmp_path / "groups", tmp_path) == 2.5
    (tmp_path / "job" / "cpu.max").write_text("max 100000")
    assert cpu_seconds_used(tmp_path / "groups", tmp_path) is None
