"""Where the cases of tests/reliability_cases.py happen: a folder, the real command line in it, and what a run shows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gradus.checkpoint.manifest import COMMITTED, DamagedCheckpoint, committed_steps, verify_folder
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics

EVERY = 5
SAVED = 20  # the step of the newest checkpoint of a run that is to be damaged
BUDGET = 40  # that such a run is given when it goes on
LONG = 400  # steps of a run to which something is done while it is alive
RECIPE: dict[str, Any] = {
    "name": "r",
    "model": {"use": "gpt", "layers": 2, "width": 128, "heads": 4, "context": 32, "dropout": 0.1},
    "data": {"use": "stdlib-text", "max_bytes": 200_000},
    "batch": 4,
    "steps": LONG,
    "optimizer": {"use": "adamw", "lr": 1e-3, "warmup": 5, "decay": "cosine", "clip": 1.0},
    "evaluate": {"batches": 1},
    "checkpoint": {"every": EVERY, "keep": 2},
    "deterministic": True,
    "plan": {"workers": 0},
}
COMPARED = ("step", "loss", "grad_norm", "lr", "samples")
MARK = "RELIABILITY_MARK"  # a variable by which every process of an attempt is found
Curve = list[dict[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """What came of a case, as it was seen."""

    happened: str
    resumed: str = "–"
    lost: str = "0"


_started: list[Started] = []


def kill_left_over() -> None:
    """What a case that failed has left running."""
    for process in _started:
        if process.poll() is None:
            process.kill_all()


class Started(subprocess.Popen[str]):
    mark: str
    said: Path  # what it printed besides its answer

    def processes(self) -> list[int]:
        """All that are alive of this attempt: launcher, torchrun, ranks, writers, loader workers."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def writers(self) -> list[int]:
        found = []
        for pid in self.processes():
            try:
                if b"gradus.checkpoint.writer_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
            except OSError:
                continue
        return found

    def kill_all(self) -> None:
        """SIGKILL for everything, at once; again for what was being started in that very moment."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.wait()
            while any(map(_is_alive, found)):  # a process takes a moment to be taken apart
                time.sleep(0.01)

    def end(self, expect: int = 0) -> dict[str, Any]:
        out, _ = self.communicate(timeout=300)
        assert self.returncode == expect, f"exit {self.returncode}: {out}\n{self.said.read_text()[-4000:]}"
        document: dict[str, Any] = json.loads(out)
        return document

    def when(self, condition: Callable[[], bool], seconds: float = 120.0, every_seconds: float = 0.02) -> bool:
        """Whether it became true while the process was alive."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.poll() is None:
            if condition():
                return True
            time.sleep(every_seconds)
        return condition()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass
