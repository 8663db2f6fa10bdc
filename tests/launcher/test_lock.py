"""Two launchers never work on one run at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradus.record.directory import RunDirectory
from gradus.record.lock import locked
from gradus.schema.errors import InputError


def test_a_run_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    run = RunDirectory.create(tmp_path, "run")
    held = locked(run)
    with pytest.raises(InputError, match="the run is alive: another process holds it"):
        locked(run)
    held.close()
    locked(run).close()
