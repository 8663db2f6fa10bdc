"""Job: what is done with the bytes of one save until they are a checkpoint, and what is told of it. No torch.

write ─▶ this rank's part (on the node's own disk, if there is a local tier) ─▶ "written": the memory is free again
copy  ─▶ with a local tier, from there into the run's folder                 ─▶ "copied"
commit ▶ on rank 0, when all parts are there, and older checkpoints may go   ─▶ "committed", "pruned"
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from gradus.checkpoint.commit import commit, has_come
from gradus.checkpoint.local_tier import copy_part, forget_older, recorded, write_document
from gradus.checkpoint.manifest import verify_folder
from gradus.checkpoint.part import (
    Abandoned,
    PartLayout,
    PartRecord,
    read_record,
    write_part,
    write_record,
    write_whole,
)
from gradus.checkpoint.report import Report
from gradus.checkpoint.retention import Retention, prune
from gradus.checkpoint.step_folder import step_name
from gradus.record.durable import flush
from gradus.record.format import bytes_text
from gradus.schema.errors import GradusError

if TYPE_CHECKING:
    from typing_extensions import Buffer

Phase = Literal["write", "copy", "commit"]
Data = Callable[[int, int], "Buffer"]  # the bytes from one place of the file to another
_Result = TypeVar("_Result")

# Seconds until the next try: 63 in all, about as long as a file system takes whose server is failed over.
DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
# Left by a rank that gives up, for rank 0, which would wait for its part. Rank 0 tidies what begins like a part.
_GIVEN_UP = "part-given-up.json"
_LOOK_SECONDS = 1.0  # how often it is looked for


@dataclass(frozen=True)
class Job:
    step: int
    rank: int
    ranks: int
    folder: Path  # of the run's checkpoints
    local: Path | None  # of the run on this node's own disk
    layout: PartLayout
    save_id: str  # the same on all ranks, and another for each save
    document: Mapping[str, Any] | None = None  # on rank 0, which commits: what the manifest says besides tensors
    retention: Retention | None = None
    held: tuple[str, ...] = ()  # all tensors that this rank has, whoever writes them
    began_from: int | None = None  # the step of the checkpoint that this attempt went on from

    @property
    def name(self) -> str:
        return step_name(self.step)

    def to_document(self) -> dict[str, Any]:
        return {
            **{key: getattr(self, key) for key in _PLAIN},
            "folder": str(self.folder),
            "local": None if self.local is None else str(self.local),
            "layout": self.layout.to_document(),
            "retention": None if self.retention is None else asdict(self.retention),
        }

    @staticmethod
    def from_document(document: Mapping[str, Any]) -> Job:
        given = dict(document)
        given["folder"] = Path(given["folder"])
        given["local"] = None if given["local"] is None else Path(given["local"])
        given["layout"] = PartLayout.from_document(given["layout"])
        given["retention"] = None if given["retention"] is None else Retention(**given["retention"])
        given["held"] = tuple(given["held"])
        return Job(**given)


_PLAIN = ("step", "rank", "ranks", "save_id", "document", "held", "began_from")


class Abandonment:
    """Whether a save is still wanted. Asked between two blocks, and set from another thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.why = ""

    def set(self, why: str) -> None:
        self.why = self.why or why
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    def __call__(self) -> bool:
        return self._event.is_set()


