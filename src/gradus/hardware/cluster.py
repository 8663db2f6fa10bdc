"""The machine at hand as a Cluster of one node."""

from __future__ import annotations

from gradus.hardware.detect import Machine, detect_machine
from gradus.schema.cluster import Cluster, GpuNumbers


def detect_cluster(machine: Machine | None = None) -> Cluster:
    """What was detected here, in the terms of a cluster file. With GPUs of several kinds, the smallest counts."""
    machine = machine or detect_machine()
    gpu = None
    if machine.gpus:
        smallest = min(machine.gpus, key=lambda g: g.memory_bytes)
        gpu = GpuNumbers(
            name=smallest.name,
            memory_gib=round(smallest.memory_bytes / 2**30, 2),
            compute_capability=list(smallest.compute_capability),
        )
    return Cluster(
        name=machine.hostname,
        gpus_per_node=len(machine.gpus),
        gpu=gpu,
        cpu_cores=machine.cpu_cores,
        memory_gib=round(machine.memory_bytes / 2**30, 2),
    )
