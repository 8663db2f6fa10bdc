"""What all tests share: a pool of worker processes, so that multi-process tests do not each pay for starting torch."""

from __future__ import annotations

import os

# Before torch is imported, and for all processes that tests start: several tests run at once, each in several
# processes. With a thread for each core in each of them, they would mostly wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from pool import Pool

from gradus.record.directory import RunDirectory

# A busy machine is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")
