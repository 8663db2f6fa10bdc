"""The writer when disks fail and processes die: training goes on, everything is told, and what was committed stays."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from writer_cases import (
    disturb,
    eventually,
    kinds,
    process_of,
    processes_of,
    saved,
    small_disk,
    state,
    value_of,
    writing,
)

from gradus.checkpoint import job as job_module
from gradus.checkpoint import snapshot as snapshot_module
from gradus.checkpoint import writer as writer_module
from gradus.checkpoint.part import PartRecord
from gradus.checkpoint.retention import Retention
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.writer import Writer

TESTS = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_writes_that_fail_are_tried_again_and_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "first", 1)
    with writing(folder) as writer:
        told = saved(writer, 1)
    assert kinds(told) == ["retrying", "written", "committed"]
    assert "Input/output error" in told[0].message
    assert "next try in 0.5 s" in told[0].message
    assert value_of(folder, 1) == 1.0


def test_a_commit_that_fails_is_tried_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "first", 1, where="COMMITTED")
    with writing(folder) as writer:
        told = saved(writer, 1)
    assert kinds(told) == ["written", "retrying", "committed"]
    assert "committing" in told[1].message
    assert value_of(folder, 1) == 1.0


@pytest.mark.parametrize("tier", ["shared", "local"])
def test_a_rank_that_tries_again_leaves_what_was_committed_meanwhile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Its record had its name, the flush after that failed, rank 0 has committed, and deleted the one before."""
    monkeypatch.setattr(job_module, "DELAYS", (0.01,))
    local = tmp_path / "node" if tier == "local" else None
    write_record = job_module.write_record

    def failing(target: Path, record: PartRecord) -> None:
        write_record(target, record)
        if target == folder / "step-00000002" and record.name.startswith("part-00001"):
            eventually(lambda: not list(folder.glob("step-00000001*")))
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(job_module, "write_record", failing)
    options = {"background": False, "local": local}
    with writing(folder, 0, 2, **options) as first, writing(folder, 1, 2, **options) as second:
        for step in (1, 2):
            save_both(first, second, step)
        assert kinds(second.poll()).count("retrying") == 1
    assert values_of_both(folder) == {2: (2.0, 2.0)}


def save_both(first: Writer, second: Writer, step: int) -> None:
    """A step of two ranks, after which older ones may go, until both know that it is committed."""
    first.save(step, {"a": torch.full((1000,), float(step))}, {"state": {}}, Retention(1), held=["a"])
    second.save(step, {"b": torch.full((1000,), float(step))}, None, held=["b"])
    for writer in (first, second):
        report = writer.wait("committed", 60)
        assert report is not None
        assert report.kind == "committed", report


def values_of_both(folder: Path) -> dict[int, tuple[float, float]]:
    return {step: value_of_both(folder, step) for step in CheckpointStore(folder).steps()}


def value_of_both(folder: Path, step: int) -> tuple[float, float]:
    tensors = CheckpointStore(folder).open(step).tensors()
    return float(tensors["a"].mean()), float(tensors["b"].mean())


