"""What the host says of itself, in files that are known and here."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.hardware import host


def test_a_processor_that_says_its_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name : Some CPU @ 2.0GHz\nprocessor : 1\n")
    assert host.cpu_name(tmp_path) == "Some CPU @ 2.0GHz"


def test_where_nothing_is_said_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.cpu_name(tmp_path) is None
    assert host.physical_memory(tmp_path) == (None, None)
    monkeypatch.setattr(host, "physical_memory", lambda: (None, None))
    monkeypatch.setattr(host, "memory_left", lambda: None)
    assert host.available_memory() is None


@pytest.mark.parametrize(("of_group", "left"), [(None, 400), (100, 100), (1000, 400)])
def test_what_is_left_is_the_less_of_what_the_machine_and_the_group_have(
    monkeypatch: pytest.MonkeyPatch, of_group: int | None, left: int
) -> None:
    monkeypatch.setattr(host, "physical_memory", lambda: (1000, 400))
    monkeypatch.setattr(host, "memory_left", lambda: of_group)
    assert host.available_memory() == left


def test_memory_is_counted_in_bytes(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemAvailable:  400 kB\nHugePages_Total: 0\n")
    assert host.physical_memory(tmp_path) == (1000 * 1024, 400 * 1024)
