"""The preflight of a job, before its first attempt: once on each node, started by the batch script.

`python -m gradus.launcher.slurm.preflight_step RUN`. The first node leaves `job/preflight.json` and exits with 1 if
the nodes are not fit.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gradus.launcher.preflight.slurm_task import run as run_task
from gradus.launcher.slurm.description import PREFLIGHT_FILE
from gradus.record.directory import RunDirectory
from gradus.schema.cluster import Cluster

if __name__ == "__main__":
    os.umask(0o077)
    run = RunDirectory(Path(sys.argv[1]))
    code = run_task(run.job, run.job / PREFLIGHT_FILE, Cluster.load(run.job / "cluster.yaml"))
    sys.stdout.flush()
    os._exit(code)