def test_a_rank_that_takes_over_from_its_writer_process_leaves_what_was_committed_meanwhile(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the record had its name, and before it could say that it has written."""
    with writing(folder, 0, 2) as first, writing(folder, 1, 2) as second:
        first.prepare(1000)
        eventually(lambda: processes_of(os.getpid()))
        disturb(monkeypatch, tmp_path / "disturbed", "stuck", 60, where="step-00000002")
        save_both(first, second, 1)
        (child,) = set(processes_of(os.getpid())) - {first._process._process.pid if first._process else 0}
        first.save(2, {"a": torch.full((1000,), 2.0)}, {"state": {}}, Retention(1))
        second.save(2, {"b": torch.full((1000,), 2.0)}, None)
        eventually(lambda: not list(folder.glob("step-00000001*")))
        os.kill(child, signal.SIGKILL)
        report = second.wait("committed", 60)
        assert report is not None
        assert report.kind == "committed"
        assert kinds(second.poll()) == ["written", "retrying", "written"]
    assert values_of_both(folder) == {2: (2.0, 2.0)}


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_whatever_fails_once_on_either_of_two_ranks_both_parts_are_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Each write, flush and renaming in turn: instead of being done, or after it was."""
    monkeypatch.setattr(job_module, "DELAYS", (0.0, 0.0))
    real = {name: getattr(os, name) for name in ("pwrite", "fsync", "replace")}
    step = 0
    # Only the rank whose writing is done in this process is affected.
    with writing(folder, 0, 2, background=rank != 0) as first, writing(folder, 1, 2, background=rank != 1) as second:
        save_both(first, second, step)
        for name, done in itertools.product(real, (False, True)):
            for moment in itertools.count():
                step += 1
                calls = itertools.count()

                def failing(*arguments: Any, name: str = name, done: bool = done, now: Any = (calls, moment)) -> Any:
                    fails = next(now[0]) == now[1]
                    result = real[name](*arguments) if done or not fails else None
                    if fails:
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    return result

                with monkeypatch.context() as broken:
                    broken.setattr(os, name, failing)
                    save_both(first, second, step)
                # Of this one alone: those before it are being pruned.
                assert value_of_both(folder, step) == (float(step), float(step)), (name, done, moment)
                if next(calls) <= moment:
                    break
            assert moment >= 2, f"{name} was called"
    assert step > 15


def test_a_disk_that_fails_for_long_is_given_up_and_the_next_save_is_tried_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert 55 < sum(job_module.DELAYS) < 70, "about a minute"
    assert all(later == 2 * earlier for earlier, later in itertools.pairwise(job_module.DELAYS))
    monkeypatch.setattr(job_module, "DELAYS", (0.01, 0.01))
    with writing(folder, background=False) as writer:
        saved(writer, 1)
        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", _failing(errno.EIO))
            told = saved(writer, 2)
        assert kinds(told) == ["retrying", "retrying", "failed"]
        assert "Input/output error" in told[-1].message
        assert kinds(saved(writer, 3)) == ["written", "committed"]
    assert CheckpointStore(folder).steps() == [1, 3]


def test_a_full_disk_fails_at_once_says_what_to_do_and_keeps_what_there_is(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        folder = disk / "checkpoints"
        with writing(folder) as writer:
            saved(writer, 1, state(1.0, numbers=3_000_000))  # 12 MB of 20
            (told,) = saved(writer, 2, state(2.0, numbers=3_000_000))
            assert told.kind == "failed"
            assert "Make room there, or keep fewer checkpoints" in told.message
            assert "untouched" in told.message
            assert str(folder) in told.message
            units = {"GiB": 2**30, "MiB": 2**20}
            found = re.findall(r"([\d.]+) (GiB|MiB)", told.message)
            needed, free = (float(number) * units[unit] for number, unit in found)
            assert needed == pytest.approx(12e6, rel=0.01)
            assert free == pytest.approx(20 * 2**20 - 12e6, rel=0.05)
            assert value_of(folder, 1) == 1.0
            assert not (folder / "step-00000002").exists(), "nothing was begun"
            subprocess.run(["mount", "-o", "remount,size=40m", str(disk)], check=True)  # somebody makes room
            assert kinds(saved(writer, 3, state(3.0, numbers=3_000_000))) == ["written", "committed"]
        assert value_of(folder, 3) == 3.0


def test_a_disk_that_fills_up_while_it_is_written_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "_check_room", lambda *_: None)  # there was room when it began
    with small_disk(tmp_path / "disk") as disk, writing(disk / "checkpoints", background=False) as writer:
        saved(writer, 1, state(1.0, numbers=3_000_000))
        before = os.statvfs(disk).f_bavail
        (told,) = saved(writer, 2, state(2.0, numbers=3_000_000))
        assert told.kind == "failed"
        assert "Make room there" in told.message
        assert os.statvfs(disk).f_bavail >= before - 4, "of step 2 nothing is left but its folder"
        assert value_of(disk / "checkpoints", 1) == 1.0


def test_a_disk_that_can_only_be_read_fails_at_once_and_says_so(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk, writing(disk / "checkpoints") as writer:
        saved(writer, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        (told,) = saved(writer, 2)
        assert told.kind == "failed"
        assert "can only be read" in told.message
        assert value_of(disk / "checkpoints", 1) == 1.0
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        assert kinds(saved(writer, 3)) == ["written", "committed"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EDQUOT, "quota there is used up"), (errno.EACCES, "may not write there"), (errno.EPERM, "chattr")],
)
def test_what_does_not_pass_by_itself_fails_at_once_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    with writing(folder, background=False) as writer:
        monkeypatch.setattr(os, "pwrite", _failing(number))
        (told,) = saved(writer, 1)
        assert told.kind == "failed"
        assert advice in told.message
        assert str(folder) in told.message


def test_an_old_checkpoint_that_cannot_be_removed_is_told_and_is_no_failure(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with writing(folder) as writer:
        saved(writer, 1)
        with small_disk(folder / "step-00000001"):  # busy, as a file that is open on a network file system
            writer.save(2, state(2.0), {"state": {}}, Retention(1))
            report = writer.wait("committed", 60)
            assert report is not None
            assert report.kind == "committed"
            told = eventually(lambda: [report for report in writer.poll() if report.kind == "prune-failed"])
            assert "step-00000001" in told[0].message
    assert value_of(folder, 2) == 2.0


@pytest.mark.parametrize("delay", [pytest.param(0.02, marks=pytest.mark.slow), 0.3])
def test_a_writer_process_that_is_killed_is_told_and_the_save_is_done_here(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.5)
    with writing(folder) as writer:
        writer.prepare(1000)
        killed = eventually(lambda: process_of(os.getpid()))
        writer.save(1, state(1.0), {"state": {}})
        time.sleep(delay)
        os.kill(killed, signal.SIGKILL)
        report = writer.wait("committed", 60)
        assert report is not None
        assert report.kind == "committed"
        (retrying,) = [report for report in writer.poll() if report.kind == "retrying"]
        assert "SIGKILL" in retrying.message
        assert "by this process instead" in retrying.message
        disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.0)
        saved(writer, 2)
        assert process_of(os.getpid()) not in (0, killed), "another one has taken its place"
    assert [value_of(folder, step) for step in CheckpointStore(folder).steps()] == [1.0, 2.0]


def test_a_save_that_is_given_up_stays_so_when_its_writer_process_was_killed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.05)
    with writing(folder) as writer:
        writer.save(1, state(1.0, numbers=3_000_000), {"state": {}})
        os.kill(eventually(lambda: process_of(os.getpid())), signal.SIGKILL)
        eventually(lambda: not process_of(os.getpid()))
        writer.abandon(1, "it is not wanted")
        report = writer.wait("committed", 60)
        assert report is not None
        assert report.kind == "failed"
        assert "it is not wanted" in report.message
    assert CheckpointStore(folder).steps() == []


