"""Disks that are full, read-only, slow or failing, and what else happens to a run that is alive."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from reliability_place import (
    LONG,
    SAVED,
    Outcome,
    Place,
    curve,
    faults,
    has_saved,
    misbehaving,
    saved,
)

from gradus.record.events import read_events
from gradus.record.metrics import read_metrics

MIB = 2**20


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    """A file system of its own. Only root may mount: without, this cannot be shown, and that is no success."""
    assert os.geteuid() == 0, "a disk that is full or read-only is made with mount, for which root is needed"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """A file that leaves so many bytes of the disk."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while (found := os.statvfs(folder)).f_bavail * found.f_frsize > leave:
            file.write(bytes(32 * 1024))
    return ballast


def full_disk(place: Place) -> Outcome:
    small = Place(place.folder / "small")
    with mounted(small.folder, "-t", "tmpfs", "-o", "size=48m", "tmpfs"):
        run = small.run("full")
        process = small.begin("full", LONG)
        assert process.when(lambda: has_saved(run))
        # Again and again: an old checkpoint that goes makes room for the next.
        assert process.when(lambda: bool(fill(small.folder, leave=MIB)) and bool(faults(run, "checkpoint-failed")))
        told = faults(run, "checkpoint-failed")[0]
        good = max(saved(run))
        ballast = fill(small.folder, leave=0)
        time.sleep(0.5)  # in which not even a line of the metrics can be written
        ballast.unlink()
        process.end()
        after = max(saved(run))
        there = curve(run)
    assert "Make room there" in told
    assert after == LONG
    assert there == place.undisturbed(LONG)
    return Outcome(
        f"an event says what to do; training goes on, the checkpoint of step {good} stays whole, lines of the metrics "
        "wait in memory; with room again everything is written, and no line is missing"
    )


def read_only(place: Place) -> Outcome:
    run = place.run("read-only")
    process = place.begin("read-only", LONG)
    assert process.when(lambda: has_saved(run))
    with mounted(run.checkpoints, "--bind", str(run.checkpoints)):
        remount = ["mount", "-o", "remount,ro,bind", str(run.checkpoints)]
        assert process.when(lambda: subprocess.run(remount).returncode == 0)  # busy while a checkpoint is being written
        assert process.when(lambda: bool(faults(run, "checkpoint-failed")))
        good = max(saved(run))
    process.end()
    assert "mounted for writing" in faults(run, "checkpoint-failed")[0]
    assert max(saved(run)) == LONG
    assert curve(run) == place.undisturbed(LONG)
    return Outcome(
        f"an event says what to do; training goes on, and the checkpoint of step {good} stays whole; writable again, "
        "it saves again"
    )


def failing_writes(place: Place) -> Outcome:
    code = """
real, draw = os.pwrite, random.Random(7)
def failing(*given):
    if draw.random() < 0.002:
        raise OSError(5, "Input/output error")
    return real(*given)
os.pwrite = failing
"""
    run = place.run("failing")
    place.begin("failing", 60, PYTHONPATH=misbehaving(place, "failing", code)).end()
    retries = faults(run, "checkpoint-retry")
    assert retries, "no write failed: nothing was tested"
    assert faults(run, "checkpoint-failed") == []
    assert saved(run) == [55, 60]
    assert curve(run) == place.undisturbed(60)
    return Outcome(f"{len(retries)} writes failed and were tried again, each reported; every checkpoint was committed")


def slow_disk(place: Place) -> Outcome:
    code = "real = os.fsync\ndef slow(descriptor):\n    time.sleep(0.6)\n    real(descriptor)\nos.fsync = slow"
    run = place.run("slow")
    place.begin("slow", SAVED, PYTHONPATH=misbehaving(place, "slow", code)).end()
    waits = [event["seconds"] for event in read_events(run) if event["event"] == "checkpoint-waited"]
    stalls = [row["checkpoint_stall_seconds"] for row in read_metrics(run) if "checkpoint_stall_seconds" in row]
    assert waits
    assert max(stalls) >= max(waits)
    assert curve(run) == curve(place.stopped("fast"))
    return Outcome(
        f"one checkpoint at a time: the next waited for the disk {len(waits)} times, for up to {max(waits):.1f} s. "
        "Events say so, and the stall is in the metrics"
    )


def killed_writer(place: Place) -> Outcome:
    run, draw = place.run("writer-killed"), random.Random(3)
    # So far apart that a save is over before the next begins, which then gets a process again.
    process = place.begin("writer-killed", LONG, "checkpoint.every=20")
    killed: set[int] = set()
    while len(killed) < 3:
        assert process.when(lambda: bool(set(process.writers()) - killed))
        time.sleep(draw.uniform(0.05, 0.3))
        for pid in set(process.writers()) - killed:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
    process.end()
    told = [e["message"] for e in read_events(run) if "the writer process" in str(e.get("message"))]
    assert len(told) >= len(killed)  # one for each save that it had: there may have been two
    assert max(saved(run)) == LONG
    assert curve(run) == place.undisturbed(LONG)
    return Outcome(
        f"{len(killed)} times: each is reported; the rank finishes what was begun, and the next save gets a new one"
    )


def two_in_one_directory(place: Place) -> Outcome:
    run = place.run("alive")
    process = place.begin("alive", 100_000)
    assert process.when(lambda: has_saved(run))
    refused = place.resume(run).end(expect=2)
    again = place.begin("alive", 100_000).end(expect=2)
    assert "--resume" in again["error"]["hint"]
    process.send_signal(signal.SIGTERM)
    stopped = process.end(expect=75)
    assert max(saved(run)) == stopped["step"]
    why = refused["error"]["message"].partition(": ")[2].partition(" (")[0]
    return Outcome(f"the second is refused (exit 2: “{why}”); the first goes on, untouched")


def deadline(place: Place) -> Outcome:
    run = place.run("deadline")
    recipe, limit = str(place.recipe), 45.0
    began = time.time()
    process = place.start(recipe, "--run-id", "deadline", "--set", "steps=100000", "--time", f"{limit:.0f}s")
    stopped = process.end(expect=75)
    took = time.time() - began
    assert stopped["step"] > 0
    assert max(saved(run)) == stopped["step"]
    assert took < limit, f"it took {took:.1f} s"
    budget = stopped["step"] + 10
    finished = place.resume(run, f"steps={budget}").end()
    assert finished["step"] == budget
    return Outcome(
        f"saved and over (exit 75) {limit - took:.0f} s before the time was, at step {stopped['step']}; it finishes on "
        "resume",
        str(stopped["step"]),
    )
