"""Runs a script as a rank of a job: on its share of the cores, with the usual answers to signals.

Those were switched off for whoever started this.
"""

from __future__ import annotations

import os
import signal
import sys

from gradus.faults.stop_signals import STOP_SIGNALS
from gradus.hardware.rank_cores import bind_to_share
from gradus.record.variables import BIND, OWN

if __name__ == "__main__":
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if os.environ.get(BIND) != OWN:
        bind_to_share(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    os.execvp(sys.argv[1], sys.argv[1:])