def test_when_memory_runs_out_while_a_commit_waits_for_another_rank_saves_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commits come in order, also when one is the writer process's and the next one is this process's."""
    monkeypatch.setattr(writer_module, "LEAVE_SECONDS", 0.2)
    with writing(folder, 0, 2) as first, writing(folder, 1, 2, background=False) as second:
        first.save(1, {"a": torch.ones(3)}, {"state": {}})
        second._number += 1  # and never writes its part of step 1
        monkeypatch.setattr(snapshot_module, "available_memory", lambda: 0)
        first.save(2, {"a": torch.ones(9_000_000)}, {"state": {}})
        second.save(2, {"b": torch.ones(3)}, None)
        report = first.wait("committed", 60)
        assert report is not None
        assert report.kind == "committed"
        assert [report.step for report in first.poll() if report.kind == "failed"] == [1]
    assert CheckpointStore(folder).steps() == [2]


def test_a_writer_process_that_dies_between_saves_is_replaced(folder: Path) -> None:
    with writing(folder) as writer:
        saved(writer, 1)
        os.kill(process_of(os.getpid()), signal.SIGKILL)
        told = saved(writer, 2)
        assert "committed" in kinds(told)
        assert any("SIGKILL" in report.message for report in told)


@pytest.mark.slow
def test_kills_at_random_moments_lose_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment: while a part is written, recorded, committed, while older ones are deleted, between saves."""
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.02)
    dice = random.Random(0)
    with writing(folder) as writer:
        for step in range(1, 41):
            writer.save(step, state(float(step)), {"state": {}}, Retention(2))
            time.sleep(dice.uniform(0, 0.6))
            if child := process_of(os.getpid()):
                os.kill(child, signal.SIGKILL)
            report = writer.wait("committed", 60)
            assert report is not None
            assert report.kind == "committed", report
            assert value_of(folder, step) == float(step)
    newest, damaged = CheckpointStore(folder).newest()
    assert newest is not None
    assert (newest.step, damaged) == (40, [])
    assert len(CheckpointStore(folder).steps()) <= 4


