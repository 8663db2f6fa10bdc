"""What Slurm says about its nodes, as a Cluster. Asked through its own commands; never a reason to fail."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gradus.hardware.catalogue import find_gpu, gpus_named_like
from gradus.hardware.detect import Machine
from gradus.hardware.slurm_command import NOT_CONFIGURED, ask
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.scheduler import Scheduler, job_seconds

_PATIENCE_SECONDS = 5.0
_TEXT_FORMAT = "%R|%a|%D|%c|%m|%G|%l|%T"
# Nodes in these states run no job until somebody mends them; powered-down ones are started for a job.
_OUT_OF_SERVICE = re.compile(r"down|drain|fail|error|future|inval|unknown|maint", re.IGNORECASE)
_STARTED_ON_DEMAND = re.compile(r"power(ed|ing)_down", re.IGNORECASE)


@dataclass(frozen=True)
class NodeGroup:
    """Nodes of a partition that are alike."""

    partition: str
    nodes: int
    cpus: int
    memory_mib: int
    gpus: int  # of each node
    gpu_type: str | None  # as the site calls it
    time_limit: str | None  # None: no limit
    in_service: bool


@dataclass(frozen=True)
class SlurmSite:
    """The nodes that suit training best, as a cluster; None where Slurm is not there or does not answer."""

    cluster: Cluster | None
    notes: tuple[str, ...] = ()


def detect_slurm(machine: Machine | None = None, partition: str | None = None) -> SlurmSite:
    """Ask Slurm: its JSON where the site has it, else the plain format. `machine` is where this runs, for its GPUs."""
    if shutil.which("sinfo") is None:
        return SlurmSite(None)
    groups, problem = _ask()
    if problem is not None and NOT_CONFIGURED in problem:
        return SlurmSite(None)  # its commands are here, a cluster of it is not
    if problem is not None:
        return SlurmSite(None, (f"Slurm is here but does not answer, so only this machine counts: {problem}",))
    return site_of(groups, name=_cluster_name(), machine=machine, partition=partition)


def site_of(groups: Iterable[NodeGroup], name: str, machine: Machine | None, partition: str | None = None) -> SlurmSite:
    """The largest set of equal nodes in one partition: most GPUs, or most cores where there are none."""
    wanted = [group for group in groups if partition in (None, group.partition)]
    counted: Counter[NodeGroup] = Counter()
    for group in wanted:
        if group.in_service:
            counted[replace(group, nodes=1)] += group.nodes
    if not counted:
        where = f"partition {partition}" if partition else "Slurm"
        return SlurmSite(None, (f"{where} has no nodes in service, so only this machine counts",))
    # Partitions often share nodes: then the one in which a job may take longest.
    best = max(
        counted, key=lambda g: (g.gpus * counted[g], g.cpus * counted[g], job_seconds(g.time_limit or "unlimited"))
    )
    idle = sum(g.nodes for g in wanted if not g.in_service and g.partition == best.partition)
    gpu, notes = _gpu(best, machine)
    if idle:
        notes.append(f"{idle} nodes of partition {best.partition} are out of service and not counted")
    cluster = Cluster(
        name=name,
        nodes=counted[best],
        gpus_per_node=best.gpus,
        gpu=gpu,
        cpu_cores=best.cpus,
        memory_gib=round(best.memory_mib / 1024, 2),
        scheduler=Scheduler(kind="slurm", partition=best.partition, time=best.time_limit),
    )
    return SlurmSite(cluster, tuple(notes))


def groups_in_json(document: Mapping[str, Any]) -> list[NodeGroup]:
    """The groups in what `sinfo --json` prints: one entry for each node in 22.05, for each group of nodes since."""
    entries = document.get("sinfo")
    if entries is None:
        return [group for node in document["nodes"] for group in _groups_of_node(node)]
    return [
        _group(
            partition=entry["partition"]["name"],
            nodes=entry["nodes"]["total"],
            cpus=entry["cpus"]["maximum"],
            memory_mib=entry["memory"]["maximum"],
            gres=entry["gres"]["total"],
            time_limit=_limit_in_minutes(entry["partition"].get("maximums", {}).get("time")),
            states=_states(entry["node"]["state"]),
        )
        for entry in entries
        if entry["nodes"]["total"] and _states(entry["partition"].get("partition", {}).get("state", "UP")) == ["UP"]
    ]


def groups_in_text(text: str) -> list[NodeGroup]:
    """The groups in what `sinfo --exact --noheader` prints in this module's format, the same in any version."""
    groups = []
    for line in filter(None, map(str.strip, text.splitlines())):
        partition, available, nodes, cpus, memory, gres, limit, state = line.split("|")
        if available != "up":
            continue
        # A "+" marks the smallest of several, where a site's sinfo merges groups nevertheless.
        groups.append(
            _group(
                partition=partition,
                nodes=int(nodes),
                cpus=int(cpus.rstrip("+")),
                memory_mib=int(memory.rstrip("+")),
                gres=gres,
                time_limit=_limit(limit),
                states=[state],
            )
        )
    return [group for group in groups if group.nodes]


