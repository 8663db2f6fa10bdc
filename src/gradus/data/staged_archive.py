"""An archive of many small files, unpacked on a node's own disk: one large read where there would be millions."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

from gradus.data.staged_copy import DATA, boot
from gradus.data.token_cache import key_of
from gradus.data.unpack import unpack

UNPACKED = "unpacked.json"  # says that everything is there
ARCHIVES = (".tar.gz", ".tar.bz2", ".tar.xz", ".tgz", ".tar", ".zip")


def is_archive(path: str) -> bool:
    return path.lower().endswith(ARCHIVES) and os.path.isfile(path)


def name_and_key(archive: Path) -> tuple[str, str]:
    """The name without its ending, and a key that is another one when the archive is."""
    found = archive.stat()
    ending = next(ending for ending in ARCHIVES if archive.name.lower().endswith(ending))
    key = key_of([str(archive.absolute()), found.st_size, found.st_mtime_ns])[:12]
    return archive.name[: -len(ending)] or "data", key


def missing_unpacked_bytes(archive: Path, copy: Path) -> int:
    """How much room it will take."""
    if _unpacked_before(copy) is not None:
        return 0
    if archive.name.lower().endswith(".zip"):
        with zipfile.ZipFile(archive) as opened:
            return sum(entry.file_size for entry in opened.infolist())
    if archive.name.lower().endswith(".tar"):
        return archive.stat().st_size
    with tarfile.open(archive, "r:*") as tar:  # it has to be unzipped to know
        return sum(entry.size for entry in tar)


def unpacked(archive: Path, copy: Path, name: str) -> tuple[Path, int, int]:
    """The folder with the files, and the bytes that were written now, and that were there."""
    target = copy / DATA / name
    before = _unpacked_before(copy)
    if before is not None:
        return _only_folder(target), 0, before
    (copy / UNPACKED).unlink(missing_ok=True)
    shutil.rmtree(copy / DATA, ignore_errors=True)  # what a process that was killed has left
    target.mkdir(parents=True)
    written = sum(file.stat().st_size for file in unpack(archive, target))
    (copy / UNPACKED).write_text(json.dumps({"boot": boot(), "bytes": written}))
    return _only_folder(target), written, 0


def _unpacked_before(copy: Path) -> int | None:
    """The bytes of what is there and whole. A machine that went down since may have lost some of it."""
    try:
        recorded = json.loads((copy / UNPACKED).read_text())
        return int(recorded["bytes"]) if recorded["boot"] == boot() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _only_folder(folder: Path) -> Path:
    """Most archives hold one folder with everything in it."""
    inside = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
    # Not where it is the one class of a dataset: then its files are pictures, and no folders.
    return inside[0] if len(inside) == 1 and any(entry.is_dir() for entry in inside[0].iterdir()) else folder
