"""Ending a run at once from another process: what it has here is killed, and what it has elsewhere is asked for."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time

from gradus.launcher.ending import note_end_at_once
from gradus.launcher.processes import kill_left_over
from gradus.record.directory import RunDirectory
from gradus.record.status import Status, writer_is_gone
from gradus.record.stop import request_stop

BY = "gradus runs stop --now"
_GONE_AFTER_SECONDS = 10.0


def end_at_once(run: RunDirectory, status: Status) -> bool:
    """End a run without a save; whether anything was ended here. If not, its launcher elsewhere does it."""
    request_stop(run, BY, now=True)  # first: its launcher is to know why its ranks died
    if kill_left_over(run.path, status.attempt):
        return True
    if status.host != socket.gethostname() or status.pid is None or writer_is_gone(status):
        return False
    # One process that is everything: an own loop that python started, or --debug. Nobody is left to tell of its end.
    with contextlib.suppress(ProcessLookupError):
        os.kill(status.pid, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_AFTER_SECONDS
    while not writer_is_gone(status) and time.monotonic() < deadline:
        time.sleep(0.05)
    note_end_at_once(run, status.attempt, BY)
    return True
