"""Storage: ranges of bytes of files here, by `pread`, or behind an address (s3://, gs://, http://), by fsspec."""

from __future__ import annotations

import os
import resource
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gradus.schema.errors import GradusError, InputError

# What fsspec needs beside itself for an address that begins so, as its documentation says.
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}


def is_remote(path: str) -> bool:
    return "://" in path


def joined(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(folder, name)


class Storage:
    """Files under one folder or address, opened when they are first read, in each process for itself."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.remote = is_remote(folder)
        self._open: OrderedDict[str, int] = OrderedDict()
        # The rest is for others: loader workers, for example, pass batches on through open files.
        self._at_once = max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._filesystem: tuple[int, Any] | None = None  # of the process that opened it

    def exists(self, name: str) -> bool:
        path = joined(self.folder, name)
        return bool(self._remote(lambda files: files.exists(path), name)) if self.remote else os.path.isfile(path)

    def size(self, name: str) -> int:
        path = joined(self.folder, name)
        if self.remote:
            return int(self._remote(lambda files: files.size(path), name))
        try:
            return os.stat(path).st_size
        except OSError as error:
            raise self._unreadable(name, error) from error

    def open_range(self, name: str, start: int, length: int) -> bytes:
        """These bytes of a file, all of them or an error."""
        if self.remote:
            path = joined(self.folder, name)
            found = bytes(self._remote(lambda files: files.cat_file(path, start, start + length), name))
        else:
            found = self._preads([name], [start], [length])[0]
        if len(found) != length:
            raise self._too_short(name, start, length, len(found))
        return found

    def open_ranges(self, names: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        """Many ranges; of what is far away, many at a time."""
        if not self.remote:
            return self._preads(names, starts, lengths)
        paths = [joined(self.folder, name) for name in names]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        found = self._remote(lambda files: files.cat_ranges(paths, list(starts), ends, on_error="raise"), names[0])
        for name, start, length, data in zip(names, starts, lengths, found, strict=True):
            if len(data) != length:
                raise self._too_short(name, start, length, len(data))
        return [bytes(data) for data in found]

    def copy(self, name: str, to: Path) -> None:
        """A whole file from far away, to a place here."""
        path = joined(self.folder, name)
        self._remote(lambda files: files.get_file(path, str(to)), name)

    def _preads(self, names: Sequence[str], starts: Sequence[int], lengths: Sequence[int]) -> list[bytes]:
        found, name = [], ""
        try:
            for name, start, length in zip(names, starts, lengths, strict=True):
                descriptor = self._open.get(name)
                data = os.pread(self._opened(name) if descriptor is None else descriptor, length, start)
                if len(data) < length:
                    data = self._rest(name, start, length, data)
                found.append(data)
        except OSError as error:
            raise self._unreadable(name, error) from error
        return found

    def _rest(self, name: str, start: int, length: int, data: bytes) -> bytes:
        """Linux reads at most 2 GiB at once; what is not there after that is missing."""
        while more := os.pread(self._open[name], length - len(data), start + len(data)):
            data += more
        if len(data) != length:
            raise self._too_short(name, start, length, len(data))
        return data

    def _opened(self, name: str) -> int:
        if len(self._open) >= self._at_once:
            os.close(self._open.popitem(last=False)[1])
        descriptor = os.open(joined(self.folder, name), os.O_RDONLY | os.O_CLOEXEC)
        self._open[name] = descriptor
        return descriptor

    def _unreadable(self, name: str, error: OSError) -> GradusError:
        if isinstance(error, FileNotFoundError):
            return self._missing(name)
        return GradusError(f"{joined(self.folder, name)} cannot be read: {error}")

    def _remote(self, ask: Any, name: str) -> Any:
        try:
            return ask(self._files())
        except (InputError, GradusError):
            raise
        except FileNotFoundError as error:
            raise self._unreadable(name, error) from None
        except Exception as error:  # each kind of storage raises its own
            what = f"{type(error).__name__}: {error}"
            raise GradusError(f"{joined(self.folder, name)} cannot be read: {what}") from error

    def _files(self) -> Any:
        """fsspec's view of the address. Its connections and threads do not survive a fork."""
        if self._filesystem is None or self._filesystem[0] != os.getpid():
            self._filesystem = (os.getpid(), opened_filesystem(self.folder))
        return self._filesystem[1]

    def _missing(self, name: str) -> InputError:
        path = joined(self.folder, name)
        return InputError(
            f"data.path: {path} does not exist", field="data.path", found=path, allowed="a packed dataset"
        )

    def _too_short(self, name: str, start: int, length: int, found: int) -> GradusError:
        path = joined(self.folder, name)
        return GradusError(
            f"{path} ends too early: {found} of {length} bytes at {start} are there",
            hint=f"copy it again; gradus data verify {self.folder} names all that is damaged",
        )

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]


def opened_filesystem(address: str) -> Any:
    protocol = address.partition("://")[0]
    needed = PACKAGES.get(protocol, "fsspec")
    message = f"data.path: {protocol}:// needs the package {needed}, which is not installed"
    hint = f"pip install fsspec {needed}" if needed != "fsspec" else "pip install fsspec"
    missing = InputError(message, hint=hint, field="data.path", found=address, allowed=needed)
    try:
        import fsspec
    except ImportError:
        raise missing from None
    try:
        return fsspec.core.url_to_fs(address)[0]
    except ImportError:
        raise missing from None
    except ValueError as error:
        known = "a folder here, or an address that fsspec knows (s3://, gs://, https://)"
        raise InputError(f"data.path: {error}", field="data.path", found=address, allowed=known) from None


@contextmanager
def flushed(file: Path) -> Iterator[IO[bytes]]:
    """A file to write that has its name only once everything is on the disk; a failure leaves nothing."""
    partial = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
