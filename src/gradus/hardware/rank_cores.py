"""The cores of a rank: those that it is bound to, or its share of those that it has in common with others."""

from __future__ import annotations

import os

from gradus.hardware.detect import usable_cores


def bind_to_share(rank_here: int, ranks_here: int) -> None:
    """Leave the other cores of the node to its other ranks. In order: a node's GPUs are numbered as its sockets are."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // ranks_here
    if share > 0:
        os.sched_setaffinity(0, cores[rank_here * share : (rank_here + 1) * share])


def cores_of_rank(ranks_here: int) -> int:
    """How many cores this process may count on, where `ranks_here` ranks run on the node."""
    try:
        bound = os.sched_getaffinity(0) < os.sched_getaffinity(
            os.getppid()
        )  # the parent may use more: these are its own
    except OSError:  # the parent is another user's
        bound = False
    return usable_cores() if bound else max(1, usable_cores() // max(1, ranks_here))
