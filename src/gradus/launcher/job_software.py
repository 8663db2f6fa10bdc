"""All that a job is told about software: from the cluster's environment to lines for its script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradus.launcher.environment_pack import packed
from gradus.launcher.software import check_environment, environment_lines, python_of
from gradus.launcher.software_warnings import environment_warnings
from gradus.schema.cluster import Cluster


@dataclass(frozen=True)
class JobSoftware:
    """Lines of bash for a batch script, the interpreter as a word of its shell, and what a user should know."""

    lines: tuple[str, ...]
    python: str
    warnings: tuple[str, ...] = ()


def place_for_software(runs: Path) -> Path:
    """Where archives and copies of software are kept for jobs: beside their runs, which all nodes see."""
    return runs / ".gradus-software"


def job_software(cluster: Cluster, nodes: int, runs: Path, *, dry_run: bool = False) -> JobSoftware:
    """The environment of a job. What is not there is refused; an environment to pack is packed, unless in a dry run."""
    environment = cluster.environment
    check_environment(environment)
    warnings = environment_warnings(cluster, nodes)
    archive = packed(environment, cluster.storage, place_for_software(runs), dry_run)
    if archive is None:
        return JobSoftware(tuple(environment_lines(environment)), python_of(environment), tuple(warnings))
    rest = environment.model_copy(update={"conda": None, "venv": None})
    return JobSoftware((*environment_lines(rest), *archive.lines), archive.python, (*warnings, *archive.notes))
