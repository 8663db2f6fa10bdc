"""Staging: a node's own copy of the data, made once before its ranks read it, and found again after a requeue.

    <stage>/gradus-<user>/<name>-<key>/      a copy; the key is of what is copied, so a copy never changes its meaning
    <stage>/gradus-<user>/<hash>.lock        held by the one process of this node that copies from a place
    <stage>/gradus-<user>/<hash>.json        what came of it for one job: its other ranks here read that, and no more

Processes that use a copy hold a lock in it. When room is needed, copies that nobody holds are removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from gradus.data.shards.description import DESCRIPTION, INDEX, is_packed, read_description
from gradus.data.shards.storage import Storage, is_remote
from gradus.data.source import source_options
from gradus.data.sources import BUILT_IN
from gradus.data.sources.tokenised import Prepared
from gradus.data.staged_archive import is_archive, missing_unpacked_bytes, name_and_key, unpacked
from gradus.data.staged_copy import DATA, NO_ROOM, Copied, GivenUp, NoRoom, Original, Report, complete, missing_bytes
from gradus.data.token_cache import key_of
from gradus.record.format import bytes_text
from gradus.schema.errors import GradusError
from gradus.schema.recipe import DataBlock

AUTO = "auto"
JOB_FOLDERS = ("SLURM_TMPDIR", "TMPDIR")  # variables that name a job's own folder on its node
IN_USE = "in-use"
LOOK_SECONDS = 0.2  # at a lock that another process holds

_held: list[TextIO] = []  # locks on copies that this process reads, for as long as it lives


@dataclass(frozen=True)
class Staged:
    """What came of it: where to read now, and why if that is not a copy here."""

    path: str
    note: str
    copied_bytes: int = 0
    reused_bytes: int = 0
    linked_bytes: int = 0  # of files that this node does not need and that stay where they are
    here: bool = False  # whether there is a copy
    key: str = "path"  # of the data block that names the place


@dataclass(frozen=True)
class Job:
    """For whom something is staged. Ranks of one job on one node say the same `name`."""

    name: str
    report: Report = lambda done, total: None
    give_up: Callable[[], bool] = lambda: False


def staged_block(
    block: DataBlock, job: Job, wanted: Mapping[str, Collection[str]] | None = None
) -> tuple[DataBlock, list[Staged]]:
    """The data block with everything that it names on this node, as far as there is room. It means the same data.

    `wanted` has the files that this node needs, by the name of the source in a mixture (or "" without one); of others
    all are.
    """
    if block.stage is None:
        return block, []
    folder, problem = stage_folder(block.stage)
    if folder is None:
        return block, [Staged(str(block.options.get("path", "")), problem)]
    found: list[Staged] = []
    changes: dict[str, Any] = {}
    sources = block.options.get("sources")
    if block.use == "mixture" and isinstance(sources, Mapping):
        inner = {name: dict(keys) for name, keys in sources.items()}
        for name, keys in inner.items():
            common = {key: value for key, value in block.options.items() if key not in ("sources", "schedule")}
            use = str(keys.get("use"))
            known = BUILT_IN[use].model_fields if use in BUILT_IN else {}
            given = {key: value for key, value in {**common, **keys}.items() if key in known}
            keys.update(_stage_source(use, given, folder, block.stage, job, (wanted or {}).get(name), found))
        changes["sources"] = inner
    else:
        given = dict(block.options)
        if block.limit is not None and block.built_in:
            given["limit"] = block.limit
        changes = _stage_source(block.use, given, folder, block.stage, job, (wanted or {}).get(""), found)
    return block.model_copy(update=changes), found


def _stage_source(
    use: str,
    options: Mapping[str, Any],
    folder: Path,
    stage: str,
    job: Job,
    wanted: Collection[str] | None,
    found: list[Staged],
) -> dict[str, str]:
    """The keys of a source that are others now."""
    path = options.get("path")
    prepared = None
    if use in BUILT_IN and not is_archive(str(path)):
        prepared = source_options(use, options).prepare()
    if isinstance(prepared, Prepared):  # of text, tokens are read, and they lie in the cache
        done = stage_path(str(prepared.folder), folder, stage, job)
        if done.here:
            _link_neighbours(prepared.folder, Path(done.path))
            done = replace(done, path=str(Path(done.path).parent), key="cache")
        found.append(done)
        return {"cache": done.path} if done.here else {}
    if not isinstance(path, (str, os.PathLike)) or not (is_remote(str(path)) or Path(path).exists()):
        return {}
    done = stage_path(str(path), folder, stage, job, wanted)
    found.append(done)
    return {"path": done.path} if done.here else {}


def job_folder() -> str | None:
    """The job's own folder on this node, if it has one."""
    return next((os.environ[name] for name in JOB_FOLDERS if os.environ.get(name)), None)