@dataclass
class _Running:
    job: Job
    abandonment: Abandonment = field(default_factory=Abandonment)
    recorded: threading.Event = field(default_factory=threading.Event)  # or given up: this rank has no more to write
    thread: threading.Thread | None = None
    parts: dict[Path, PartRecord] = field(default_factory=dict)  # by the folder that they were written into

    def is_alive(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class Jobs:
    """The saves that are under way in this process, each in a thread of its own, committed in the order of their start.

    The next may begin when the memory is free, that is after "written"; whoever starts them sees to that.
    """

    def __init__(self, tell: Callable[[int, Report], None]) -> None:
        self._tell = tell
        self._running: dict[int, _Running] = {}

    def start(self, number: int, job: Job, data: Data | None, phase: Phase = "write") -> None:
        self._running = {key: running for key, running in self._running.items() if running.is_alive()}
        before = max(self._running, default=None)
        mine = _Running(job)
        mine.thread = threading.Thread(
            target=_carry_out,
            args=(mine, data, phase, None if before is None else self._running[before], self._teller(number)),
            name=f"save-{job.step}",
            daemon=True,
        )
        self._running[number] = mine
        mine.thread.start()

    def abandon(self, number: int, why: str) -> None:
        if number in self._running:
            self._running[number].abandonment.set(why)

    def leave(self, why: str, seconds: float) -> None:
        """Give up what is not committed yet, and let what is being deleted be deleted."""
        deadline = time.monotonic() + seconds
        for running in self._running.values():
            running.abandonment.set(why)
        for running in self._running.values():
            if running.thread is not None:
                running.thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def busy(self) -> bool:
        return any(running.is_alive() for running in self._running.values())

    def _teller(self, number: int) -> Callable[[Report], None]:
        return lambda report: self._tell(number, report)


def _carry_out(
    mine: _Running, data: Data | None, phase: Phase, before: _Running | None, tell: Callable[[Report], None]
) -> None:
    job = mine.job
    began = time.monotonic()
    try:
        _write_and_record(mine, data, phase, before, tell, began)
        mine.recorded.set()
        if job.document is not None:
            _commit(mine, before, tell, began)
            _prune(job, tell)
    except Abandoned:
        message = f"the checkpoint of step {job.step} was given up: {mine.abandonment.why}"
        _give_up(job, message)
        tell(Report("failed", job.step, message, time.monotonic() - began))
    except Exception as error:
        if not isinstance(error, (OSError, GradusError)):
            traceback.print_exc(file=sys.stderr)  # a mistake of ours, and the run should go on all the same
        message = f"the checkpoint of step {job.step} cannot be written: {_with_advice(error, job)}"
        _give_up(job, message)
        tell(Report("failed", job.step, message, time.monotonic() - began))
    finally:
        mine.recorded.set()


def _write_and_record(
    mine: _Running,
    data: Data | None,
    phase: Phase,
    before: _Running | None,
    tell: Callable[[Report], None],
    began: float,
) -> None:
    job = mine.job
    shared = job.folder / job.name
    local = None if job.local is None else job.local / job.name

    def told(kind: Literal["written", "copied"], path: Path) -> None:
        file = str(path / job.layout.file_name)
        tell(Report(kind, job.step, file, time.monotonic() - began, job.layout.total_bytes))

    if phase == "write":
        assert data is not None
        if local is not None:
            try:
                _write(mine, local, data)
            except OSError as error:  # a detour that is not worth a second try
                message = (
                    f"the node's own disk does not take step {job.step}, which goes straight into the run's folder"
                )
                tell(Report("retrying", job.step, f"{message}: {error}"))
                local = None
        if local is None:
            _wait_for(before, mine.abandonment)
            _tried("writing", lambda: _write(mine, shared, data), mine, tell)
        told("written", local or shared)
    if job.local is not None and phase != "commit":
        _wait_for(before, mine.abandonment)
        if local is not None:
            source = local
            _tried("copying", lambda: _copy(mine, source, shared), mine, tell)
        told("copied", shared)
        with suppress(OSError):  # only copies, which take room
            forget_older(job.local, job.folder)


def _wait_for(before: _Running | None, abandonment: Abandonment) -> None:
    """In order: whoever sees this rank's record of a step knows that nothing more comes of the steps before."""
    while before is not None and not before.recorded.wait(0.1):
        if abandonment():
            raise Abandoned


def _write(mine: _Running, target: Path, data: Data) -> None:
    job = mine.job

    def write() -> PartRecord:
        return write_part(target, job.layout, data, abandoned=mine.abandonment, save_id=job.save_id, held=job.held)

    def beside() -> None:
        if target.parent == job.local and job.document is not None:
            write_document(target, job.save_id, job.ranks, job.document, job.began_from)

    _write_once(mine, target, write, beside)


def _copy(mine: _Running, source: Path, target: Path) -> None:
    job = mine.job

    def copy() -> PartRecord:
        record = read_record(source, job.rank, job.ranks)
        if record is None:
            name = str(source / job.layout.file_name)
            raise FileNotFoundError(errno.ENOENT, "is gone from the node's own disk", name)
        return copy_part(source, target, record, abandoned=mine.abandonment)

    _write_once(mine, target, copy)


def _write_once(
    mine: _Running, target: Path, write: Callable[[], PartRecord], beside: Callable[[], None] = lambda: None
) -> None:
    """Write a part and its record, of which a try before this one, or a process before, may have done all or some.

    As soon as the record has its name, rank 0 may commit, and delete older checkpoints. To write the part once more
    would undo that.
    """
    job = mine.job
    if has_come(target, job.rank, job.ranks, job.save_id):
        flush(target)
        return
    record = mine.parts.get(target)
    if record is None or not (target / record.file_name).exists():
        _check_room(target, job.layout.total_bytes)
        record = mine.parts[target] = write()
    beside()
    write_record(target, record)


def _check_room(folder: Path, needed: int) -> None:
    """Rather than fill the disk to its last byte, on which everybody's logs may lie too."""
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    found = os.statvfs(there) if there is not None else None
    if found is not None and found.f_blocks and found.f_bavail * found.f_frsize < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))


def _commit(mine: _Running, before: _Running | None, tell: Callable[[Report], None], began: float) -> None:
    job = mine.job
    path = job.folder / job.name
    assert job.document is not None
    while before is not None and before.is_alive():
        # Ranks write in order. When all have written this one, a part of the step before that is not there never comes.
        if _all_recorded(job) and not _all_recorded(before.job):
            before.abandonment.set(f"not all ranks wrote their part of it, and step {job.step} is complete")
        if mine.abandonment():
            raise Abandoned
        before.thread.join(0.2) if before.thread is not None else None
    look = _Look(job, mine.abandonment)
    document = job.document
    _tried(
        "committing",
        lambda: commit(path, job.step, job.ranks, document, abandoned=look, save_id=job.save_id),
        mine,
        tell,
    )
    size = sum(file["bytes"] for file in verify_folder(path, every_byte=False)["files"].values())
    tell(Report("committed", job.step, str(path), time.monotonic() - began, size))


