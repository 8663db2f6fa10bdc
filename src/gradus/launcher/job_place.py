"""Job place: where an attempt runs that a scheduler has given nodes to, and until when. Its own file says so."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from gradus.record.directory import RunDirectory

JOB_FILE = "job.json"


@dataclass(frozen=True)
class JobPlace:
    job_id: int
    restart: int = 0  # how often the job had been requeued
    nodes: tuple[str, ...] = ()
    deadline: float | None = None  # seconds since 1970: the end of the job, as far as it was known then

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def write_place(run: RunDirectory, attempt: int, place: JobPlace) -> None:
    (run.attempt_path(attempt) / JOB_FILE).write_text(place.to_json())


def read_place(run: RunDirectory, attempt: int) -> JobPlace | None:
    """None: no scheduler has to do with the attempt, or nothing of its file can be read."""
    try:
        document = json.loads((run.attempt_path(attempt) / JOB_FILE).read_text())
        return JobPlace(**{**document, "nodes": tuple(document["nodes"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
