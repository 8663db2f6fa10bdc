"""From outside: where a process is that cannot tell any more. No torch: launchers look at their ranks so, too."""

from __future__ import annotations

import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from gradus.record.process import process_of

ASK = signal.SIGUSR2  # upon which a rank writes its stacks down, even if something holds Python's lock
ASK_SECONDS = 1.0
PY_SPY_SECONDS = 15.0  # reading the symbols of torch's libraries takes most of it
SHOWN_BYTES = 2**20
_FILE = "gradus-stacks"
_STATES = {
    "T": "its process is stopped (SIGSTOP)",
    "t": "its process is stopped by a debugger",
    "Z": "its process has ended",
    "X": "its process has ended",
    "D": "its process is stuck in the kernel, which waits for a disk or a device",
    "R": "its process computes and does not let go of Python's lock",
    "S": "its process sleeps and does not let go of Python's lock",
}


class Teller:
    """A file into which this process writes its stacks upon a signal, from inside the handler: no lock stops it."""

    def __init__(self) -> None:
        self._file: int | None = None
        if signal.getsignal(ASK) is signal.SIG_DFL:  # else somebody has another use for it
            self._file = os.memfd_create(_FILE)
            faulthandler.register(ASK, self._file, all_threads=True)

    def close(self) -> None:
        if self._file is not None:
            faulthandler.unregister(ASK)
            os.close(self._file)
            self._file = None


def state_of(pid: int) -> str:
    """What a process of this machine is doing that says nothing, in words."""
    found = process_of(pid)
    if found is None:
        return "its process is gone"
    return _STATES.get(found.state, f"its process is in state {found.state}")


def stacks_of(pid: int) -> str:
    """The stacks of a process of this machine, as far as they can be had."""
    return "\n".join(text for text in (_asked(pid), py_spy(pid)) if text)


def py_spy(pid: int) -> str | None:
    """All stacks of a process as py-spy sees them; None where it is not installed or not allowed to look."""
    beside = Path(sys.executable).with_name("py-spy")
    command = str(beside) if beside.exists() else shutil.which("py-spy")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "dump", "--native", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=PY_SPY_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout or None


def _asked(pid: int) -> str:
    """What a process with a Teller writes when it is asked to."""
    if state_of(pid) not in (_STATES["R"], _STATES["S"], _STATES["D"]):
        return ""
    try:
        file = next(path for path in Path(f"/proc/{pid}/fd").iterdir() if _FILE in os.readlink(path))
        reading = os.open(file, os.O_RDONLY)
    except (OSError, StopIteration):  # without one, the signal would end it
        return ""
    try:
        before = size = os.fstat(reading).st_size
        os.kill(pid, ASK)
        deadline = time.monotonic() + ASK_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.1)
            last, size = size, os.fstat(reading).st_size
            if size > before and size == last:
                break
        return os.pread(reading, SHOWN_BYTES, before).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(reading)
