"""A preflight's task under srun: who it is, and where it finds the others, from Slurm's variables.

`python -m gradus.launcher.preflight.slurm_task FOLDER REPORT [CLUSTER]`, once on each node of a step.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gradus.launcher.preflight.node import Task, run_task
from gradus.launcher.preflight.report import write_report
from gradus.launcher.slurm.host_list import expanded
from gradus.schema.cluster import Cluster
from gradus.schema.errors import EXIT_FAILED, EXIT_FINISHED
from gradus.schema.stable_hash import stable_hash

# Not those of attempts (launcher/slurm/description.py): 12,000 from 20,000 on. The kernel's own begin at 32,768.
_FIRST_PORT, _PORTS = 15_000, 5_000 - 8


def task_of(folder: Path, cluster: Cluster | None, variables: Mapping[str, str] = os.environ) -> Task:
    names = tuple(expanded(variables["SLURM_STEP_NODELIST"]))
    job, step = int(variables["SLURM_JOB_ID"]), int(variables["SLURM_STEP_ID"])
    # The first node by its name, as other nodes know it; where that means nothing to them, the machine that srun was
    # started on, which they all know, and which in a batch job is the first node.
    addresses = [names[0], variables.get("SLURM_LAUNCH_NODE_IPADDR", "")]
    return Task(
        index=int(variables["SLURM_NODEID"]),
        names=names,
        hub=tuple(filter(None, addresses)),
        port=_FIRST_PORT + (job * 31 + step) % _PORTS,
        # The folder, too: a job of another cluster on the same machine may have the same number.
        key=f"{stable_hash(str(folder), job, step, variables.get('SLURM_RESTART_COUNT', '0')):016x}",
        folder=folder,
        cluster=cluster,
    )


def run(folder: Path, report: Path, cluster: Cluster | None) -> int:
    """This node's part; on the first node also the report, as text and as a file."""
    task = task_of(folder, cluster)
    if task.index == 0:
        with contextlib.suppress(OSError):
            report.unlink(missing_ok=True)  # of the job before it was requeued
    found = run_task(task)
    if found is None:
        return EXIT_FINISHED  # what is wrong here, the first node says
    with contextlib.suppress(BrokenPipeError):
        print("\n".join(found.lines()), flush=True)
    try:
        write_report(report, found)
    except OSError as error:
        print(f"{report}: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    return EXIT_FINISHED if found.fit else EXIT_FAILED


if __name__ == "__main__":
    os.umask(0o077)
    given = Cluster.load(sys.argv[3]) if len(sys.argv) > 3 else None
    code = run(Path(sys.argv[1]), Path(sys.argv[2]), given)
    sys.stdout.flush()
    os._exit(code)  # threads that still answer others do not matter any more
