"""Fetch: a dataset by name or address, where its source looks for it; without a network, exactly what to copy where."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from gradus.data.download import Downloaded, DownloadError, Report, download
from gradus.data.published import PUBLISHED, Published, RemoteFile
from gradus.data.unpack import unpack
from gradus.schema.errors import GradusError, InputError, unknown_name

Reporter = Callable[[str], Report]  # a report for the file of this name


@dataclass(frozen=True)
class Fetched:
    folder: Path
    files: list[Downloaded]
    unpacked: list[Path]
    recipe: str | None  # the line that uses the data


def fetch(
    what: str, folder: Path | None, sha256: str | None, base: str | None, unpacks: bool, reporter: Reporter
) -> Fetched:
    """Get the data, or raise an error from which it can be got by hand."""
    if is_url(what):
        if base is not None:
            message = "--from: an address has its own place; it is for datasets that are known by name"
            raise InputError(message, field="--from", found=base, allowed=sorted(PUBLISHED))
        name = PurePosixPath(unquote(urlsplit(what).path)).name
        if not name or name in (".", ".."):
            raise InputError(f"{what}: names no file", field="NAME|URL", found=what, allowed="https://.../file")
        file = RemoteFile(name, None, _sha256(sha256), url=what)
        data = Published(what, (file,), (what.rpartition("/")[0] + "/",))
        return _fetch(data, [what], folder or Path("data"), reporter, unpacks, None)
    if what not in PUBLISHED:
        hint = "or give an address: https://..."
        raise unknown_name("dataset", what, PUBLISHED, field="NAME|URL", hint=hint)
    if sha256 is not None:
        message = f"--sha256: {what} is known, with its checksums; the option is for addresses"
        raise InputError(message, field="--sha256", found=sha256)
    if base is not None and not is_url(base):
        raise InputError(f"--from: found {base!r}", field="--from", found=base, allowed="https://.../")
    data = PUBLISHED[what]
    to = folder or Path("data") / what
    return _fetch(data, [base] if base else list(data.bases), to, reporter, bool(data.members), data.recipe(str(to)))


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _sha256(given: str | None) -> str | None:
    if given is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", given):
        allowed = "64 hexadecimal digits"
        message = f"--sha256: found {given!r}, allowed: {allowed}"
        raise InputError(message, field="--sha256", found=given, allowed=allowed)
    return given.lower() if given else None


def _fetch(
    data: Published, places: list[str], folder: Path, reporter: Reporter, unpacks: bool, recipe: str | None
) -> Fetched:
    wanted = dict(data.members) or None
    if wanted is not None and all(_has(folder / name, size) for name, size in wanted.items()):
        return Fetched(folder, [], [folder / name for name in wanted], recipe)
    try:
        files = [_from_any(file, places, folder, reporter(file.name)) for file in data.files]
    except OSError as error:
        raise GradusError(f"{folder} cannot be written: {error}", hint="choose another one with --to") from error
    except DownloadError as error:
        if not error.again or error.hint:
            raise
        raise _by_hand(error, data, places, folder, unpacks) from error
    unpacked = [path for file in files for path in unpack(file.path, folder, wanted)] if unpacks else []
    return Fetched(folder, files, unpacked, recipe)


def _has(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _from_any(file: RemoteFile, places: list[str], folder: Path, report: Report) -> Downloaded:
    """From the first place that has it; what the last one said is the error."""
    for number, place in enumerate(places, 1):
        try:
            return download(_address(place, file), file, folder, report)
        except DownloadError:
            if number == len(places):
                raise
    raise AssertionError("a dataset is published somewhere")


def _address(place: str, file: RemoteFile) -> str:
    """A place is the address of the file itself, or of a folder that has it."""
    if file.url is not None:  # as it is: what it has as %20 is a space in the name
        return file.url
    return place if place.split("?")[0].endswith(f"/{file.name}") else place.rstrip("/") + f"/{file.name}"


def _by_hand(error: DownloadError, data: Published, places: list[str], folder: Path, unpacks: bool) -> GradusError:
    """Compute nodes often have no internet: say what to copy where, so that it can be done from elsewhere."""
    lines, files = [], []
    for file in data.files:
        address = _address(places[0], file)
        size = f"{file.size_bytes:,} bytes" if file.size_bytes else "size not known"
        lines += [f"  {file.name}  ({size})", f"    from    {address}"]
        lines += [f"    sha256  {file.sha256}"] if file.sha256 else []
        lines += [f"    to      {(folder / file.name).absolute()}"]
        document: dict[str, Any] = {"name": file.name, "url": address, "size_bytes": file.size_bytes}
        files.append({**document, "sha256": file.sha256, "to": str((folder / file.name).absolute())})
    what = "these files and copy them" if len(files) > 1 else "this file and copy it"
    then = "check and unpack" if unpacks else "check"
    return GradusError(
        f"{error.message}\nWhere there is a network, download {what} here; the same command again will {then} it:\n"
        + "\n".join(lines),
        hint="on a login node there often is one; a copy elsewhere can be named with --from",
        files=files,
    )
