"""How a run ended: what is asked of the scheduler for it."""

from __future__ import annotations

import json

import pytest

from gradus.diagnosis import demise
from gradus.diagnosis.evidence import Evidence
from gradus.launcher.slurm.standing import Standing
from gradus.record.directory import RunDirectory


@pytest.mark.parametrize("is_watched", [False, True])
def test_the_controller_is_not_asked_anew_for_each_look_at_a_run_that_is_watched(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, is_watched: bool
) -> None:
    run.job.mkdir()
    line = {"job_id": "7", "submitted_at": "2026-11-01T10:00:00+00:00"}
    (run.job / "jobs.jsonl").write_text(json.dumps(line) + "\n")
    asked: list[object] = []
    monkeypatch.setattr(demise, "queue", lambda *fresh: asked.append(fresh))
    monkeypatch.setattr(demise, "standing", lambda *a, thorough: (asked.append(thorough), Standing("queued", "7"))[1])
    found = demise.demise_of(Evidence(run, is_watched=is_watched))
    assert found is not None
    assert found.state == "queued"
    assert asked == ([(), False] if is_watched else [(0,), True])
