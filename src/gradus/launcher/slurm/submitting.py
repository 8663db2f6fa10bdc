"""Submitting from Python: `gradus.submit(recipe, cluster, nodes=4)`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gradus.launcher.given import Given, Overrides, recipe_given
from gradus.launcher.slurm.requests import Wish, recipe_request
from gradus.launcher.slurm.submission import Submitted, submit_job
from gradus.schema.cluster import Cluster


def submit(
    recipe: Given,
    cluster: Cluster | str | Path | None = None,
    nodes: int | None = None,
    nproc: int | None = None,
    *,
    wait: bool = False,
    overrides: Overrides = (),
    time_limit: str | None = None,
    partition: str | None = None,
    sbatch: Sequence[str] = (),
    after: Sequence[str] = (),
    runs: str | Path = "runs",
    run_id: str | None = None,
    resume: str | None = None,
    preflight: bool = False,
    retries: int = 3,
    accept_changed_data: bool = False,
    quiet: bool = False,
) -> Submitted:
    """Train a recipe on a cluster with Slurm: plan it for so many nodes, check it, and put it into the queue.

    `cluster` is a Cluster, its name or a path; the Slurm that answers here, if it is left out. `nproc` is the number of
    ranks on each node: one for each GPU by default. `sbatch` has further options, such as `["--licenses=matlab:1"]`.
    What comes back knows its `run` and its `job_id`; `.wait()` waits for the end, as `wait=True` does, and returns the
    run as `gradus.train` would; `.result` is how it is now. What cannot be submitted raises.
    """
    given = recipe_given(recipe, overrides)
    site = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster) if cluster else Cluster.detect()
    wish = Wish(
        nodes=nodes,
        nproc=nproc,
        fields={"time": time_limit, "partition": partition},
        sbatch=sbatch,
        after=after,
        runs=Path(runs),
        run_id=run_id,
        resume=resume,
        preflight=preflight,
        retries=retries,
        accept_changed_data=accept_changed_data,
    )
    submitted = submit_job(*recipe_request([given], site, wish))
    if not quiet:
        for note in submitted.job.notes:
            print(f"note: {note}", file=sys.stderr)
    if wait:
        submitted.wait(quiet=quiet)
    return submitted
