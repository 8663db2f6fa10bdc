"""An append-only file of JSON lines that never stops training: what cannot be written now is kept and tried again."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradus.record import strict_json
from gradus.record.directory import RunDirectory
from gradus.record.problem import OnProblem, report_on_stderr


def log_in_folder(run: RunDirectory, folder: str, name: str, what: str, on_problem: OnProblem) -> AppendLog:
    """A log `folder/name.jsonl` of a run. Whatever becomes of it, training goes on; `what` is then missing."""
    path = run.path / folder
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        on_problem(f"{path}: cannot make it ({error.strerror}); {what} not written down")
    return AppendLog(path / f"{name}.jsonl", on_problem, keep=256)


class AppendLog:
    """The one writer of one file of JSON lines.

    While writing fails, lines wait in memory (at most `keep`; the oldest are dropped, and counted) and go out with the
    next write that succeeds. `on_problem` hears once when writing starts to fail, and once when it works again.
    """

    def __init__(self, path: Path, on_problem: OnProblem = report_on_stderr, keep: int = 4096) -> None:
        self.path = path
        self._on_problem = on_problem
        self._keep = keep
        self._lock = threading.Lock()
        self._file: int | None = None
        self._pending: deque[bytes] = deque()
        self._dropped = 0
        self._failure: str | None = None

    def write(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            self._pending.append(strict_json.encode(record).encode() + b"\n")
            if len(self._pending) > self._keep:
                self._pending.popleft()
                self._dropped += 1
            message = self._flush()
        # Outside the lock: the listener may well write to this very log.
        if message:
            self._on_problem(message)

    def close(self) -> list[str]:
        """Try once more what is waiting; what is lost for good comes back as problems."""
        with self._lock:
            self._flush()
            problems = []
            if self._pending:
                problems.append(f"{self.path}: {len(self._pending)} records not written: {self._failure}")
            if self._dropped:
                problems.append(f"{self.path}: {self._dropped} records dropped while writing failed")
            try:
                self._close_file()
            except OSError as error:  # network file systems report a full disk only here
                problems.append(f"{self.path}: closing failed: {error.strerror}")
            self._pending.clear()
            self._dropped = 0
            return problems

    def _flush(self) -> str | None:
        """Write all that is pending. Returns what there is to report, if anything changed."""
        waiting = len(self._pending)
        try:
            self._write_pending()
        except OSError as error:
            reported, self._failure = self._failure is not None, error.strerror or str(error)
            self._abandon_file()
            return None if reported else f"{self.path}: cannot write ({self._failure}); keeping records to try again"
        if self._failure is None:
            return None
        self._failure = None
        lost = f", {self._dropped} were dropped" if self._dropped else ""
        return f"{self.path}: writing works again; {waiting} records caught up{lost}"

    def _write_pending(self) -> None:
        while self._pending:
            start = b""
            if self._file is None:
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
                # A line cut short, by a full disk or by the death of an earlier writer, must not swallow the next one.
                if _ends_inside_a_line(self._file):
                    start = b"\n"
            data = start + b"".join(self._pending)
            written = os.write(self._file, data)
            rest = written - len(start)
            # A line that lacks only its newline counts as written: the newline is added when the file is opened again.
            while self._pending and rest >= len(self._pending[0]) - 1:
                rest -= len(self._pending.popleft())
            if written < len(data):
                self._close_file()

    def _close_file(self) -> None:
        # Forgotten before it is closed: a failing close must not lead to a second one of a number that is in use again.
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _abandon_file(self) -> None:
        with contextlib.suppress(OSError):  # the failure that led here is the one to report
            self._close_file()


class LogLines(NamedTuple):
    """What a file of JSON lines holds; `broken` counts the lines that are no records."""

    records: list[dict[str, Any]]
    broken: int


def read_lines(path: Path) -> LogLines:
    """All whole records of a file that may still be written to. An unfinished last line is not broken."""
    try:
        with path.open("rb") as file:
            # As much as there is now, and not to the end: a file that stands for a full disk has none.
            lines = file.read(os.fstat(file.fileno()).st_size).split(b"\n")
    except FileNotFoundError:
        return LogLines([], 0)
    records = []
    broken = 0
    last = len(lines) - 1
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(strict_json.decode(line))
        except ValueError:
            broken += number != last
    return LogLines(records, broken)


class LogTail:
    """Follows a file of JSON lines: each poll returns only the records added since the last one."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    @property
    def offset(self) -> int:
        """Up to which byte the file was read: where a later tail goes on."""
        return self._offset

    def poll(self) -> list[dict[str, Any]]:
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(self._offset)
                data = file.read(max(0, size - self._offset))
        except OSError:  # not there yet, or a stale handle of a network file system: the next poll reads on
            return []
        whole = data.rfind(b"\n") + 1  # the rest of an unfinished line comes with a later poll
        self._offset += whole
        records = []
        for line in data[:whole].splitlines():
            try:
                records.append(strict_json.decode(line))
            except ValueError:
                continue  # read_lines counts broken lines; a live view has nobody to tell
        return records


def _ends_inside_a_line(file: int) -> bool:
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