def _all_recorded(job: Job) -> bool:
    path = job.folder / job.name
    return all(recorded(path, rank, job.ranks, job.save_id) for rank in range(job.ranks))


class _Look:
    """Whether a save is given up, here or on another rank, which says so in the step's folder."""

    def __init__(self, job: Job, abandonment: Abandonment) -> None:
        self._job, self._abandonment = job, abandonment
        self._next = 0.0

    def __call__(self) -> bool:
        if not self._abandonment() and time.monotonic() >= self._next:
            self._next = time.monotonic() + _LOOK_SECONDS
            given_up = given_up_by_another(self._job.folder, self._job.step, self._job.save_id)
            if given_up is not None:
                self._abandonment.set(given_up)
        return self._abandonment()


def given_up_by_another(folder: Path, step: int, save_id: str) -> str | None:
    """What a rank says that could not write its part, if one does."""
    try:
        found = json.loads((folder / step_name(step) / _GIVEN_UP).read_text())
        return f"rank {found['rank']}: {found['message']}" if found["save_id"] == save_id else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _give_up(job: Job, message: str) -> None:
    if job.ranks == 1:
        return
    said = {"rank": job.rank, "save_id": job.save_id, "message": message}
    with suppress(OSError):  # most likely for the same reason for which it is given up
        (job.folder / job.name).mkdir(parents=True, exist_ok=True)
        write_whole(job.folder / job.name / _GIVEN_UP, json.dumps(said).encode())


def _prune(job: Job, tell: Callable[[Report], None]) -> None:
    """Delete what need not stay. If there is anything, every byte of the new one is compared before."""
    if job.retention is None:
        return
    began = time.monotonic()
    try:
        cleared = prune(job.folder, job.step, job.retention)
    except (OSError, GradusError) as error:
        message = f"older checkpoints stay, as the one of step {job.step} may not be relied on: {error}"
        tell(Report("prune-failed", job.step, message, time.monotonic() - began))
        return
    seconds = time.monotonic() - began
    for problem in cleared.problems:  # somebody may have one open on a network file system
        tell(Report("prune-failed", job.step, f"an older checkpoint cannot be removed: {problem}", seconds))
    if cleared.set_aside:
        names = ", ".join(path.name for path in cleared.set_aside)
        message = f"{names}: of a history that was left, and set aside; the two newest stay until somebody deletes them"
        tell(Report("note", job.step, message, seconds))
    if cleared.steps:
        tell(Report("pruned", job.step, ", ".join(f"step {step}" for step in cleared.steps), seconds))


def _tried(doing: str, action: Callable[[], _Result], mine: _Running, tell: Callable[[Report], None]) -> _Result:
    """Do something that writes, again after a while if it fails for what may pass."""
    for delay in (*DELAYS, None):
        try:
            return action()
        except OSError as error:
            if delay is None or error.errno in _ADVICE or error.errno in _NEVER_PASS:
                raise
            message = f"{doing} the checkpoint of step {mine.job.step} failed, next try in {delay:g} s: {error}"
            tell(Report("retrying", mine.job.step, message, delay))
        if mine.abandonment.wait(delay):
            raise Abandoned
    raise AssertionError


# What does not pass by itself, and what to do about it.
_ADVICE = {
    errno.ENOSPC: "there is no room on its disk. Make room there, or keep fewer checkpoints (checkpoint.keep)",
    errno.EDQUOT: "the quota there is used up. Make room in it, or keep fewer checkpoints (checkpoint.keep)",
    errno.EROFS: "its file system can only be read. Have it mounted for writing again and training saves again",
    errno.EACCES: "this user may not write there. Give the permission (chmod, chown) and training saves again",
    errno.EPERM: "this user may not write there. Give the permission (chmod, chown, chattr) and training saves again",
}
_NEVER_PASS = {errno.EFBIG, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


def _with_advice(error: Exception, job: Job) -> str:
    if isinstance(error, GradusError):
        return error.message
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    advice = _ADVICE.get(error.errno or 0)
    if advice is None:
        return str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice += f"; this rank's part takes {bytes_text(job.layout.total_bytes)}{_free(error, job)}"
    return f"{error.filename or job.folder}: {advice}. Checkpoints that were committed before are untouched"


def _free(error: OSError, job: Job) -> str:
    # The error of a write names no file; what is full then is wherever this job wrote.
    tiers = [job.folder] if job.local is None else [job.local, job.folder]
    free = []
    for tier in tiers:
        with suppress(OSError):
            found = os.statvfs(tier)
            free.append(f"{bytes_text(found.f_bavail * found.f_frsize)} are free in {tier}")
    return "".join(f", {text}" for text in free)
