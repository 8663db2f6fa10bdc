"""Host copy: for how long training stops when a checkpoint is saved: while each rank's share goes to host memory.

Everything after that, writing it and making sure that it is on disk, is done beside training (checkpoint/writer.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from gradus.planner.speed.device import Device
from gradus.planner.speed.step_time import HOST_MEMORY_BYTES_PER_SECOND
from gradus.schema.plan import Plan


@dataclass(frozen=True)
class HostCopy:
    """How fast one rank copies its state."""

    bytes_per_second: float
    source: str

    def seconds(self, saved_bytes: float) -> float:
        return saved_bytes / self.bytes_per_second


def host_copy(plan: Plan, device: Device | None) -> HostCopy:
    """From the device over its link, which ranks that share a GPU share too; what is in host memory, inside of it."""
    if device is None or plan.offload == "cpu":  # read and written
        return HostCopy(HOST_MEMORY_BYTES_PER_SECOND / 2, "inside host memory, assumed")
    return HostCopy(device.speeds.host_copy_bytes_per_second / plan.ranks_per_gpu, device.host_link)