def gpus_in_gres(gres: str) -> tuple[int, str | None]:
    """How many GPUs a node has, and of which type: of several types, the one that it has most of.

    >>> gpus_in_gres("gpu:a100:4(S:0-1),tmpsize:7T")
    (4, 'a100')
    """
    found: Counter[str | None] = Counter()
    for item in re.split(r",(?![^(]*\))", gres):
        match = re.fullmatch(r"gpu(?::(?P<type>[^:()]+?))??(?::(?P<count>\d+))?(?:\(.*\))?", item.strip())
        if match:
            found[match["type"]] += int(match["count"] or 1)
    if not found:
        return 0, None
    kind, count = found.most_common(1)[0]
    return count, kind


def is_in_service(states: Iterable[str]) -> bool:
    """Whether a node in these states takes jobs, now or when those that it has are over."""
    return not any(_OUT_OF_SERVICE.search(_STARTED_ON_DEMAND.sub("", state)) for state in states)


def _ask() -> tuple[list[NodeGroup], str | None]:
    """The groups, or why there are none."""
    problem = "it names no nodes"
    for command, read in (
        (["sinfo", "--json"], lambda text: groups_in_json(json.loads(text))),
        (["sinfo", "--exact", "--noheader", f"--format={_TEXT_FORMAT}"], groups_in_text),
    ):
        output, failure = _output(command)
        if output is None:
            problem = failure or problem
            continue
        try:
            groups = read(output)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"its answer to `{' '.join(command)}` is not understood ({type(error).__name__}: {error})"
            continue
        # Without its controller, sinfo prints a document all the same: without nodes.
        if groups:
            return groups if any(group.time_limit for group in groups) else _with_limits(groups), None
    return [], problem


def _with_limits(groups: list[NodeGroup]) -> list[NodeGroup]:
    """22.05 says in JSON which partitions a node is in, but not which of them are open, and for how long."""
    output, _ = _output(["sinfo", "--noheader", "--format=%R|%a|%l"])
    limits = {}
    for line in (output or "").splitlines():
        partition, available, limit = line.strip().split("|")
        if available == "up":
            limits[partition] = _limit(limit)
    return [replace(group, time_limit=limits[group.partition]) for group in groups if group.partition in limits]


def _output(command: list[str]) -> tuple[str | None, str | None]:
    answer = ask(command, seconds=_PATIENCE_SECONDS)
    return (answer.out, None) if answer.failure is None else (None, answer.failure)


def _cluster_name() -> str:
    output, _ = _output(["scontrol", "show", "config"])
    match = re.search(r"^ClusterName\s*=\s*(\S+)", output or "", re.MULTILINE)
    return match[1] if match else "slurm"


def _gpu(group: NodeGroup, machine: Machine | None) -> tuple[str | GpuNumbers | None, list[str]]:
    """What the catalogue calls the GPUs of a group. A type may leave open which: then the smallest, with a note."""
    if group.gpus == 0:
        return None, []
    here = {gpu.name: gpu for gpu in machine.gpus} if machine else {}
    if group.gpu_type is None:
        if len(here) == 1:
            [gpu] = here.values()
            return gpu.numbers, [f"the GPUs of partition {group.partition} are taken to be as here: {gpu.name}"]
        return None, [f"Slurm does not say which GPUs partition {group.partition} has; name them in a cluster file"]
    exact = find_gpu(group.gpu_type)
    if exact is not None:
        return exact.name, []
    alike = gpus_named_like(group.gpu_type)
    as_here = [gpu for gpu in here.values() if find_gpu(gpu.name) in alike]
    if len(as_here) == 1:
        return as_here[0].numbers, []
    if not alike:
        return group.gpu_type, [f"the catalogue does not know the GPU that Slurm calls {group.gpu_type}"]
    smallest = min(alike, key=lambda g: (g.memory_gb, g.memory_bandwidth_gb_per_second, g.power_watts or 0))
    others = [gpu.name for gpu in alike if gpu is not smallest]
    if not others:
        return smallest.name, []
    return smallest.name, [
        f"Slurm calls the GPUs {group.gpu_type}; {smallest.name} is assumed, it could be {' or '.join(others)}"
    ]


def _groups_of_node(node: Mapping[str, Any]) -> Iterator[NodeGroup]:
    """A node is in the group of each of its partitions."""
    for partition in node["partitions"]:
        yield _group(
            partition=partition,
            nodes=1,
            cpus=node["cpus"],
            memory_mib=node["real_memory"],
            gres=node["gres"],
            time_limit=None,
            states=[*_states(node["state"]), *node.get("state_flags", [])],
        )


def _group(
    partition: str, nodes: int, cpus: int, memory_mib: int, gres: str, time_limit: str | None, states: Iterable[str]
) -> NodeGroup:
    count, kind = gpus_in_gres(gres)
    return NodeGroup(partition, nodes, cpus, memory_mib, count, kind, time_limit, is_in_service(states))


def _states(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _limit(text: str) -> str | None:
    return None if text.lower() in ("infinite", "unlimited", "n/a") else text


def _limit_in_minutes(given: Any) -> str | None:
    """Minutes in Slurm's JSON (a number, or one that may be unset or infinite) as days-hours:minutes:seconds."""
    if isinstance(given, dict):
        given = given["number"] if given.get("set") and not given.get("infinite") else None
    if not given:
        return None
    days, minutes = divmod(int(given), 24 * 60)
    return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:00"
