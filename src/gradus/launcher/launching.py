"""Launching: where the ranks of an attempt are started. On this machine, or on the nodes of the allocation it is in."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from gradus.launcher.attempt import Launch, deadline_in
from gradus.launcher.given import Given, Overrides, recipe_given
from gradus.launcher.local import launch_local
from gradus.launcher.recipe_run import prepare
from gradus.launcher.result import Result
from gradus.launcher.slurm.step import launch_step, other_nodes
from gradus.record.lock import release
from gradus.schema.cluster import Cluster
from gradus.schema.profile_request import ProfileRequest


def train(
    recipe: Given,
    nproc: int | None = None,
    *,
    overrides: Overrides = (),
    cluster: Cluster | None = None,
    runs: str | Path = "runs",
    run_id: str | None = None,
    resume: str | None = None,
    time_limit: str | None = None,
    accept_changed_data: bool = False,
    profile: str | None = None,
    quiet: bool = False,
) -> Result:
    """Train a recipe on this machine, or in a job on its nodes: start the ranks, wait, and return how it ended.

    The recipe is a path, a dict or a Recipe; `overrides` are `["optimizer.lr=1e-3"]` or `{"optimizer.lr": 1e-3}`.
    A bad recipe raises; a run that fails does not: its result has the state `failed` and the error. An interrupt asks
    the run to save and stop; it then has the state `stopped`. A second one ends it at once. With a `time_limit` such as
    `"1h30m"`, it saves and stops before that is over. A run to `resume` whose data has changed is refused, unless that
    is accepted. With `profile="steps=5"`, torch's profiler records some steps into the run's `traces/`.
    """
    given, deadline = recipe_given(recipe, overrides), deadline_in(time_limit, "time_limit")
    launch = prepare(
        given,
        nproc,
        cluster=cluster,
        runs=Path(runs),
        run_id=run_id,
        resume=resume,
        accept_changed_data=accept_changed_data,
        profile=ProfileRequest.parse(profile) if profile is not None else None,
    )
    try:
        result = launch_here(replace(launch, deadline=deadline), quiet=quiet)
    finally:
        if launch.lock is not None:
            release(launch.lock)  # now, and not when the launch is collected: the next call may go on with this run
    if result.error and not quiet:
        print(f"error: {result.error['message']}", file=sys.stderr)
    return result


def launch_here(
    launch: Launch, *, quiet: bool = False, stream: TextIO | None = None, stdout: TextIO | None = None
) -> Result:
    """Start the ranks, show progress, wait, and say how it ended. What rank 0 of a script prints goes to `stdout`."""
    nodes = other_nodes()
    if nodes is None:
        return launch_local(launch, quiet=quiet, stream=stream, stdout=stdout)
    return launch_step(launch, nodes, quiet=quiet, stream=stream)
