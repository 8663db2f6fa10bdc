"""Surviving: attempts on this machine, one after another, as long as the ledger says that another one is worth it."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TextIO

from gradus.hardware.detect import detect_machine
from gradus.launcher.attempt import Launch, write_attempt
from gradus.launcher.launching import launch_here
from gradus.launcher.ledger import attempt_ended, settle
from gradus.launcher.result import Result
from gradus.launcher.slurm.step import other_nodes
from gradus.launcher.verdict import is_of_people
from gradus.record.node import node_name
from gradus.schema.cluster import Cluster


def launch_surviving(
    launch: Launch, retries: int, *, quiet: bool = False, stream: TextIO | None = None, stdout: TextIO | None = None
) -> Result:
    """Launch an attempt and, if it fails in a way that may not come again, another one from its newest checkpoint."""
    while True:
        result = launch_here(launch, quiet=quiet, stream=stream, stdout=stdout)
        nodes = other_nodes()
        names = nodes.nodes if nodes is not None else (node_name(),)
        ended = attempt_ended(launch.run, launch.attempt, result.document(), nodes=names)
        verdict = settle(launch.run, ended, retries)
        if verdict.decision not in ("again", "exclude"):
            return replace(result, exit_code=verdict.exit_code) if verdict.decision == "give-up" else result
        if not quiet:
            print(f"starting again: {verdict.reason}", file=stream or sys.stderr, flush=True)
        launch = _next(launch)


def _next(launch: Launch) -> Launch:
    """A new attempt at the same work, described by the same files."""
    before = launch.run.attempt_path(launch.attempt)
    files = {path.name: path.read_text() for path in before.iterdir() if path.is_file()}
    cluster = Cluster.load(before / "cluster.yaml")
    kept = {name: text for name, text in files.items() if name not in ("cluster.yaml", "environment.json")}
    # A person's request was not what ended the last one, or there would be no other.
    attempt = write_attempt(launch.run, cluster, detect_machine(), kept, is_new=is_of_people)
    return replace(launch, attempt=attempt)
