"""A plan that cannot be is refused by the command before anything is started or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradus_command import Gradus


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--set", "plan.mesh.tensor=2", "--nproc", "2"], "plan.mesh.tensor"),
        (["--set", "plan.precision=fp8"], "plan.precision"),
    ],
)
def test_the_command_starts_nothing_and_writes_nothing(tmp_path: Path, options: list[str], field: str) -> None:
    gradus = Gradus(tmp_path)
    path = gradus.recipe("own.yaml")
    before = sorted(tmp_path.rglob("*"))
    note = tmp_path / "pid"
    done = gradus("train", path, *options, "--json", NOTE_PID=str(note), CUDA_VISIBLE_DEVICES="")
    assert done.code == 2
    assert done.json["error"]["field"] == field
    assert sorted(tmp_path.rglob("*")) == before
    assert not note.exists(), "a rank was started"