def stage_folder(given: str) -> tuple[Path | None, str]:
    """Where copies go: a folder that was named, or the job's own on this node (`auto`); or why there is none."""
    if given != AUTO:
        return Path(os.path.expandvars(given)).absolute(), ""
    named = job_folder()
    if named is None:
        return None, f"not staged: neither {' nor '.join(JOB_FOLDERS)} is set"
    if _is_in_memory(Path(named)):
        return None, f"not staged: {named} is in this node's memory; data.stage: {named} stages there all the same"
    return Path(named).absolute(), ""


def stage_path(path: str, folder: Path, stage: str, job: Job, wanted: Collection[str] | None = None) -> Staged:
    """A file, a folder, an archive or packed shards, copied into a folder of this node; else the place itself."""
    began = time.monotonic()
    try:
        if stage == AUTO and not is_remote(path) and _same_disk(path, folder):
            return Staged(path, f"not staged: {path} is on the same disk as {folder}")
        root = folder / f"gradus-{os.getuid()}"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        outcome = root / f"{key_of([job.name, os.path.abspath(path)])}.json"
        with _locked(root / f"{key_of(os.path.abspath(path))}.lock", job):
            known = _known(outcome)
            if known is not None:
                _hold(Path(known.path), root)
                return known
            done = _staged(path, root, job, wanted)
            rate = f"{bytes_text(done.copied_bytes)} in {time.monotonic() - began:.0f} s"
            if done.here:
                done = replace(done, note=f"{done.note}: {rate}, {bytes_text(done.reused_bytes)} were there")
            _write(outcome, done)
            return done
    except GivenUp:
        return Staged(path, f"not staged: asked to stop while {path} was copied; what is copied stays")
    except OSError as error:
        return Staged(path, f"not staged: {folder} cannot be used: {error}")


def _staged(path: str, root: Path, job: Job, wanted: Collection[str] | None) -> Staged:
    """With the lock of this place held."""
    if is_archive(path):
        return _staged_archive(Path(path), root)
    originals, name, key = _listing(path)
    if originals and originals[0].fetch is not None:
        wanted = None  # what is far away cannot be linked to
    names = None if wanted is None else {f"{name}/{file}" for file in (*wanted, DESCRIPTION, INDEX)}
    copy = root / f"{name}-{key}"
    _hold_copy(copy)
    needed = missing_bytes(copy, originals, names)
    if not _has_room(root, copy, needed):
        return _short_of_room(path, root, needed)
    try:
        result: Copied = complete(copy, originals, names, job.report, job.give_up)
    except (NoRoom, OSError) as full:
        if isinstance(full, OSError) and full.errno not in NO_ROOM:
            raise
        _let_go(copy)
        shutil.rmtree(copy, ignore_errors=True)  # room for others, who may have taken it meanwhile
        return replace(_short_of_room(path, root, needed), note=f"not staged: {full}; {path} is read where it is")
    here = copy / DATA / name
    note = f"staged {path} to {here}"
    if result.linked_bytes:
        note += f", without {bytes_text(result.linked_bytes)} that this node does not need"
    return Staged(str(here), note, result.copied_bytes, result.reused_bytes, result.linked_bytes, here=True)


def _staged_archive(archive: Path, root: Path) -> Staged:
    """An archive of pictures can be read in no other way than unpacked: without room, that is an error."""
    name, key = name_and_key(archive)
    copy = root / f"{name}-{key}"
    _hold_copy(copy)
    needed = missing_unpacked_bytes(archive, copy)
    if not _has_room(root, copy, needed):
        free = shutil.disk_usage(root).free
        raise GradusError(
            f"{archive} cannot be unpacked to {root}: it needs {bytes_text(needed)}, free are {bytes_text(free)}",
            hint="name a folder with room: data.stage, or unpack it once on shared storage",
        )
    here, copied, reused = unpacked(archive, copy, name)
    return Staged(str(here), f"unpacked {archive} to {here}", copied, reused, here=True)


