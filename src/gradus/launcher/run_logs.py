"""Logs of a run: the end of what the nodes of an attempt printed, of all ranks or of one, and what is added to it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gradus.launcher.job_place import read_place
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError

LINES = 40  # about a screen
_CHUNK_BYTES = 1 << 16
_LOOK_EVERY_SECONDS = 0.5
_REPORT = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
_REPORT_LINES = 200  # more than it has for the eight ranks of a node
_RANK = re.compile(rb"\[rank(\d+)\]:")


def log_files(run: RunDirectory, attempt: int | None = None) -> list[Path]:
    """What an attempt printed: its job's own output first, if it had one, and then the log of each node.

    Of the newest attempt, or before the first, of the job that is to make it.
    """
    attempts = run.attempts
    if attempt is not None and attempt not in attempts:
        raise InputError(
            f"--attempt: found {attempt}, allowed: {', '.join(map(str, attempts)) or 'none, the run has not begun'}",
            field="--attempt",
            found=attempt,
            allowed=attempts,
        )
    of_nodes = sorted((run.attempt_path(attempt or attempts[-1]) / "logs").glob("*.log")) if attempts else []
    return [*_output_of(run, attempt), *of_nodes]


def _output_of(run: RunDirectory, attempt: int | None) -> list[Path]:
    """What the job of an attempt printed: what led to the attempt, its progress and the report. Newest by default."""
    if attempt is None:
        return job_outputs(run)[-1:]
    place = read_place(run, attempt)
    return [path for path in job_outputs(run) if place is not None and path.stem == str(place.job_id)]


def job_outputs(run: RunDirectory) -> list[Path]:
    """What the batch shells of a run's jobs printed, oldest first."""
    return sorted(run.job.glob("*.out"), key=lambda path: path.stat().st_mtime)


def last_lines(path: Path, lines: int = LINES, rank: int | None = None) -> list[str]:
    """The last lines of a file, of one rank where it is said whose they are; read from its end."""
    wanted = None if rank is None else str(rank).encode()
    found: list[bytes] = []
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        rest = b""
        while position > 0 and len(found) < lines:
            size = min(_CHUNK_BYTES, position)
            position -= size
            file.seek(position)
            parts = (file.read(size) + rest).split(b"\n")
            rest = parts[0]
            found = [*(line for line in parts[1:] if _is_of(line, wanted)), *found]
        if position == 0 and rest and _is_of(rest, wanted):
            found = [rest, *found]
    text = [line.decode(errors="replace") for line in found if line.strip()]
    return text[-lines:]


def shown_lines(path: Path, lines: int = LINES, rank: int | None = None) -> list[str]:
    """The last lines for people. torchrun's report of ranks that failed is not among them: they said it themselves."""
    found = last_lines(path, lines + _REPORT_LINES, rank)
    failed = next((at for at, line in enumerate(found) if line.startswith(_REPORT)), None)
    if failed is not None:
        begins = next((at for at in range(failed, -1, -1) if found[at].startswith("Traceback")), failed)
        ends = max(at for at in range(failed, len(found)) if at == failed or found[at].startswith("====="))
        found = [*found[:begins], "(torchrun's own report of this is left out here)", *found[ends + 1 :]]
    return found[-lines:]


def _is_of(line: bytes, rank: bytes | None) -> bool:
    mark = _RANK.match(line)
    return rank is None or (mark is not None and mark[1] == rank)


def followed(
    run: RunDirectory, rank: int | None = None, *, goes_on: Callable[[], bool], lines: int = LINES
) -> Iterator[tuple[Path, str]]:
    """Lines as they are written, each with its file, until nothing more can come. New attempts are followed too."""
    wanted = None if rank is None else str(rank).encode()
    offsets: dict[Path, int] = {}
    for path in log_files(run):
        offsets[path] = path.stat().st_size
        yield from ((path, line) for line in last_lines(path, lines, rank))
    alive = True
    while alive:
        alive = goes_on()
        for path in log_files(run):
            at = offsets.setdefault(path, 0)
            with path.open("rb") as file:
                file.seek(at)
                data = file.read()
            whole = data.rfind(b"\n") + 1
            offsets[path] = at + whole
            for line in data[:whole].splitlines():
                if _is_of(line, wanted):
                    yield path, line.decode(errors="replace")
        if alive:
            time.sleep(_LOOK_EVERY_SECONDS)
