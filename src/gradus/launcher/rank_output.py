"""Rank output: what ranks print goes to one log, with the rank before each line; rank 0 is shown as it prints."""

from __future__ import annotations

import codecs
import contextlib
import re
import shutil
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, TextIO

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, Stream] = ("stdout", "stderr")
_REMEMBERED_LINES = 400
_LONGEST_LINE_BYTES = 1 << 20
_RANK_LINE = re.compile(r"\[rank\d+\]:")


def redirection(folder: Path) -> list[str]:
    """Options with which torchrun gives each rank files of its own in a folder."""
    return ["--redirects=3", f"--log-dir={folder}"]


def without_rank_lines(text: str) -> str:
    """What torchrun itself says in a log."""
    return "\n".join(line for line in text.splitlines() if not _RANK_LINE.match(line))


@dataclass
class _Followed:
    """One stream of one rank."""

    path: Path
    offset: int = 0
    unfinished: bytes = b""

    def read(self) -> bytes:
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read()
            self.offset += len(data)
            return data
        return b""


class RankOutput:
    """Reads what ranks print from the files that torchrun gives them, while they work. Call `poll` often."""

    def __init__(self, folder: Path, ranks: int, log: BinaryIO, first_rank: int = 0) -> None:
        self._folder = folder
        self._first_rank = first_rank
        self._ranks = ranks
        self._log = log
        self._followed: dict[tuple[int, Stream], _Followed] = {}
        self._shown: dict[Stream, TextIO] = {}
        self._decoders = {stream: codecs.getincrementaldecoder("utf-8")("replace") for stream in STREAMS}
        self._said: dict[tuple[int, Stream], deque[str]] = {}

    def show(self, stdout: TextIO, stderr: TextIO) -> None:
        """Show what rank 0 prints, byte for byte, so that progress bars look as they should."""
        self._shown = {"stdout": stdout, "stderr": stderr}

    def poll(self) -> None:
        if len(self._followed) < 2 * self._ranks:
            self._find()
        for (rank, stream), followed in self._followed.items():
            data = followed.read()
            if data:
                self._take(rank, stream, followed, data)
        self._log.flush()

    def close(self) -> None:
        """Take what is left. The files of the ranks are not kept: the log has it all."""
        self.poll()
        for (rank, stream), followed in self._followed.items():
            if followed.unfinished:
                self._take(rank, stream, followed, b"\n", shown=False)
        self._log.flush()
        shutil.rmtree(self._folder, ignore_errors=True)

    def last_words(self, rank: int) -> list[str]:
        """The last lines that a rank printed, those on stderr if there are any."""
        for stream in reversed(STREAMS):
            said = self._said.get((rank, stream), ())
            if any(line.strip() for line in said):
                return list(said)
        return []

    def _find(self) -> None:
        for path in self._folder.glob("*/attempt_0/*/std*.log"):
            stream: Stream = "stdout" if path.stem == "stdout" else "stderr"
            self._followed.setdefault((self._first_rank + int(path.parent.name), stream), _Followed(path))

    def _take(self, rank: int, stream: Stream, followed: _Followed, data: bytes, shown: bool = True) -> None:
        if rank == 0 and shown:
            self._show(stream, data)
        *whole, rest = (followed.unfinished + data).split(b"\n")
        # A progress bar is one line that is written over: only its last state is worth keeping.
        returns = rest[len(rest.rstrip(b"\r")) :]
        followed.unfinished = (_last_state(rest) + returns)[-_LONGEST_LINE_BYTES:]
        said = self._said.setdefault((rank, stream), deque(maxlen=_REMEMBERED_LINES))
        prefix = f"[rank{rank}]:"
        for line in whole:
            text = _last_state(line).decode(errors="replace")
            # torch itself puts the rank before the lines of a traceback.
            text = text.removeprefix(prefix).removeprefix(" ") if text.startswith(prefix) else text
            said.append(text)
            self._log.write(f"{prefix} {text}\n".encode())

    def _show(self, stream: Stream, data: bytes) -> None:
        if stream not in self._shown:
            return
        file = self._shown[stream]
        text = self._decoders[stream].decode(data)
        try:
            file.write(text.encode(file.encoding or "utf-8", "replace").decode(file.encoding or "utf-8"))
            file.flush()
        except (OSError, ValueError):  # the reader of a pipe went away: the run goes on, unseen
            del self._shown[stream]


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
