"""Clusters in the terms of the catalogues: what is at hand, what gradus brings along, what their names stand for."""

from __future__ import annotations

import dataclasses
import os
import sys
from importlib import resources
from pathlib import Path

from gradus.hardware.catalogue import Gpu, all_gpus, find_gpu
from gradus.hardware.detect import Machine, detect_machine
from gradus.hardware.links import all_links, find_link
from gradus.hardware.slurm import detect_slurm
from gradus.schema.cluster import Cluster
from gradus.schema.errors import unknown_name

_GPU_BY_NUMBERS = "or by numbers, gpu: {name: NAME, memory_gib: 80}; without GPUs, leave it out"
_LINK_BY_NUMBERS = "or by numbers, {name: NAME, gb_per_second: 25}"


def detect_here() -> Cluster:
    """The nodes of the Slurm that answers here; in a job, or where none does, this machine."""
    machine = detect_machine()
    if "SLURM_JOB_ID" in os.environ:
        return detect_cluster(machine)
    site = detect_slurm(machine)
    for note in site.notes:
        print(f"note: {note}", file=sys.stderr)
    return site.cluster or detect_cluster(machine)


def detect_cluster(machine: Machine | None = None) -> Cluster:
    """This machine as a cluster of one node. With GPUs of several kinds, the smallest counts."""
    machine = machine or detect_machine()
    smallest = min(machine.gpus, key=lambda gpu: gpu.memory_bytes, default=None)
    return Cluster(
        name=machine.hostname,
        gpus_per_node=len(machine.gpus),
        gpu=smallest.numbers if smallest else None,
        cpu_cores=machine.cpu_cores,
        memory_gib=round(machine.memory_bytes / 2**30, 2),
    )


def shipped_clusters() -> dict[str, Path]:
    """The cluster files that gradus brings along, by name."""
    folder = Path(str(resources.files("gradus.hardware").joinpath("clusters")))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def check_names(cluster: Cluster, file: str) -> None:
    """Raise InputError for a GPU or a link that is given by a name which no catalogue knows."""
    if isinstance(cluster.gpu, str) and find_gpu(cluster.gpu) is None:
        names = [gpu.name for gpu in all_gpus()]
        raise unknown_name("GPU", cluster.gpu, names, field="gpu", file=file, hint=_GPU_BY_NUMBERS)
    for place, link in (("intra", cluster.links.intra), ("inter", cluster.links.inter)):
        if isinstance(link, str) and find_link(link) is None:
            names = [known.name for known in all_links()]
            raise unknown_name("link", link, names, field=f"links.{place}", file=file, hint=_LINK_BY_NUMBERS)


def gpu_of(cluster: Cluster) -> Gpu | None:
    """The GPU of a cluster: as the catalogue has it, with the numbers that the cluster gives itself in their place.

    None without GPUs, and for a bare name that is not in the catalogue. What nobody knows about a GPU that is given
    by numbers is absent: no peak, no bandwidth (0), no power.
    """
    if cluster.gpus_per_node == 0 or cluster.gpu is None:
        return None
    if isinstance(cluster.gpu, str):
        return find_gpu(cluster.gpu)
    given = cluster.gpu
    known = find_gpu(given.name) or Gpu(given.name, (), None, 0.0, 0.0, {}, None, {})
    peaks: dict[str, float] = dict(known.peak_tflops)
    peaks.update((precision, tflops) for precision, tflops in given.peak_tflops.items())
    capability = given.compute_capability
    stated = {
        "memory": given.memory_gib,
        "peak_tflops": given.peak_tflops,
        "power": given.power_watts,
        "chip": given.multiprocessors,
    }
    return dataclasses.replace(
        known,
        compute_capability=(capability[0], capability[1]) if capability else known.compute_capability,
        memory_gb=given.memory_gib * 2**30 / 1e9,
        memory_bandwidth_gb_per_second=given.memory_bandwidth_gb_per_second or known.memory_bandwidth_gb_per_second,
        peak_tflops=peaks,
        power_watts=given.power_watts or known.power_watts,
        multiprocessors=given.multiprocessors or known.multiprocessors,
        sources={**known.sources, **{group: "the cluster file" for group, number in stated.items() if number}},
    )
