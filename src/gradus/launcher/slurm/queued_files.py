"""The files of a run that waits in a queue, written before its job is submitted, and taken back if it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gradus.launcher.attempt import Prepared, claim_run
from gradus.launcher.slurm.description import SCRIPT_FILE
from gradus.record.directory import RunDirectory
from gradus.record.lock import release
from gradus.record.status import Status, read_status, write_status


@contextmanager
def written(run: RunDirectory, work: Prepared, files: Mapping[str, str], resume: str | None) -> Iterator[None]:
    """A run's directory with its job, in the queue as far as its files go; as it was before if the rest fails."""
    missing = [folder for folder in (run.path, *run.path.parents) if not folder.exists()]
    before = _files(run.job)
    status = read_status(run) if resume is not None else None
    run, lock = claim_run(
        run.path.parent.parent, run.name, run.id, None if resume is None else str(run.path), work.check_same_run
    )
    try:
        run.job.mkdir(mode=0o700, exist_ok=True)
        run.stop_file.unlink(missing_ok=True)  # whoever asked for a stop before, now it is to go on
        _replace_files(run.job, before, {**work.files, **files})
        step = status.step if status else 0
        write_status(run, Status("queued", step, attempt=max(run.attempts, default=0)))
        yield
    except BaseException:
        if missing:
            _remove(missing)
        else:
            _restore(run, before, status)
        raise
    finally:
        release(lock)


def _replace_files(folder: Path, before: Mapping[str, bytes], files: Mapping[str, str]) -> None:
    """What describes the work is all new; what earlier jobs said and which they were stays."""
    for name in before:
        if name.endswith((".yaml", ".json")) or name in files:
            (folder / name).unlink()
    for name, text in files.items():
        path = folder / name
        path.touch(0o700 if name == SCRIPT_FILE else 0o600)
        path.write_text(text)


def _files(folder: Path) -> dict[str, bytes]:
    """The small files of a job's folder; what jobs printed is left alone."""
    if not folder.is_dir():
        return {}
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file() and file.suffix != ".out"}


def _restore(run: RunDirectory, before: Mapping[str, bytes], status: Status | None) -> None:
    for name in _files(run.job):
        (run.job / name).unlink()
    for name, content in before.items():
        (run.job / name).write_bytes(content)
    if not before:
        with suppress(OSError):
            run.job.rmdir()
    if status is not None:
        write_status(run, status)


def _remove(missing: Sequence[Path]) -> None:
    """What was made, innermost first; a parent in which another run was made meanwhile stays."""
    innermost, *above = missing
    shutil.rmtree(innermost, ignore_errors=True)
    with suppress(OSError):
        for folder in above:
            folder.rmdir()
