"""The description of a job: what its batch script and its nodes have to know of it, kept in the run's `job` folder."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gradus.record.directory import CHANGED_DATA_MARK, RunDirectory
from gradus.schema.profile_request import PROFILE_FILE

DESCRIPTION_FILE = "job.json"
SCRIPT_FILE = "script.sh"
JOBS_FILE = "jobs.jsonl"
PREFLIGHT_FILE = "preflight.json"
# Ports below the kernel's own for outgoing connections (32768 and up, net.ipv4.ip_local_port_range).
_FIRST_PORT, _PORTS = 20_000, 12_000


@dataclass(frozen=True)
class JobDescription:
    nodes: int
    ranks_per_node: int
    retries: int = 3
    lead_seconds: int = 120  # before the time limit, Slurm asks the job to stop
    sbatch_options: tuple[str, ...] = ()  # the script's header, to chain a job with

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @classmethod
    def load(cls, run: RunDirectory) -> JobDescription:
        document = json.loads((run.job / DESCRIPTION_FILE).read_text())
        known = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        return cls(**{**known, "sbatch_options": tuple(document["sbatch_options"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def rendezvous_port(job_id: int, attempt: int) -> int:
    """A port of its own for each job on a node and for each attempt of a job: an old one may still be closing."""
    return _FIRST_PORT + (job_id * 31 + attempt) % _PORTS


def free_from(port: int) -> int:
    """The first port from this one on that nobody has on this node."""
    for candidate in range(port, _FIRST_PORT + _PORTS):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", candidate))
            return candidate
    return port  # whoever tries it says what is wrong


def attempt_files(job: Path) -> dict[str, str]:
    """What each attempt has from the submission: the recipe with plan and prediction, or a command."""
    names = ("recipe.yaml", "plan.yaml", "prediction.json", "command.json", CHANGED_DATA_MARK, PROFILE_FILE)
    return {name: (job / name).read_text() for name in names if (job / name).exists()}
