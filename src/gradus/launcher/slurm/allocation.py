"""The allocation that this process is in: nodes, GPUs and CPUs that a job was given, from Slurm's variables."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from gradus.launcher.job_place import JobPlace
from gradus.launcher.slurm.host_list import expanded
from gradus.launcher.slurm.own_job import node_address, own_job


@dataclass(frozen=True)
class Allocation:
    job_id: int
    nodes: tuple[str, ...]
    restart: int = 0  # how often the job was requeued
    cpus_per_node: int | None = None
    gpus_per_node: int | None = None  # None: the environment does not say
    in_step: bool = False  # whether srun started this process

    def address(self) -> str:
        """Where the first node can be reached: by its name, or where that means nothing, as Slurm itself does."""
        first = self.nodes[0]
        try:
            socket.getaddrinfo(first, None)
        except OSError:
            return node_address(first)
        return first

    def place(self, deadline: float | None) -> JobPlace:
        """For an attempt that runs in it, until then or until the job ends, whichever is earlier."""
        job = own_job(self.job_id)
        ends = [job.ends_at.timestamp()] if job is not None and job.ends_at is not None else []
        ends += [deadline] if deadline is not None else []
        return JobPlace(self.job_id, self.restart, self.nodes, min(ends, default=None))


def allocation(variables: Mapping[str, str] = os.environ) -> Allocation | None:
    """The allocation of this process, if it is in one."""
    job, nodes = variables.get("SLURM_JOB_ID"), variables.get("SLURM_JOB_NODELIST")
    if not job or not nodes:
        return None
    return Allocation(
        int(job),
        tuple(expanded(nodes)),
        int(variables.get("SLURM_RESTART_COUNT", "0")),
        _smallest(variables.get("SLURM_JOB_CPUS_PER_NODE", "")),
        _gpus(variables),
        "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables,
    )


def _smallest(counts: str) -> int | None:
    """Of `4(x2),2`: what each node has at least."""
    found = [int(number) for number in re.findall(r"(?:^|,)(\d+)", counts)]
    return min(found) if found else None


def _gpus(variables: Mapping[str, str]) -> int | None:
    """Of one node. Slurm tells it in several ways, none of them always."""
    on_node = variables.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdecimal():
        return int(on_node)
    per_node = re.fullmatch(r"(?:[^:]+:)*(\d+)", variables.get("SLURM_GPUS_PER_NODE", ""))
    return int(per_node[1]) if per_node else None
