"""What is done to a run, and what has to come of it: each case really does it, through the command line.

`benchmarks/reliability_table.py` writes what came of them into docs/reliability.md, and
tests/slow/test_reliability_table.py runs the same. A case returns what was observed, in words, and fails if it is not
what is promised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import reliability_damage as damage
import reliability_disks as disks
from reliability_place import EVERY, SAVED, Outcome, Place, kill_left_over
from reliability_storm import kill_storm

AT_ONCE = 2  # most of a case is a process that starts


class Case(NamedTuple):
    done: str
    case: Callable[[Place], Outcome]


def storm_alone(place: Place) -> Outcome:
    return kill_storm(place, 40, seed=1, ranks=1)


def storm_of_two(place: Place) -> Outcome:
    return kill_storm(place, 12, seed=2, ranks=2)


CASES: dict[str, Case] = {
    "kill storm": Case(
        "SIGKILL of everything at 40 moments, random and aimed; a checkpoint every 3 steps, the writer slowed by some "
        "hundredths of a second so that each moment can be hit",
        storm_alone,
    ),
    "kill storm, two ranks": Case(
        "the same at 12 moments: launcher, torchrun, ranks, writers and loader workers", storm_of_two
    ),
    "a flipped byte in a tensor": Case("one bit in the newest checkpoint's part", damage.flipped_tensor),
    "a flipped byte in a part's header": Case("one bit", damage.flipped_header),
    "a flipped byte in MANIFEST.json": Case("one bit", damage.flipped_manifest),
    "a flipped byte in COMMITTED": Case("one bit", damage.flipped_committed),
    "a truncated part": Case("the last 4 KiB are cut off", damage.truncated),
    "a deleted part": Case("the file is deleted", damage.deleted_part),
    "a deleted manifest": Case("MANIFEST.json is deleted", damage.deleted_manifest),
    "an uncommitted checkpoint": Case("COMMITTED is deleted", damage.deleted_committed),
    "two parts swapped": Case("the parts of two ranks change names", damage.swapped_parts),
    "a pickle in place of a file": Case(
        "part, manifest, COMMITTED: a file that runs a command when it is unpickled", damage.pickled
    ),
    "every checkpoint damaged": Case("one bit in a part of each, saved by two ranks with ZeRO 3", damage.all_damaged),
    "damaged data": Case("one bit in a tar file; then one in the index", damage.damaged_data),
    "a full disk": Case("filled in the middle of a run, to its last byte; then room is made", disks.full_disk),
    "a read-only disk": Case("mounted read-only in the middle of a run, then writable again", disks.read_only),
    "writes that fail at random": Case("two of a thousand writes of the writer process fail", disks.failing_writes),
    "a slow disk": Case(
        f"every flush takes 0.6 s longer, with a checkpoint every {EVERY} steps of {SAVED}", disks.slow_disk
    ),
    "the writer process killed": Case("SIGKILL, three times", disks.killed_writer),
    "two runs in one directory": Case("a live run is resumed, and started, a second time", disks.two_in_one_directory),
    "a job that ends": Case("`--time 45s` for a run that takes far longer", disks.deadline),
}


@contextmanager
def outcomes(place: Place, names: list[str]) -> Iterator[dict[str, Future[Outcome]]]:
    """The cases under way, a few at a time; those that take longest come first."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {name: pool.submit(CASES[name].case, place) for name in names}
        pool.shutdown(cancel_futures=True)
    kill_left_over()
