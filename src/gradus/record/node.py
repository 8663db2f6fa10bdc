"""The name of this node, as people and the scheduler know it."""

from __future__ import annotations

import os
import socket


def node_name() -> str:
    """Slurm's name for the node where this is a task of a job; else the host's own. They can differ."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
