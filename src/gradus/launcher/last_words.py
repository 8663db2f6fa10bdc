"""Last words: how a rank's output ends, read for people: the exception that ended it, and what to do about some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_HEADER = "Traceback (most recent call last)"
_NOT_THE_END = ("Exception ignored", "Exception in thread")  # tracebacks that end nothing
_SHOWN_LINES = 12
_TRACEBACK_LINES = 60
_LOST_PEER = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport", "DistNetworkError"),
    *("DistStoreError", "ncclRemoteError", "remote process exited"),
)
BREAKPOINT_HINT = "breakpoint() has no terminal in a rank: gradus train RECIPE --debug runs one rank where it works"
_SCRIPT_BREAKPOINT_HINT = (
    "breakpoint() has no terminal in a rank; to debug one rank alone: MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 RANK=0 "
    "LOCAL_RANK=0 WORLD_SIZE=1 python {script}"
)


@dataclass(frozen=True)
class LastWords:
    """What a rank said at its end. Without a traceback, the last lines are all there is."""

    exception: str | None
    traceback: str | None
    lines: str

    @property
    def lost_a_peer(self) -> bool:
        """Whether this rank failed only because another one did."""
        return any(sign in (self.traceback or self.lines) for sign in _LOST_PEER)

    def hint(self, script: str) -> str | None:
        text = self.traceback or self.lines
        if "bdb.BdbQuit" in text:
            return _SCRIPT_BREAKPOINT_HINT.format(script=script)
        if "Default process group has not been initialized" in text:
            return 'call torch.distributed.init_process_group("nccl" or "gloo") before anything that needs all ranks'
        if "terminate called without an active exception" in text:
            return (
                "threads of torch abort now and then while Python exits: if the script had come to its end, nothing is "
                "lost; sys.stdout.flush() and os._exit(0) as its last lines avoid it"
            )
        if "CUDA out of memory" in text or "OutOfMemoryError" in text:
            return "the GPU is full: a smaller batch for each rank, or fewer other processes on it"
        return None


def last_words(lines: Sequence[str]) -> LastWords:
    """What the end of a rank's output says."""
    shown = "\n".join(lines[-_SHOWN_LINES:])
    for start in range(len(lines) - 1, -1, -1):
        before = lines[start - 1] if start else ""
        if lines[start].startswith(_HEADER) and not before.startswith(_NOT_THE_END):
            end = next((at for at in range(start + 1, len(lines)) if not lines[at].startswith((" ", "\t"))), None)
            if end is not None and lines[end].strip():
                return LastWords(lines[end], "\n".join(lines[start:][:_TRACEBACK_LINES]), shown)
    return LastWords(None, None, shown)
