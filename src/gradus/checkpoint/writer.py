"""Writer: saves what a rank holds while training goes on, one copy of it at a time.

    save ── copy into the snapshot ──▶ returns          the step stops for this only
                     └─▶ writer process: part, record, and on rank 0 commit and retention ──▶ poll, wait

Where there is no memory for a copy, or no process is wanted, the part is written before `save` returns.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import gradus
from gradus.checkpoint.commit import has_committed, versions
from gradus.checkpoint.job import Job, Jobs, Phase, given_up_by_another
from gradus.checkpoint.local_tier import forget, save_id_of
from gradus.checkpoint.part import COMMITTED
from gradus.checkpoint.report import Report
from gradus.checkpoint.retention import Retention
from gradus.checkpoint.snapshot import Layouts, NotEnoughMemory, Snapshot, streamed
from gradus.checkpoint.writer_process import IGNORED, LEAVE_SECONDS

__all__ = ["Report", "Stall", "Writer"]

_END_SECONDS = 5.0  # that a process is waited for that was ended
_LOOK_SECONDS = 0.05  # how often something is looked for that does not announce itself


@dataclass(frozen=True)
class Stall:
    """For how long a save has held training up."""

    waited_seconds: float  # for the save before
    copy_seconds: float
    bytes: int


@dataclass
class _Save:
    job: Job
    phase: Phase | Literal["done"] = "write"
    in_process: bool = True  # in this one
    last: Report | None = None  # of those that say how far it has come
    reached: set[str] = field(default_factory=set)
    unwanted: str | None = None  # why


class Writer:
    """The saves of one rank. All ranks must save the same steps in the same order; none waits for another."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        ranks: int,
        device: torch.device,
        *,
        background: bool = True,
        local: Path | None = None,
        attempt: str = "",
        began_from: int | None = None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`local` is the run's own folder on this node's disk; `attempt` tells this one from earlier ones of a run.

        `began_from` is the step of the checkpoint that the attempt went on from. `on_wait` is called again and again
        while a save waits for the one before.
        """
        self._on_wait = on_wait
        self._folder, self._rank, self._ranks, self._device = folder.absolute(), rank, ranks, device
        self._background, self._attempt, self._began_from = background, attempt, began_from
        self._local = None if local is None else local.absolute()
        self._layouts = Layouts(rank, ranks)
        self._snapshot: Snapshot | None = None
        self._process: _Process | None = None
        self._jobs = Jobs(self._take_later)
        self._saves: dict[int, _Save] = {}
        self._number = 0
        self._newest: _Save | None = None
        self._told_of_pinning = False
        self._told: deque[tuple[int, Report]] = deque()  # by threads of this process
        self._reports: deque[Report] = deque()

    @property
    def in_flight(self) -> int | None:
        """The oldest step of which this rank still has something to do."""
        return next((save.job.step for save in self._saves.values() if save.phase != "done"), None)

    def prepare(self, byte_count: int) -> None:
        """Make process and memory for a state of so many bytes while training goes on, so that no save has to.

        To be called by the thread that trains: the process ends with the thread that started it.
        """
        if not self._background:
            return
        snapshot = self._snapshot = self._snapshot or Snapshot(self._device)
        self._start_process()

        def make() -> None:
            with suppress(NotEnoughMemory):  # which a save finds too, and says
                snapshot.reserve(byte_count)

        threading.Thread(target=make, name="prepare-snapshot", daemon=True).start()

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        document: Mapping[str, Any] | None,
        retention: Retention | None = None,
        *,
        held: Iterable[str] = (),
    ) -> Stall:
        """Copy what this rank writes of a checkpoint; it is written afterwards. On rank 0 with the manifest's rest.

        `held` are the names of all tensors that this rank has: without any of them, nothing is committed.
        """
        began = time.monotonic()
        layout = self._layouts.of(tensors)
        self._number += 1
        job = Job(
            step,
            self._rank,
            self._ranks,
            self._folder,
            self._local,
            layout,
            save_id_of(self._attempt, self._number),
            None if document is None else {"versions": versions(), **document},
            retention,
            tuple(held),
            self._began_from,
        )
        text = json.dumps(job.to_document(), separators=(",", ":")).encode() if self._background else b""
        while not self._memory_is_free():
            self._hear(None)
            self._on_wait()
        waited = time.monotonic() - began
        self._saves = {number: save for number, save in self._saves.items() if save.phase != "done"}
        save = self._saves[self._number] = self._newest = _Save(job)
        try:
            if not (self._background and self._copied(job, tensors, text)):
                self._settle()
                self._jobs.start(self._number, job, streamed(layout, tensors))
                while save.phase == "write":
                    self._hear(None)
        except BaseException as error:  # nobody may wait for it, or go on reading what training then changes
            self._jobs.abandon(self._number, f"it was interrupted by {type(error).__name__}")
            save.phase = "done"
            raise
        return Stall(waited, time.monotonic() - began - waited, layout.total_bytes)

    def _copied(self, job: Job, tensors: Mapping[str, Tensor], text: bytes) -> bool:
        """Copy the state and hand it over, unless there is no memory for a copy."""
        snapshot = self._snapshot = self._snapshot or Snapshot(self._device)
        try:
            snapshot.copy(job.layout, tensors, text)
        except NotEnoughMemory as error:
            message = f"step {job.step} is written while training waits: {error}"
            self._reports.append(Report("note", job.step, message))
            return False
        if self._device.type == "cuda" and not snapshot.pinned and not self._told_of_pinning:
            self._told_of_pinning = True
            message = "the memory for copies of the state cannot be pinned: saves hold training up for longer"
            self._reports.append(Report("note", job.step, message))
        self._hand_over(self._number, self._saves[self._number], len(text))
        return True

    def _hand_over(self, number: int, save: _Save, text_bytes: int) -> None:
        """To the writer process, unless this process is still busy with what another one has left."""
        assert self._snapshot is not None
        if not self._jobs.busy:
            self._start_process()
        if self._process is not None and not self._jobs.busy:
            save.in_process = False
            size = save.job.layout.total_bytes
            self._process.ask({"do": "save", "number": number, "file_bytes": size, "job_bytes": text_bytes})
            self._hear(0.0)  # a process that has ended in between is noticed before anybody waits for it
        else:
            self._jobs.start(number, save.job, self._snapshot.bytes)

    def _memory_is_free(self) -> bool:
        """Also that no more than one save is on its way from the node's own disk: that would fill up."""
        self._hear(0.0)
        phases = [save.phase for save in self._saves.values()]
        return "write" not in phases and phases.count("copy") <= 1

    def _settle(self) -> None:
        """Before a save is done here, the writer process must be through with those before: commits come in order."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while any(save.phase != "done" and not save.in_process for save in self._saves.values()):
            if time.monotonic() > deadline:
                for save in list(self._saves.values()):
                    if not save.in_process:
                        self.abandon(save.job.step, "not all ranks have written their part, and a later step is due")
                deadline = float("inf")
            self._hear(None)

    def poll(self) -> list[Report]:
        """What has happened since it was asked last."""
        self._hear(0.0)
        found = list(self._reports)
        self._reports.clear()
        return found

    def wait(self, until: Literal["written", "copied", "committed"], timeout: float | None = None) -> Report | None:
        """The report that the newest save has come so far, or has failed; None after so many seconds without one.

        `poll` gives it as well. Ranks other than 0 see that it is committed by the file that says so.
        """
        assert self._saves, "nothing was saved"
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        save = self._saves[max(self._saves)]
        while True:
            self._hear(0.0)
            if save.last is not None and (save.last.kind == "failed" or until in save.reached):
                return save.last
            if save.phase == "done" and until == "committed":
                found = self._committed_elsewhere(save)
                if found is not None:
                    return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._hear(min(left, _LOOK_SECONDS))

    def _committed_elsewhere(self, save: _Save) -> Report | None:
        job = save.job
        path = self._folder / job.name
        given_up = given_up_by_another(self._folder, job.step, job.save_id)
        if given_up is not None:
            return Report("failed", job.step, given_up)
        return Report("committed", job.step, str(path)) if (path / COMMITTED).exists() else None

    def abandon(self, step: int, why: str) -> None:
        """Give up a save that is under way. Its report comes as one that failed."""
        for number, save in self._saves.items():
            if save.job.step == step and save.phase != "done":
                save.unwanted = why  # for whoever takes over, should the writer process be gone by now
                if save.in_process:
                    self._jobs.abandon(number, why)
                elif self._process is not None:
                    self._process.ask({"do": "abandon", "number": number, "why": why})

    def close(self, finished: bool = False) -> None:
        """Give up what is not committed, and free the memory. Afterwards nobody of this writer writes any more.

        Of a run that is `finished`, nothing stays on the node's own disk, if its last step is in the run's folder.
        """
        why = "the run ended before"
        if self._process is not None:
            process, self._process = self._process, None
            process.ask({"do": "leave", "why": why})
            for number, report in process.last_words():
                self._take(number, report)
        self._jobs.leave(why, LEAVE_SECONDS)
        self._hear(0.0)
        if self._snapshot is not None:
            self._snapshot.close()
            self._snapshot = None
        if finished and self._local is not None and self._newest is not None:
            job = self._newest.job
            if has_committed(self._folder / job.name, job.save_id):
                forget(self._local)

    def _start_process(self) -> None:
        if self._process is None:
            assert self._snapshot is not None
            try:
                self._process = _Process(self._snapshot.descriptor)
            except OSError as error:
                message = f"no writer process can be started, so this process writes itself: {error}"
                self._reports.append(Report("note", self.in_flight or 0, message))

    def _hear(self, seconds: float | None) -> None:
        """Take in what was told; without any, wait for it so long, or for a moment."""
        pause = _LOOK_SECONDS if seconds is None else seconds
        if self._process is not None:
            # A thread of this process tells without waking anybody.
            told = self._process.told(min(pause, _LOOK_SECONDS) if self._jobs.busy or self._told else pause)
            for number, report in told:
                self._take(number, report)
            if self._process.ended:
                self._replace()
        elif pause and not self._told:
            time.sleep(min(pause, _LOOK_SECONDS))
        while self._told:
            self._take(*self._told.popleft())

    def _replace(self) -> None:
        """The writer process has ended. What it was at is done here; the next save gets a new one."""
        assert self._process is not None
        how = self._process.how_it_ended()
        self._process = None
        left = {number: save for number, save in self._saves.items() if save.phase != "done" and not save.in_process}
        if not left:
            self._reports.append(Report("note", 0, f"the writer process {how}; the next save gets a new one"))
        for number, save in left.items():
            message = f"the writer process {how}; step {save.job.step} is written by this process instead"
            self._reports.append(Report("retrying", save.job.step, message))
            save.in_process = True
            assert self._snapshot is not None
            assert save.phase != "done"
            self._jobs.start(number, save.job, self._snapshot.bytes, save.phase)
            if save.unwanted is not None:
                self._jobs.abandon(number, save.unwanted)

    def _take_later(self, number: int, report: Report) -> None:
        self._told.append((number, report))

    def _take(self, number: int, report: Report) -> None:
        self._reports.append(report)
        save = self._saves.get(number)
        if save is None or report.kind not in ("written", "copied", "committed", "failed"):
            return
        save.last = report
        save.reached.add(report.kind)
        commits = save.job.document is not None
        if report.kind == "written" and save.job.local is not None:
            save.phase = "copy"
        elif report.kind in ("written", "copied") and commits:
            save.phase = "commit"
        else:
            save.phase = "done"


class _Process:
    """A writer process, seen from the one that it writes for."""

    def __init__(self, descriptor: int) -> None:
        package = str(Path(gradus.__file__).parent.parent)
        paths = [package, *map(os.path.abspath, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))]
        # Held back until it can ignore them: a request to stop often comes to all processes of a run at once.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gradus.checkpoint.writer_process", str(descriptor), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(descriptor,),
                start_new_session=True,
                cwd="/",  # where no file of the user's is taken for a module that is needed
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._begun = b""
        self.ended = False

    def ask(self, message: Mapping[str, Any]) -> None:
        with suppress(BrokenPipeError):  # that it has ended is seen when it is listened to
            self._input.write(json.dumps(message).encode() + b"\n")
            self._input.flush()

    def told(self, seconds: float) -> list[tuple[int, Report]]:
        """What it has told, if need be after waiting for it so long."""
        if seconds > 0:
            ready = select.poll()  # unlike select, it takes any number of open files
            ready.register(self._output, select.POLLIN)
            ready.poll(1000 * seconds)
        found = []
        while not self.ended:
            try:
                chunk = os.read(self._output.fileno(), 1 << 16)
            except BlockingIOError:
                break
            self.ended = not chunk
            *lines, self._begun = (self._begun + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                found.append((message["number"], Report(**message["report"])))
        return found

    def how_it_ended(self) -> str:
        code = self._process.wait()
        self._shut()
        if code >= 0:
            return f"ended with exit code {code}"
        more = ", perhaps by the kernel for want of memory" if -code == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{more}"

    def last_words(self) -> list[tuple[int, Report]]:
        """What it tells until it leaves, as it was asked to. One that does not leave in time is ended."""
        found: list[tuple[int, Report]] = []
        deadline = time.monotonic() + LEAVE_SECONDS + 5.0
        while not self.ended and time.monotonic() < deadline:
            found += self.told(0.2)
        # One that hangs in the file system ends when that lets go of it, and does nothing more until then.
        self._process.kill()
        deadline = time.monotonic() + _END_SECONDS
        while not self.ended and time.monotonic() < deadline:
            found += self.told(0.2)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self._shut()
        return found

    def _shut(self) -> None:
        for pipe in (self._input, self._output):
            with suppress(OSError):
                pipe.close()
