"""Parent: a process that ends when the one that started it does, also if that one is killed and cannot say so."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def end_with_parent(with_signal: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, with_signal)
