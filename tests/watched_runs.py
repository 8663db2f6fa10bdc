"""Runs to look at, made of their files alone."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

from gradus.launcher.ledger import settle
from gradus.launcher.verdict import Ended
from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory
from gradus.record.events import EventWriter, rank_writer
from gradus.record.status import Status, write_status


def begin(run: RunDirectory, step: int = 0, total: int = 100, **files: Any) -> int:
    """An attempt whose ranks are ready."""
    attempt = run.new_attempt(
        {"recipe.yaml": "", **{name.replace("_json", ".json"): json.dumps(v) for name, v in files.items()}}
    )
    EventWriter(run, f"launcher-attempt-{attempt}").write("launch", attempt=attempt, ranks=4)
    EventWriter(run, rank_writer(attempt)).write("start", attempt=attempt, step=step, steps_total=total, ranks=4)
    say(run, "running", step, total, attempt)
    return attempt


def train(run: RunDirectory, attempt: int, first: int, last: int, seconds: float = 0.5) -> None:
    log = AppendLog(run.metrics_path)
    for step in range(first, last + 1):
        rates = {"step_seconds": seconds, "tokens_per_second": 1000 / seconds, "samples_per_second": 1 / seconds}
        log.write({"step": step, "attempt": attempt, "loss": 5.0 - step / 50, **rates})
    log.close()


def say(run: RunDirectory, state: Any, step: int, total: int = 100, attempt: int = 1, **fields: Any) -> None:
    known = {"host": "elsewhere", "pid": 1, **fields}
    assert write_status(run, Status(state, step, total, attempt, **known)) is None


def save(run: RunDirectory, step: int) -> None:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    (folder / "COMMITTED").touch()


def fail(run: RunDirectory, attempt: int, step: int, retries: int = 3, **facts: Any) -> None:
    error = {"error_kind": "exception", "error_message": "ValueError: no", "error_signature": "no", **facts}
    settle(run, Ended(attempt, "failed", 1, step_reached=step, **error), retries)
    say(run, "failed", step, attempt=attempt, last_error="ValueError: no")


def health(run: RunDirectory, nodes: int, ranks: int = 8, step: int = 40, **bad: dict[str, Any]) -> None:
    """`n3={"step": 1}` makes the ranks of n3 different."""
    entries = []
    for number in range(nodes * ranks):
        node = f"n{number // ranks}"
        usual = {"step": step, "phase": "forward", "phase_seconds": 0.1, "own_seconds": 0.2, "data_seconds": 0.0}
        entries.append({"rank": number, "node": node, **usual, "memory_peak_bytes": 2**30, **bad.get(node, {})})
    slow = [{"rank": 8, "node": "n1", "ratio": 2.5, "since_step": 30}] if nodes > 1 else []
    now = datetime.now(timezone.utc).isoformat()
    document = {"time": now, "step": step, "ranks": entries, "stragglers": slow}
    (run.path / "health.json").write_text(json.dumps(document))


def submitted(run: RunDirectory, job_id: str = "7") -> None:
    run.job.mkdir()
    at = (datetime.now(timezone.utc) - timedelta(minutes=5)).isoformat()
    (run.job / "jobs.jsonl").write_text(json.dumps({"job_id": job_id, "submitted_at": at, "after": None}) + "\n")
