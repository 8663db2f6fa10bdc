"""Facts: what a node can say of itself, without torch: address, versions, memory, space, GPUs, network ports."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradus.hardware.detect import detect_machine
from gradus.hardware.gpu_health import read_gpu_health
from gradus.hardware.host import available_memory
from gradus.launcher.own_address import machine_identity, own_address
from gradus.record.node import node_name


@dataclass(frozen=True)
class Space:
    """A file system, as a folder in it shows it."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    node: str
    host: str
    identity: str  # equal on tasks that share one machine and one network
    address: str | None  # at which other nodes would look for it
    address_of: str  # what that address was asked of: an interface, or the host name
    address_problem: str | None
    versions: Mapping[str, str]  # what must be the same everywhere
    cores: int
    memory_bytes: int
    memory_available_bytes: int
    space: Mapping[str, Space | str]  # shared, local, shm; a text says why there is none
    driver: str | None  # of NVIDIA
    gpus: int  # that this task may use
    gpu_names: tuple[str, ...]
    gpu_problems: tuple[str, ...]  # of the driver, and of each GPU
    gpu_ecc: tuple[bool | None, ...] = ()
    gpu_celsius: tuple[int | None, ...] = ()
    fabric: tuple[str, ...] = field(default=())  # active InfiniBand and RoCE ports

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> NodeFacts:
        known: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in document.items()
        }
        known["space"] = {
            name: Space(**found) if isinstance(found, dict) else found for name, found in document["space"].items()
        }
        return cls(**known)


def node_facts(shared: Path, local: str | None = None, interface: str | None = None) -> NodeFacts:
    machine = detect_machine()
    health = read_gpu_health() or ()
    asked = {gpu.uuid for gpu in machine.gpus}
    ours = [gpu for gpu in health if gpu.uuid in asked or not asked]
    address, of, problem = own_address(interface)
    return NodeFacts(
        node=node_name(),
        host=socket.gethostname(),
        identity=machine_identity(),
        address=address,
        address_of=of,
        address_problem=problem,
        versions=_versions(machine.driver_version),
        cores=machine.cpu_cores,
        memory_bytes=machine.memory_bytes,
        memory_available_bytes=available_memory() or 0,
        space={
            "shared": _space(shared),
            "local": _space(Path(local or _local_folder())),
            "shm": _space(Path("/dev/shm")),
        },
        driver=machine.driver_version,
        gpus=len(machine.gpus),
        gpu_names=tuple(gpu.name for gpu in machine.gpus),
        gpu_problems=(
            *machine.problems,
            *(f"GPU {gpu.index} ({gpu.name}): {problem}" for gpu in ours for problem in gpu.problems),
        ),
        gpu_ecc=tuple(gpu.ecc for gpu in ours),
        gpu_celsius=tuple(gpu.temperature_celsius for gpu in ours),
        fabric=active_ports(),
    )


def active_ports(folder: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """`mlx5_0:1/InfiniBand 200 Gb/sec (4X HDR)`: ports of RDMA devices that are up."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            if "ACTIVE" in (port / "state").read_text():
                layer, rate = ((port / name).read_text().strip() for name in ("link_layer", "rate"))
                found.append(f"{port.parent.parent.name}:{port.name}/{layer} {rate}")
    return tuple(found)


def _versions(driver: str | None) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("gradus", "torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found | ({"NVIDIA driver": driver} if driver else {})


def _space(path: Path) -> Space | str:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return Space(str(path), usage.free, usage.total)


def _local_folder() -> str:
    return os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
