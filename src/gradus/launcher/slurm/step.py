"""A step: `gradus train` inside of an allocation, whose nodes it uses. Nothing is queued or restarts by itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import TextIO

from gradus.faults.signals import SECOND_INTERRUPT
from gradus.hardware.cluster import detect_cluster
from gradus.hardware.detect import Machine
from gradus.hardware.slurm import detect_slurm
from gradus.launcher.attempt import Launch
from gradus.launcher.ending import note_failure, result_of
from gradus.launcher.following import POLL_SECONDS, Following, following
from gradus.launcher.job_place import write_place
from gradus.launcher.result import Result
from gradus.launcher.slurm.allocation import Allocation, allocation
from gradus.launcher.slurm.description import free_from, rendezvous_port
from gradus.launcher.slurm.node_ending import departure_of, node_endings
from gradus.launcher.slurm.own_job import gpus_of_job
from gradus.launcher.slurm.script import IGNORING, node_tasks
from gradus.launcher.together import started_together
from gradus.record.node import node_name
from gradus.record.stop import request_stop
from gradus.schema.cluster import Cluster

# Ranks that are to end at once have so long for it before srun is ended and Slurm kills what is left.
_END_SECONDS = 20.0


def other_nodes() -> Allocation | None:
    """The allocation, if there are nodes in it that this process can only reach through srun."""
    here = allocation()
    if here is None or started_together() is not None:
        return None  # where this process is one of several, they are on those nodes already
    names = (node_name(), socket.gethostname().partition(".")[0])
    return None if len(here.nodes) == 1 and here.nodes[0] in names else here


def cluster_of(here: Allocation, machine: Machine) -> Cluster:
    """What the allocation has. Which GPUs those are is known on a node of it, or from what Slurm calls them."""
    local = detect_cluster(machine)
    site = detect_slurm(machine).cluster
    gpus = here.gpus_per_node
    if gpus is None:  # a shell of salloc is told nothing of them
        of_job = gpus_of_job(here.job_id, len(here.nodes))
        gpus = local.gpus_per_node if of_job is None else of_job
    gpu = local.gpu or (site.gpu if site else None)
    cores = here.cpus_per_node or local.cpu_cores
    name = site.name if site else local.name
    return local.model_copy(
        update={"name": name, "nodes": len(here.nodes), "gpus_per_node": gpus, "gpu": gpu, "cpu_cores": cores}
    )


def launch_step(launch: Launch, here: Allocation, *, quiet: bool = False, stream: TextIO | None = None) -> Result:
    """Train on the nodes of the allocation: one task on each starts its ranks."""
    try:
        with following(launch, quiet=quiet, stream=stream) as followed:
            code = _run_srun(launch, here, followed)
    except BaseException as error:
        note_failure(launch, error)
        raise
    return result_of(launch, departure_of(node_endings(launch.run, launch.attempt), code))


def _run_srun(launch: Launch, here: Allocation, followed: Following) -> int:
    port = free_from(rendezvous_port(here.job_id, launch.attempt))  # this may be the first node
    write_place(launch.run, launch.attempt, here.place(launch.deadline))
    node = (sys.executable, "-m", "gradus.launcher.slurm.node", str(launch.run.path), str(launch.attempt))
    output = launch.run.log_path(launch.attempt, "srun")
    with output.open("ab") as log:
        process = subprocess.Popen(
            [
                *("srun", "--overlap", *node_tasks(len(here.nodes))),
                *([f"--cpus-per-task={here.cpus_per_node}"] if here.cpus_per_node else []),
                *(*IGNORING, "node", *node, here.address(), str(port), "--led"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(launch.script.unrecorded if launch.script else {})},
            start_new_session=True,  # the terminal's Ctrl-C is for this process alone
        )
        end_by: float | None = None
        try:
            while process.poll() is None:
                followed.poll()
                if followed.signals.at_once and end_by is None:
                    request_stop(launch.run, SECOND_INTERRUPT, now=True)
                    end_by = time.monotonic() + _END_SECONDS
                if end_by is not None and time.monotonic() > end_by:
                    process.send_signal(signal.SIGKILL)
                time.sleep(POLL_SECONDS)
        finally:
            if process.poll() is None:  # an exception of this process: nobody waits for the ranks any more
                process.terminate()
                process.wait()
    if output.stat().st_size == 0:
        output.unlink()
    return process.returncode


def ranks_of(here: Allocation, nproc: int | None, cluster: Cluster) -> int:
    """How many ranks in all: so many on each node, or one for each GPU."""
    return len(here.nodes) * (nproc or max(1, cluster.gpus_per_node))
