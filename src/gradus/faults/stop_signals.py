"""Stop signals: what asks a whole job to stop reaches each of its processes; the one that leads answers, no other."""

from __future__ import annotations

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def ignore_stop_signals(*more: signal.Signals) -> None:
    """From now on, in this process and in those that it starts."""
    for number in (*STOP_SIGNALS, *more):
        signal.signal(number, signal.SIG_IGN)
