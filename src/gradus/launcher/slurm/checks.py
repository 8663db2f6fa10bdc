"""Checks before a job is submitted: what Slurm would refuse, or would let wait for ever, is said at once."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from gradus.hardware.slurm_site import Node, Partition, nodes_in_text, partitions_in_text, start_in_text
from gradus.launcher.slurm.commands import SlurmError, answered, run_slurm
from gradus.launcher.slurm.options import Shape
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.scheduler import Scheduler, job_seconds, slurm_time

# File systems that live on, or in the memory of, one machine alone. Of others (nfs, lustre, gpfs, ...) other nodes may
# well see the same, and of what is not in either list nobody can say.
_OF_ONE_MACHINE = frozenset(
    [
        "tmpfs",
        "ramfs",
        "devtmpfs",
        "overlay",
        "aufs",
        "squashfs",
        "ext2",
        "ext3",
        "ext4",
        "xfs",
        "btrfs",
        "zfs",
        "f2fs",
        "jfs",
        "reiserfs",
        "bcachefs",
    ]
)
_CONTROLLER_SECONDS = 20.0


@dataclass(frozen=True)
class Site:
    """What the controller says of its cluster."""

    partitions: tuple[Partition, ...]
    nodes: tuple[Node, ...]
    requeues: bool = True  # whether jobs may go back into the queue, unless they say otherwise
    max_array_size: int | None = None
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def default_partition(self) -> Partition | None:
        return next((partition for partition in self.partitions if partition.is_default), None)

    def nodes_of(self, partitions: Sequence[Partition]) -> list[Node]:
        names = {partition.name for partition in partitions}
        return [node for node in self.nodes if names & set(node.partitions)]


def read_site() -> Site:
    """The site that commands here talk to; an error that says what is missing where there is none."""
    if shutil.which("sbatch") is None:
        raise InputError(
            "there is no Slurm on this machine: sbatch is not installed",
            hint="submit from a login node of the cluster; to train on this machine: gradus train",
            field="scheduler.kind",
            found="no sbatch",
            allowed="a machine from which jobs can be submitted",
        )
    try:
        partitions = run_slurm(["scontrol", "show", "partition"], retry_seconds=_CONTROLLER_SECONDS)
        nodes = run_slurm(["scontrol", "--details", "show", "node"])
        settings = _settings(run_slurm(["scontrol", "show", "config"]))
    except SlurmError as error:
        raise InputError(
            f"no job can be submitted from here: {error.message}",
            hint=error.hint,
            field="scheduler.kind",
            **error.details,
        ) from None
    size = settings.get("MaxArraySize", "")
    return Site(
        tuple(partitions_in_text(partitions)),
        tuple(nodes_in_text(nodes)),
        settings.get("JobRequeue", "1") != "0",
        int(size) if size.isdecimal() else None,
        settings,
    )


def check_scheduler(cluster: Cluster) -> None:
    if cluster.scheduler.kind != "slurm":
        raise InputError(
            f"scheduler.kind: {cluster.name} has no scheduler to submit to (found {cluster.scheduler.kind!r})",
            hint="gradus train RECIPE trains on this machine; else --cluster names one with scheduler: {kind: slurm}",
            field="scheduler.kind",
            found=cluster.scheduler.kind,
            allowed="slurm",
        )


def chosen_partitions(site: Site, scheduler: Scheduler) -> list[Partition]:
    """The partitions that a job may go to: those that are named, or the site's default."""
    if scheduler.partition is None:
        if site.default_partition is None:
            names = [partition.name for partition in site.partitions]
            raise InputError(
                "scheduler.partition: missing, and this site has no default",
                hint=f"one of {', '.join(names)}: gradus cluster show",
                field="scheduler.partition",
                found="nothing",
                allowed=names,
            )
        return [site.default_partition]
    known = {partition.name: partition for partition in site.partitions}
    found = []
    for name in scheduler.partition.split(","):
        if name not in known:
            raise unknown_name(
                "partition", name, known, field="scheduler.partition", hint="gradus cluster show lists them"
            )
        found.append(known[name])
    if not any(partition.is_up for partition in found):
        state = found[0].state.lower()
        raise InputError(
            f"scheduler.partition: {scheduler.partition} takes no jobs now: it is {state}",
            hint="gradus cluster show lists the others",
            field="scheduler.partition",
            found=scheduler.partition,
            allowed=[partition.name for partition in site.partitions if partition.is_up],
        )
    return found