def _listing(path: str) -> tuple[list[Original], str, str]:
    """The files of a place, the name of their copy, and a key that is another one when they are."""
    name = os.path.basename(path.rstrip("/")) or "data"
    storage = Storage(path)
    if is_remote(path) or (os.path.isdir(path) and is_packed(storage)):
        description = read_description(storage)
        files = [(shard.file, shard.bytes, shard.xxh3_64) for shard in description.shards]
        files.append((INDEX, description.index.bytes, description.index.xxh3_64))
        known = [
            Original(f"{name}/{file}", size, os.path.join(path, file), digest, _fetching(storage, file))
            for file, size, digest in files
        ]
        last = Original(
            f"{name}/{DESCRIPTION}",
            storage.size(DESCRIPTION),
            os.path.join(path, DESCRIPTION),
            fetch=_fetching(storage, DESCRIPTION),
        )
        return [*known, last], name, key_of([description.model_dump(mode="json"), path])[:12]
    root = os.path.abspath(path)
    if os.path.isfile(root):
        found = os.stat(root)
        return [Original(name, found.st_size, root)], name, key_of([root, found.st_size, found.st_mtime_ns])[:12]
    originals, identity = [], []
    for file in _walk(root, set()):
        found = os.stat(file)
        relative = os.path.relpath(file, root)
        originals.append(Original(f"{name}/{relative}", found.st_size, file))
        identity.append([relative, found.st_size, found.st_mtime_ns])
    return originals, name, key_of([root, identity])[:12]


def _fetching(storage: Storage, file: str) -> Callable[[Path], None] | None:
    return (lambda to: storage.copy(file, to)) if storage.remote else None


def _walk(folder: str, above: set[str]) -> Iterator[str]:
    """All files under a folder, through links too, unless they lead in circles."""
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    for entry in found:
        if entry.is_dir():
            yield from _walk(entry.path, above | {real})
        elif entry.is_file():
            yield entry.path


def _has_room(root: Path, copy: Path, needed: int) -> bool:
    """Whether so many bytes fit; copies that nobody uses make room for it."""
    if needed <= shutil.disk_usage(root).free:
        return True
    for other in sorted(root.iterdir(), key=_changed_at):
        if not other.is_dir() or other == copy:
            continue
        with suppress(OSError), (other / IN_USE).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)
        if needed <= shutil.disk_usage(root).free:
            return True
    return False


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another job of this node made room just now
        return 0.0


def _short_of_room(path: str, root: Path, needed: int) -> Staged:
    free = shutil.disk_usage(root).free
    numbers = f"it needs {bytes_text(needed)} more in {root}, free are {bytes_text(free)}"
    return Staged(path, f"not staged: {numbers}; {path} is read where it is")


@contextmanager
def _locked(file: Path, job: Job) -> Iterator[None]:
    """The one process of this node that may copy from a place; the kernel lets go of it when it dies."""
    with file.open("a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if job.give_up():
                raise GivenUp
            time.sleep(LOOK_SECONDS)
        yield


def _hold_copy(copy: Path) -> None:
    """From now on until this process ends, nobody removes the copy."""
    while True:
        copy.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (copy / IN_USE).open("a")
        fcntl.flock(lock, fcntl.LOCK_SH)
        with suppress(OSError):
            if os.path.samestat(os.fstat(lock.fileno()), (copy / IN_USE).stat()):
                _held.append(lock)
                return
        lock.close()  # of a copy that was just removed


def _hold(path: Path, root: Path) -> None:
    if path.is_relative_to(root):
        _hold_copy(root / path.relative_to(root).parts[0])


def _let_go(copy: Path) -> None:
    for lock in [lock for lock in _held if Path(lock.name).parent == copy]:
        _held.remove(lock)
        lock.close()


def _known(outcome: Path) -> Staged | None:
    """What another rank of this job found out on this node."""
    try:
        known = Staged(**json.loads(outcome.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return known if not known.here or os.path.exists(known.path) else None


def _write(outcome: Path, done: Staged) -> None:
    beside = outcome.with_suffix(".partial")
    beside.write_text(json.dumps(asdict(done)))
    beside.replace(outcome)


def _link_neighbours(entry: Path, copy: Path) -> None:
    """Beside the copy of an entry of a cache, the others: a trained tokenizer is one of its own."""
    for other in entry.parent.iterdir():
        here = copy.parent / other.name
        if other.is_dir() and not other.name.endswith(".tmp") and not os.path.lexists(here):
            with suppress(FileExistsError):
                here.symlink_to(other.absolute())


def _same_disk(path: str, folder: Path) -> bool:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    return os.stat(path).st_dev == there.stat().st_dev


def _is_in_memory(folder: Path) -> bool:
    """Whether a folder is on a file system that is kept in memory."""
    best, kind = "", ""
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return False
    real = os.path.realpath(folder)
    for line in mounts:
        _, place, found, *_ = line.split(" ")
        place = place.replace("\\040", " ")
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind in ("tmpfs", "ramfs")
