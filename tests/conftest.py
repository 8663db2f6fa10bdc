"""What all tests share: a pool of worker processes, so that multi-process tests do not each pay for starting torch."""

from __future__ import annotations

import gc
import os
import signal

# Before torch is imported, and for all processes that tests start: several tests run at once, each in several
# processes. With a thread for each core in each of them, they would mostly wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# Without a GPU, Triton's kernels are interpreted. It asks when a kernel is defined, which is when its file is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from pool import Pool

from gradus.record.directory import RunDirectory

# A shell lets what it starts in the background ignore Ctrl-C, and so does whatever that starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure. The same examples each time: a new one that fails is no news about the change at hand.
# To look for others: HYPOTHESIS_SEARCHES=1.
settings.register_profile(
    "patient",
    deadline=None,
    derandomize="HYPOTHESIS_SEARCHES" not in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("patient")


# Minutes each, with few tests in a file: were they the last, all but one of the processes would have nothing to do.
LONGEST = ("slurm/test_survival.py", "slow/test_fault_storm.py", "docs/test_docs.py", "slow/test_reliability_table.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow ones by file: the longest first, the others mixed, so that those with many ranks do not meet.

    It counts with --no-loadscope-reorder; without, files with many tests go first.
    """

    def place(item: pytest.Item) -> tuple[int, int]:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if item.get_closest_marker("slow") is None:
            return -1, 0
        return next((at for at, name in enumerate(LONGEST) if name == path), len(LONGEST)), crc32(path.encode())

    items.sort(key=place)


def pytest_collection_finish() -> None:
    gc.freeze()  # a few million objects, none of them garbage, that no collection during a test need look at


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")
