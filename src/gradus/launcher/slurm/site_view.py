"""A site as a person wants to see it: what is free where, for how long one may have it, and when a job would start."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from gradus.hardware.slurm_site import Partition
from gradus.launcher.slurm.checks import Site, Start, chosen_partitions, earliest_start
from gradus.launcher.slurm.commands import SlurmError
from gradus.launcher.slurm.options import header_word
from gradus.launcher.slurm.queue import Queue
from gradus.schema.cluster import Cluster
from gradus.schema.scheduler import job_seconds, slurm_time


@dataclass(frozen=True)
class PartitionView:
    """A partition in numbers. Times are as Slurm writes them; None: no limit."""

    name: str
    is_default: bool
    state: str
    nodes: int
    nodes_free: int  # with nothing on them
    nodes_out_of_service: int
    gpus: int
    gpus_free: int
    gpu_types: list[str]
    gpus_per_node: int
    cpus: int
    cpus_free: int
    cpus_per_node: int
    max_nodes: int | None
    max_time: str | None
    default_time: str | None
    may_be_preempted: bool


@dataclass(frozen=True)
class Shape:
    """A job that somebody thinks of."""

    nodes: int = 1
    gpus_per_node: int = 0
    time: str | None = None


@dataclass(frozen=True)
class Possible:
    """When such a job would start in a partition, or why it would not."""

    partition: str
    start: Start | None
    refused: str | None = None


@dataclass(frozen=True)
class SiteView:
    partitions: list[PartitionView]
    running: int  # jobs of this user
    queued: int
    possible: list[Possible]
    notes: list[str]

    def document(self) -> dict[str, Any]:
        return {
            "partitions": [asdict(view) for view in self.partitions],
            "jobs": {"running": self.running, "queued": self.queued},
            "earliest": [
                {
                    "partition": one.partition,
                    "starts_at": one.start.at.isoformat(timespec="seconds") if one.start else None,
                    "nodes": one.start.nodes if one.start else None,
                    "refused": one.refused,
                }
                for one in self.possible
            ],
            "notes": self.notes,
        }


def site_view(site: Site, queue: Queue, cluster: Cluster | None = None, shape: Shape | None = None) -> SiteView:
    """The site now. With a cluster file, only its partition, and whether the file is right about it."""
    shown = chosen_partitions(site, cluster.scheduler) if cluster is not None else list(site.partitions)
    views = [_partition_view(site, partition) for partition in shown]
    possible = [_possible(partition, shape) for partition in shown if partition.is_up] if shape else []
    mine = [job for job in queue.jobs.values() if not job.is_over]
    notes = [note for view in views for note in _notes(view)]
    notes += _differences(cluster, views[0]) if cluster is not None else []
    notes += [f"the jobs of this user are not known: {queue.problem}"] if queue.problem else []
    return SiteView(
        views, sum(not job.waits for job in mine), sum(job.waits for job in mine), _soonest_first(possible), notes
    )


def _partition_view(site: Site, partition: Partition) -> PartitionView:
    nodes = site.nodes_of([partition])
    free = [node for node in nodes if node.in_service and node.cpus_free == node.cpus and node.gpus_free == node.gpus]
    working = [node for node in nodes if node.in_service]
    return PartitionView(
        partition.name,
        partition.is_default,
        partition.state,
        len(nodes),
        len(free),
        len(nodes) - len(working),
        sum(node.gpus for node in nodes),
        sum(node.gpus_free for node in nodes),
        sorted({node.gpu_type for node in nodes if node.gpu_type}),
        max((node.gpus for node in nodes), default=0),
        sum(node.cpus for node in nodes),
        sum(node.cpus_free for node in nodes),
        max((node.cpus for node in nodes), default=0),
        partition.max_nodes,
        slurm_time(partition.max_seconds) if partition.max_seconds else None,
        slurm_time(partition.default_seconds) if partition.default_seconds else None,
        partition.preempted,
    )


def _possible(partition: Partition, shape: Shape) -> Possible:
    if shape.nodes > partition.most_nodes:
        return Possible(partition.name, None, f"a job there has {partition.most_nodes} nodes at most")
    options = [f"--partition={partition.name}", f"--nodes={shape.nodes}", "--ntasks-per-node=1"]
    options += [f"--gres=gpu:{shape.gpus_per_node}"] if shape.gpus_per_node else []
    options += [f"--time={shape.time}"] if shape.time else []
    script = "\n".join(["#!/bin/bash", *(f"#SBATCH {header_word(option)}" for option in options), "true", ""])
    try:
        return Possible(partition.name, earliest_start(script))
    except SlurmError as error:
        return Possible(partition.name, None, error.message)


def _soonest_first(possible: list[Possible]) -> list[Possible]:
    never = datetime.max.replace(tzinfo=None)
    return sorted(possible, key=lambda one: one.start.at.replace(tzinfo=None) if one.start else never)


def _notes(view: PartitionView) -> list[str]:
    notes = []
    if view.state != "UP":
        notes.append(f"partition {view.name} takes no jobs: it is {view.state.lower()}")
    if view.nodes_out_of_service:
        notes.append(f"{view.nodes_out_of_service} of the {view.nodes} nodes of {view.name} are out of service")
    if view.may_be_preempted:
        notes.append(f"jobs in {view.name} may have to make room for others; gradus saves and goes on afterwards")
    return notes


def _differences(cluster: Cluster, view: PartitionView) -> list[str]:
    """Where the cluster file and Slurm disagree."""
    found = []
    if cluster.nodes > view.nodes:
        found.append(f"the cluster file says {cluster.nodes} nodes, partition {view.name} has {view.nodes}")
    if view.gpus and cluster.gpus_per_node != view.gpus_per_node:
        says = f"the cluster file says {cluster.gpus_per_node} GPUs on a node"
        found.append(f"{says}, Slurm counts {view.gpus_per_node}")
    if cluster.cpu_cores > view.cpus_per_node > 0:
        found.append(f"the cluster file says {cluster.cpu_cores} cores on a node, Slurm counts {view.cpus_per_node}")
    limit = cluster.scheduler.time
    if limit and view.max_time and job_seconds(limit) > job_seconds(view.max_time):
        found.append(f"the cluster file says time {limit}, partition {view.name} allows {view.max_time}")
    return found
