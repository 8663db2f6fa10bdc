from pathlib import Path

import pytest

from gradus.record.directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "quickstart")