class Place:
    """A folder, and the command in it. Several cases may use it at a time."""

    folder: Path
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def recipe(self) -> Path:
        file = self.folder / "r.yaml"
        with self._lock:
            if not file.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                file.write_text(yaml.safe_dump(RECIPE))
        return file

    def start(self, *arguments: str, ranks: int = 1, **environment: str) -> Started:
        """One rank in the process itself, which starts faster, or several under torchrun."""
        how = ["--debug"] if ranks == 1 else ["--nproc", str(ranks)]
        mark = uuid.uuid4().hex
        said = self.folder / f"{mark}.log"
        with said.open("w") as log:
            process = Started(
                [
                    sys.executable,
                    "-m",
                    "gradus",
                    "train",
                    *arguments,
                    *how,
                    "--json",
                    "--runs",
                    str(self.folder / "runs"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: mark, **environment},
            )
        process.mark, process.said = mark, said
        _started.append(process)
        return process

    def begin(self, name: str, steps: int, *settings: str, ranks: int = 1, **environment: str) -> Started:
        """A new run."""
        chosen = [word for setting in (f"steps={steps}", *settings) for word in ("--set", setting)]
        return self.start(str(self.recipe), "--run-id", name, *chosen, ranks=ranks, **environment)

    def resume(self, run: RunDirectory, *settings: str, ranks: int = 1) -> Started:
        chosen = [word for setting in settings for word in ("--set", setting)]
        return self.start("--resume", str(run.path), *chosen, ranks=ranks)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gradus", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.folder)

    def run(self, name: str) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / "r" / name)

    def packed(self, name: str, texts: int, lines: int) -> Path:
        """Shards of so many texts."""
        folder = self.folder / name
        (folder / "texts").mkdir(parents=True)
        for number in range(texts):
            written = "".join(f"text number {number} has line {line * number}\n" for line in range(lines))
            (folder / "texts" / f"{number}.txt").write_text(written)
        words = ("data", "pack", str(folder / "texts"), str(folder / "packed"), "--tokenizer", "bytes")
        made = self.command(*words)
        assert made.returncode == 0, made.stderr
        return folder / "packed"

    def undisturbed(self, steps: int, *settings: str, ranks: int = 1) -> Curve:
        """The curve of a run that nobody touched; made once."""
        name = "-".join(
            ["undisturbed", str(steps), str(ranks), *(s.replace("=", "-") for s in settings if "/" not in s)]
        )
        return curve(self._made(name, lambda: self.begin(name, steps, *settings, ranks=ranks).end()))

    def stopped(self, name: str, *settings: str, ranks: int = 1) -> RunDirectory:
        """A run that came to 20 steps and will be continued: its newest checkpoints are of 15 and 20."""
        base = "-".join(["stopped", str(ranks), *(setting.replace("=", "-") for setting in settings)])
        made = self._made(base, lambda: self.begin(base, SAVED, *settings, ranks=ranks).end())
        assert list(committed_steps(made.checkpoints)) == [SAVED - EVERY, SAVED]
        shutil.copytree(made.path, self.run(name).path)
        return self.run(name)

    def continued(self, *settings: str, ranks: int = 1) -> Curve:
        """The curve of such a run without its newest checkpoint. The learning rate follows the budget, and that is
        given in two parts: no run in one go is the same."""

        def make() -> None:
            run = self.stopped(name, *settings, ranks=ranks)
            shutil.rmtree(run.checkpoints / f"step-{SAVED:08d}")
            self.resume(run, f"steps={BUDGET}", ranks=ranks).end()

        name = "-".join(["continued", str(ranks), *(setting.replace("=", "-") for setting in settings)])
        return curve(self._made(name, make))

    def _made(self, name: str, make: Callable[[], Any]) -> RunDirectory:
        with self._lock:
            if not self.run(name).path.exists():
                make()
        return self.run(name)


def curve(run: RunDirectory) -> Curve:
    return [{key: row[key] for key in COMPARED} for row in read_metrics(run) if "loss" in row]


def faults(run: RunDirectory, kind: str) -> list[str]:
    """What events tell of problems of a kind; none while there is no run yet."""
    there = read_events(run) if run.events.is_dir() else []
    return [event["message"] for event in there if event.get("kind") == kind]


def resumed_steps(run: RunDirectory) -> list[int]:
    there = read_events(run) if run.events.is_dir() else []
    return [event["step"] for event in there if event["event"] == "resume" and "step" in event]


def commits(run: RunDirectory) -> list[int]:
    """Steps whose commit was reported."""
    there = read_events(run) if run.events.is_dir() else []
    return [event["step"] for event in there if event["event"] == "checkpoint"]


def saved(run: RunDirectory) -> list[int]:
    """Steps of the checkpoints there are, every byte of which was compared."""
    found = committed_steps(run.checkpoints) if run.checkpoints.is_dir() else {}
    return sorted(step for step, name in found.items() if _is_whole(run.checkpoints / name))


def _is_whole(folder: Path) -> bool:
    """False: it was being removed, which takes its mark first. Damage is a failure."""
    try:
        verify_folder(folder)
    except DamagedCheckpoint:
        if (folder / COMMITTED).exists():
            raise
        return False
    return True


def has_saved(run: RunDirectory) -> bool:
    return run.checkpoints.is_dir() and bool(committed_steps(run.checkpoints))


def flip(file: Path, place: float = 0.5) -> None:
    """One bit of the byte at this share of a file."""
    size = file.stat().st_size
    at = min(int(size * place), size - 1)
    with file.open("r+b") as stream:
        stream.seek(at)
        byte = stream.read(1)[0]
        stream.seek(at)
        stream.write(bytes([byte ^ 0x10]))


def misbehaving(place: Place, name: str, code: str, *, everywhere: bool = False) -> str:
    """A PYTHONPATH with which the writer process (or all of a run) finds a disk that misbehaves."""
    folder = place.folder / f"site-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    only = "True" if everywhere else "'gradus.checkpoint.writer_process' in ' '.join(sys.orig_argv)"
    indented = "".join(f"    {line}\n" for line in code.strip().splitlines())
    (folder / "sitecustomize.py").write_text(f"import os, random, sys, time\nif {only}:\n{indented}")
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
