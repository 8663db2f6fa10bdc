"""Download: one file over HTTP, whole and checked, or not at all. What has arrived is kept for the next try."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gradus.data.published import RemoteFile
from gradus.schema.errors import GradusError

BLOCK_BYTES = 2**18
TIMEOUT_SECONDS = 30.0
ATTEMPTS = 3  # to go on after a connection broke; each begins where the last one ended
PAUSE_SECONDS = 1.0

Report = Callable[[int, int | None], None]  # (bytes so far, bytes in all)


class DownloadError(GradusError):
    """A file could not be had. `again` tells whether the same may work later."""

    def __init__(self, message: str, *, again: bool, hint: str | None = None, **details: Any) -> None:
        super().__init__(message, hint=hint, **details)
        self.again = again


class _TakenError(DownloadError):
    """Another process has the partial file: nothing about it is ours."""


@dataclass(frozen=True)
class Downloaded:
    path: Path
    size_bytes: int
    sha256: str
    new: bool  # whether it was not there before


def download(url: str, file: RemoteFile, folder: Path, report: Report = lambda done, total: None) -> Downloaded:
    """Get a file into a folder. An existing one is checked and left as it is."""
    target = folder / file.name
    if target.exists():
        return _existing(target, file)
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{file.name}.part"
    try:
        with part.open("ab") as stream:
            _lock(stream, part)
            _fill(url, file, part, stream, report)
            found = _checked(part, url, file)
            os.fsync(stream.fileno())
            part.rename(target)
    except _TakenError:
        raise
    except DownloadError as error:
        if not error.again or not part.stat().st_size:
            part.unlink(missing_ok=True)
            _notes(part).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # not empty: something else is there
                for parent in created:
                    parent.rmdir()
        raise
    _notes(part).unlink(missing_ok=True)
    return Downloaded(target, target.stat().st_size, found, new=True)


def _lock(stream: IO[bytes], part: Path) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _TakenError(f"{part}: another process is writing it", again=True, hint="wait for it") from None
    except OSError:
        pass  # a file system without locks


def _existing(target: Path, file: RemoteFile) -> Downloaded:
    found = sha256_of(target)
    if file.sha256 is not None and found != file.sha256:
        message = f"{target} is there, but it is another file: SHA-256 {found}, expected {file.sha256}"
        raise DownloadError(message, again=False, hint=f"move it away: mv {target} {target}.other")
    return Downloaded(target, target.stat().st_size, found, new=False)


def sha256_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _checked(part: Path, url: str, file: RemoteFile) -> str:
    size, found = part.stat().st_size, sha256_of(part)
    if file.size_bytes is not None and size != file.size_bytes:
        message = f"{url} has {size} bytes, expected {file.size_bytes}: it is another file"
        raise DownloadError(message, again=False, found=size, allowed=file.size_bytes)
    if file.sha256 is not None and found != file.sha256:
        message = f"{url} has SHA-256 {found}, expected {file.sha256}: it is another file, or it was damaged on the way"
        raise DownloadError(message, again=False, found=found, allowed=file.sha256)
    return found


def _fill(url: str, file: RemoteFile, part: Path, stream: IO[bytes], report: Report) -> None:
    """Append to the partial file until it is whole, over several connections if one breaks."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return _receive(url, file, part, stream, report)
        except (TimeoutError, ConnectionError, http.client.HTTPException, _CutShort) as error:
            problem: Exception = error
        except urllib.error.HTTPError as error:
            again = error.code >= 500 or error.code == 429
            raise DownloadError(f"{url}: the server says {error.code} {error.reason}", again=again) from None
        except urllib.error.URLError as error:
            message = f"{url}: no connection: {error.reason}"
            raise DownloadError(message, again=True, kind_of_failure="offline") from None
        if attempt < ATTEMPTS:
            time.sleep(PAUSE_SECONDS)
    done = part.stat().st_size
    message = f"{url}: broke off after {done} bytes{f' of {file.size_bytes}' if file.size_bytes else ''}: {problem}"
    raise DownloadError(message, again=True, hint=f"run it again: it goes on where it stopped ({part})")


class _CutShort(Exception):
    """The server closed the connection before it had sent what it had announced."""


def _receive(url: str, file: RemoteFile, part: Path, stream: IO[bytes], report: Report) -> None:
    done, validator = _resumable(part, url)
    if file.size_bytes is not None and done == file.size_bytes:
        return
    with _opened(url, done, validator) as response:
        if response.status != 206 or not str(response.headers.get("Content-Range")).startswith(f"bytes {done}-"):
            stream.truncate(0)  # the whole file comes
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length is not None else None
        validator = response.headers.get("ETag") or response.headers.get("Last-Modified")
        _notes(part).write_text(json.dumps({"url": url, "validator": validator}))
        try:
            while block := _read(response):
                stream.write(block)
                done += len(block)
                report(done, total)
        finally:
            stream.flush()  # the next try looks at how long the file is
    if total is not None and done < total:
        raise _CutShort(f"the server sent {done} of {total} bytes")


def _opened(url: str, offset: int, validator: str | None) -> Any:
    headers = {"User-Agent": "gradus", "Accept-Encoding": "identity"}
    if offset:
        headers["Range"] = f"bytes={offset}-"
        if validator:
            headers["If-Range"] = validator  # a file that has changed since is sent from its beginning
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and offset:  # there is nothing after it, or another file by now: from the beginning
            return _opened(url, 0, None)
        raise


def _read(response: Any) -> bytes:
    try:
        block: bytes = response.read(BLOCK_BYTES)
    except OSError as error:  # of the connection: one of the disk is not for another try
        raise _CutShort(str(error)) from error
    return block


def _notes(part: Path) -> Path:
    """Where a partial file comes from: going on with another one would mix the two."""
    return part.with_name(part.name + ".json")


def _resumable(part: Path, url: str) -> tuple[int, str | None]:
    """How many bytes of the file are here already, and the server's word for its version."""
    try:
        notes = json.loads(_notes(part).read_text())
    except (OSError, ValueError):
        notes = {}
    if notes.get("url") != url:
        os.truncate(part, 0)
        return 0, None
    return part.stat().st_size, notes.get("validator")
