"""Rank signals: what ranks of a recipe do with the signals that ask a whole job to stop. They live on.

A scheduler that preempts sends SIGTERM to every process of a job, and SIGUSR1 goes to all of them where someone asks
for it; the one that leads the job turns either into a stop request, and ranks are told of that at a step. But torchrun
ends its ranks by SIGTERM, too, when one of them has failed: then a rank that may be stuck in a collective goes at once.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from gradus.faults.children import children_of, kill_descendants
from gradus.faults.stop_signals import STOP_SIGNALS


def survive_stop_signals(local_ranks: int) -> None:
    """From now on, in the main thread of a rank that has `local_ranks` - 1 others beside it under one torchrun."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, end == reading)
    # Python runs handlers in the main thread, which may never come back from where it is. This byte comes at once.
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, _ignored)
    threading.Thread(
        target=_listen, args=(reading, os.getppid(), local_ranks), name="gradus-signals", daemon=True
    ).start()


def _ignored(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN: that would be passed on to every program that the rank starts."""


def _listen(reading: int, torchrun: int, local_ranks: int) -> None:
    while received := os.read(reading, 64):
        if signal.SIGTERM in received and _is_being_ended(torchrun, local_ranks):
            kill_descendants(os.getpid())
            os._exit(128 + signal.SIGTERM)


def _is_being_ended(torchrun: int, local_ranks: int) -> bool:
    """Whether a rank beside this one is gone: torchrun ends the others when it has noticed that, and not before."""
    return os.getppid() != torchrun or len(children_of(torchrun)) < local_ranks
