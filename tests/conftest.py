"""What all tests share: a pool of worker processes, so that multi-process tests do not each pay for starting torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    with Pool(4) as pool:
        yield pool
