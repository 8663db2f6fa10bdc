"""What all tests share: a pool of worker processes, so that multi-process tests do not each pay for starting torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pool import Pool

from gradus.record.directory import RunDirectory


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool() as pool:
        yield pool


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "run")
