"""Unpack: regular files out of a tar or zip archive, into one folder and nowhere else."""

from __future__ import annotations

import shutil
import tarfile
import uuid
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from gradus.schema.errors import GradusError


class Member(NamedTuple):
    name: str
    size_bytes: int
    content: IO[bytes]


def unpack(archive: Path, folder: Path, wanted: Mapping[str, int] | None = None) -> list[Path]:
    """The files of an archive, or of those in it the wanted ones, which must be there with the sizes given.

    All or nothing: they appear when all of them could be read. An archive with a name that leads out of the folder, or
    with links or devices, is refused as a whole: nobody makes one by accident.
    """
    work = folder / f".unpacking-{uuid.uuid4().hex[:8]}"
    written: list[PurePosixPath] = []
    try:
        with _members(archive) as members:
            for member in members:
                name = _inside(archive, member.name)
                if wanted is not None and wanted.get(str(name)) is None:
                    continue
                if wanted is not None and member.size_bytes != wanted[str(name)]:
                    size = wanted[str(name)]
                    raise GradusError(f"{archive}: {name} has {member.size_bytes} bytes, expected {size}")
                to = work / name
                to.parent.mkdir(parents=True, exist_ok=True)
                with to.open("wb") as out:
                    shutil.copyfileobj(member.content, out)
                written.append(name)
        missing = sorted(set(wanted or ()) - set(map(str, written)))
        if missing:
            raise GradusError(f"{archive} has no {', '.join(missing)}: it is another archive")
        for name in written:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).replace(folder / name)
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, OSError) as error:
        raise GradusError(f"{archive} cannot be unpacked: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return [folder / name for name in written]


def _inside(archive: Path, name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name:
        raise GradusError(f"{archive} is refused: it wants to write {name!r}, outside of the folder")
    return path


@contextmanager
def _members(archive: Path) -> Iterator[Iterator[Member]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as opened:
            yield _zip_members(archive, opened)
    else:
        with tarfile.open(archive, "r:*") as tar:
            yield _tar_members(archive, tar)


def _tar_members(archive: Path, tar: tarfile.TarFile) -> Iterator[Member]:
    for entry in tar:
        if entry.isdir():
            _inside(archive, entry.name)
            continue
        content = tar.extractfile(entry) if entry.isreg() else None
        if content is None:
            raise GradusError(f"{archive} is refused: {entry.name!r} is a link or a device, not a file")
        yield Member(entry.name, entry.size, content)


def _zip_members(archive: Path, opened: zipfile.ZipFile) -> Iterator[Member]:
    for entry in opened.infolist():
        if entry.is_dir():
            _inside(archive, entry.filename)
            continue
        if (entry.external_attr >> 16) & 0o170000 == 0o120000:
            raise GradusError(f"{archive} is refused: {entry.filename!r} is a link, not a file")
        with opened.open(entry) as content:
            yield Member(entry.filename, entry.file_size, content)