def check_limits(site: Site, scheduler: Scheduler, nodes: int) -> list[str]:
    """Refuse more nodes or time than there is; what is worth knowing comes back."""
    partitions, notes = chosen_partitions(site, scheduler), []
    names = ", ".join(partition.name for partition in partitions)
    there = max(partition.nodes for partition in partitions)
    most = max(partition.most_nodes for partition in partitions)
    if nodes > most:
        limit = f"takes jobs of {most} nodes at most" if most < there else f"has {there} node{'s'[: there != 1]}"
        raise InputError(
            f"--nodes: found {nodes}, but partition {names} {limit}",
            hint="gradus cluster show has the limits of all partitions",
            field="--nodes",
            found=nodes,
            allowed=most,
        )
    least = min(partition.min_nodes for partition in partitions)
    if nodes < least:
        raise InputError(
            f"--nodes: found {nodes}, but partition {names} takes jobs of {least} nodes or more",
            field="--nodes",
            found=nodes,
            allowed=least,
        )
    limits = [partition.max_seconds for partition in partitions]
    longest = None if None in limits else max(limit for limit in limits if limit is not None)
    if scheduler.time is not None and longest is not None and job_seconds(scheduler.time) > longest:
        raise InputError(
            f"--time: found {scheduler.time}, but partition {names} allows {slurm_time(longest)} at most",
            hint="a run that needs longer is requeued at its limit and goes on: it may ask for less than it needs",
            field="--time",
            found=scheduler.time,
            allowed=slurm_time(longest),
        )
    if scheduler.time is None:
        default = partitions[0].default_seconds or partitions[0].max_seconds
        until = f"the limit of partition {partitions[0].name} holds: {slurm_time(default)}" if default else "no limit"
        notes.append(f"no --time is given: {until}; jobs that ask for less start earlier")
    working = sum(node.in_service for node in site.nodes_of(partitions))
    if working < nodes:
        notes.append(f"only {working} of the {nodes} nodes are in service now: the job waits for the others")
    return notes


def fitted(site: Site, scheduler: Scheduler, shape: Shape) -> tuple[Shape, list[str]]:
    """The shape in the site's own terms: GPUs only where Slurm counts them, cores as many as its nodes have."""
    nodes, notes = site.nodes_of(chosen_partitions(site, scheduler)), []
    if shape.gpus_per_node and scheduler.gres is None and scheduler.gpus_per_task is None and nodes:
        most = max(node.gpus for node in nodes)
        if most == 0:
            notes.append("Slurm counts no GPUs on these nodes, so that none are asked for: whole nodes have them all")
            shape = replace(shape, gpus_per_node=0)
        elif shape.gpus_per_node > most:
            raise InputError(
                f"gpus_per_node: the plan needs {shape.gpus_per_node} GPUs on a node, but the nodes of "
                f"{scheduler.partition or 'the partition'} have {most}",
                hint="correct gpus_per_node in the cluster file, or set --nproc",
                field="gpus_per_node",
                found=shape.gpus_per_node,
                allowed=most,
            )
    if shape.cpus_per_node is not None and scheduler.cpus_per_task is None and nodes:
        cpus = max(node.cpus for node in nodes)
        if cpus and shape.cpus_per_node > cpus:
            notes.append(f"nodes have {cpus} CPUs, and not {shape.cpus_per_node} as the cluster file says")
            shape = replace(shape, cpus_per_node=cpus)
    return shape, notes


def check_is_seen(folder: Path, cluster: Cluster, site: Site, scheduler: Scheduler) -> list[str]:
    """Refuse a run directory that the nodes of a job cannot see."""
    if any(ord(letter) < 32 or letter in "\\\x7f" for letter in str(folder)):
        raise InputError(
            f"--runs: {str(folder)!r} cannot be written into a batch script: it has a backslash or control characters",
            field="--runs",
            found=str(folder),
            allowed="a path without these",
        )
    here = {socket.gethostname(), socket.gethostname().partition(".")[0]}
    if {node.host for node in site.nodes_of(chosen_partitions(site, scheduler))} <= here:
        return []  # the nodes are this very machine
    shared = Path(cluster.storage.shared) if cluster.storage.shared else None
    if shared is not None and folder.resolve().is_relative_to(shared.resolve()):
        return []
    kind, mounted_at = file_system_of(folder)
    if kind in _OF_ONE_MACHINE:
        under = f", such as {shared / 'runs'}" if shared else ""
        raise InputError(
            f"--runs: {folder} is on a file system of this machine alone ({kind}, at {mounted_at}), and the nodes "
            "of the job would not find the run there",
            hint=f"--runs with a folder that all nodes see{under}; if they see this one, say so in the cluster file: "
            f"storage: {{shared: {mounted_at}}}",
            field="--runs",
            found=kind,
            allowed="a shared file system",
        )
    if shared is not None:
        return [f"{folder} is not in storage.shared ({shared}); it is on {kind}, which other nodes may see too"]
    return []


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> tuple[str, str]:
    """The type of the file system that a path is on, or will be, and where that is mounted."""
    real = os.path.realpath(path)
    best = ("unknown", "/")
    for line in mounts.read_text().splitlines():
        parts = line.split(" ")
        place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), parts[1])
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best[1]):  # of two at one place, the later one is on top
            best = (parts[2], place)
    return best


@dataclass(frozen=True)
class Start:
    """When and where Slurm would start a job, as far as it can tell."""

    at: datetime
    nodes: str


def earliest_start(script: str, environment: dict[str, str] | None = None) -> Start | None:
    """What `sbatch --test-only` says of a script: the last word before it is submitted."""
    answer = answered(["sbatch", "--test-only"], text=script, environment=environment)
    found = start_in_text(answer.err + answer.out)
    return Start(*found) if found else None


def _settings(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, re.MULTILINE))
