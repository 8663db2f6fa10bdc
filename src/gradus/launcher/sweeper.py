"""Sweeper: waits until launcher and torchrun are both gone, however they went, and kills what they left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gradus.launcher.processes import kill_left_over

if __name__ == "__main__":
    while os.read(0, 1):  # the other end is held by those two alone: at its end of file both are gone
        pass
    kill_left_over(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
