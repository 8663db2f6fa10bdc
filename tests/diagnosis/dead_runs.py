"""Runs that have ended, written as their files: what ranks and launchers leave, without starting any."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import explain
from gradus.diagnosis.finding import Finding
from gradus.launcher.script import Script
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter
from gradus.record.outcome import write_outcome
from gradus.record.status import Status, write_status

RECIPE: dict[str, Any] = {
    "name": "dead",
    "model": {"use": "simple-cnn"},
    "data": {"use": "synthetic-images"},
    "batch": 32,
    "steps": 100,
    "optimizer": {"lr": 0.1},
}
PLAN: dict[str, Any] = {"micro_batch": 8, "accumulate": 4, "workers": 2, "precision": "bf16"}


def written_run(
    folder: Path,
    *,
    state: Any = "failed",
    error: Mapping[str, Any] | None = None,
    logs: Mapping[str, str] | None = None,
    script: str | None = None,
    ranks: int = 2,
    recipe: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    events: Sequence[Mapping[str, Any]] = (),
    step: int = 0,
) -> RunDirectory:
    """A run with one attempt: of a script (its text), or else of a recipe."""
    run = RunDirectory.create(folder / "runs", "dead", "x")
    files = {"environment.json": "{}"}
    if script is not None:
        (folder / "train.py").write_text(script)
        files["command.json"] = Script("file", "train.py", (), folder, ranks).to_json()
    else:
        files["recipe.yaml"] = yaml.safe_dump({**RECIPE, **(recipe or {})})
        mesh = {"mesh": {"replicate": ranks}} if ranks > 1 else {}
        files["plan.yaml"] = yaml.safe_dump({**PLAN, **mesh, **(plan or {})})
    attempt = run.new_attempt(files)
    for node, text in (logs or {}).items():
        run.log_path(attempt, node).write_text(text)
    write_status(run, Status(state, step, 100, attempt))
    if error is not None:
        write_outcome(run, attempt, {"state": "failed", "exit_code": 1, "error": dict(error)})
    run.metrics_path.write_text("".join(json.dumps({"attempt": 1, **row}) + "\n" for row in rows))
    writer = EventWriter(run, "rank-0-attempt-1")
    for event in events:
        writer.write(str(event["event"]), attempt=1, **{key: value for key, value in event.items() if key != "event"})
    writer.close()
    return run


def findings(run: RunDirectory) -> tuple[Finding, ...]:
    return explain(Evidence.of_run(run)).findings


def first(run: RunDirectory) -> Finding:
    found = findings(run)
    assert found, "no finding"
    return found[0]


def of_rank(rank: int, text: str) -> str:
    """As a node's log has what a rank printed."""
    return "".join(f"[rank{rank}]: {line}\n" for line in text.strip("\n").splitlines())
