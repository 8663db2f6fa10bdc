"""A Slurm site as a job finds it: its partitions with their limits, and its nodes with what is free on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from gradus.hardware.slurm import gpus_in_gres, is_in_service
from gradus.hardware.slurm_command import records
from gradus.schema.scheduler import job_seconds


@dataclass(frozen=True)
class Partition:
    """A part of the site with rules of its own. None: no limit."""

    name: str
    is_default: bool
    state: str  # UP, DOWN, DRAIN or INACTIVE
    nodes: int
    max_nodes: int | None
    min_nodes: int
    max_seconds: float | None
    default_seconds: float | None
    preempted: bool  # whether jobs of other partitions may take its nodes

    @property
    def is_up(self) -> bool:
        return self.state == "UP"

    @property
    def most_nodes(self) -> int:
        """Of a job."""
        return self.nodes if self.max_nodes is None else min(self.nodes, self.max_nodes)


@dataclass(frozen=True)
class Node:
    """A node, with what is free on it now."""

    name: str
    host: str
    state: str
    in_service: bool
    partitions: tuple[str, ...]
    cpus: int
    cpus_free: int
    memory_mib: int
    gpus: int
    gpus_free: int
    gpu_type: str | None
    features: tuple[str, ...] = ()
    reason: str | None = None  # why it is out of service


def partitions_in_text(text: str) -> list[Partition]:
    """The partitions in what `scontrol show partition` prints."""
    return [_partition(record) for record in records(text) if "PartitionName" in record]


def nodes_in_text(text: str) -> list[Node]:
    """The nodes in what `scontrol --details show node` prints."""
    return [_node(record) for record in records(text) if "NodeName" in record]


def start_in_text(text: str) -> tuple[datetime, str] | None:
    """When `sbatch --test-only` says that a job would start, and on which nodes."""
    found = re.search(r"to start at (\S+) .*?on nodes? (\S+)", text)
    if found is None:
        return None
    try:
        return datetime.fromisoformat(found[1]).astimezone(), found[2]
    except ValueError:
        return None


def _partition(record: Mapping[str, str]) -> Partition:
    return Partition(
        record["PartitionName"],
        record.get("Default") == "YES",
        record.get("State", "UP"),
        int(record.get("TotalNodes", "0")),
        _number(record.get("MaxNodes")),
        _number(record.get("MinNodes")) or 0,
        _seconds(record.get("MaxTime")),
        _seconds(record.get("DefaultTime")),
        record.get("PreemptMode", "OFF") not in ("OFF", "GANG"),
    )


def _node(record: Mapping[str, str]) -> Node:
    gpus, kind = gpus_in_gres(record.get("Gres", "").replace("(null)", ""))
    used, _ = gpus_in_gres(record.get("GresUsed", "").replace("(null)", ""))
    cpus = int(record.get("CPUEfctv") or record.get("CPUTot", "0"))
    state = record.get("State", "UNKNOWN")
    works = is_in_service(state.split("+"))
    reason = record.get("Reason")
    return Node(
        record["NodeName"],
        record.get("NodeHostName", record["NodeName"]),
        state,
        works,
        tuple(filter(None, record.get("Partitions", "").strip().split(","))),
        cpus,
        max(0, cpus - int(record.get("CPUAlloc", "0"))) if works else 0,
        int(record.get("RealMemory", "0")),
        gpus,
        max(0, gpus - used) if works else 0,
        kind,
        tuple(filter(None, record.get("ActiveFeatures", "").replace("(null)", "").split(","))),
        None if works or reason is None else re.sub(r"\s*\[[^]]*\]$", "", reason),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def _seconds(text: str | None) -> float | None:
    if text is None or text.upper() in ("UNLIMITED", "INFINITE", "NONE", "N/A"):
        return None
    return job_seconds(text)