@pytest.mark.slow
def test_kills_at_random_moments_of_two_ranks_with_a_local_tier_lose_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.02, where="checkpoints")
    dice = random.Random(0)
    local = tmp_path / "node"
    with writing(folder, 0, 2, local=local) as first, writing(folder, 1, 2, local=local) as second:
        for step in range(1, 26):
            first.save(step, {"a": torch.full((1000,), float(step))}, {"state": {}}, Retention(2))
            second.save(step, {"b": torch.full((1000,), float(step))}, None)
            time.sleep(dice.uniform(0, 0.8))
            for child in processes_of(os.getpid()):
                if dice.random() < 0.5:
                    os.kill(child, signal.SIGKILL)
            if dice.random() < 0.5:  # else the next save comes while this one is on its way
                continue
            deadline = time.monotonic() + 60
            while first.in_flight is not None and time.monotonic() < deadline:
                first.poll()
                second.poll()
                time.sleep(0.01)
        for writer in (first, second):
            report = writer.wait("committed", 60)
            assert report is not None
            assert report.kind == "committed"
    newest, damaged = CheckpointStore(folder).newest()
    assert newest is not None
    assert (newest.step, damaged) == (25, [])
    assert {name: set(tensor.tolist()) for name, tensor in newest.tensors().items()} == {"a": {25.0}, "b": {25.0}}
    assert len(list(local.iterdir())) <= 3


@pytest.mark.slow
def test_writes_that_fail_at_random_lose_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "random", 0.04)
    monkeypatch.setenv("DICE", "1")
    retried = 0
    with writing(folder) as writer:
        for step in range(1, 31):
            told = saved(writer, step, timeout=120)
            retried += kinds(told).count("retrying")
            assert "committed" in kinds(told)
            assert value_of(folder, step) == float(step)
    assert retried > 3


def test_requests_to_stop_do_not_reach_the_writer_process(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.05)
    with writing(folder) as writer:
        writer.save(1, state(1.0), {"state": {}})
        child = eventually(lambda: process_of(os.getpid()))
        assert os.getsid(child) == child, "a session of its own"
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):  # also while it is starting
            os.kill(child, number)
        report = writer.wait("committed", 60)
        assert report is not None
        assert kinds(writer.poll()) == ["written", "committed"]


_DIES = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from writer_cases import eventually, state, process_of
from gradus.checkpoint.writer import Writer
import torch
writer = Writer(Path({folder!r}), 0, 1, torch.device("cpu"))
writer.save(1, state(1.0), {{"state": {{}}}})
if {forks}:
    if os.fork() == 0:  # as the workers of a loader are, which then hold all pipes of this process, too
        time.sleep(60)
print(eventually(lambda: process_of(os.getpid())), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("forks", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_ends_with_the_process_that_it_writes_for_and_commits_nothing_more(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.3)
    script = _DIES.format(tests=str(TESTS), folder=str(folder), forks=forks)
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert trainer.stdout is not None
    try:
        writer = int(trainer.stdout.readline())
        eventually(lambda: list(folder.glob("*/*.partial")))
        assert _runs(writer)
        trainer.kill()
        trainer.wait()
        eventually(lambda: not _runs(writer), 5)
        time.sleep(0.5)
        assert CheckpointStore(folder).steps() == []
    finally:
        os.killpg(trainer.pid, signal.SIGKILL) if forks else None
        trainer.stdout.close()


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _failing(number: int) -> object:
    def failing(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return failing
