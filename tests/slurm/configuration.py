"""How a lab is configured: slurm.conf as sites have it, with shorter times."""

from __future__ import annotations

import os
import random
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from gradus.launcher.torchrun import free_port


@dataclass(frozen=True)
class Partition:
    """A partition over all nodes; `options` are those of slurm.conf."""

    name: str
    options: str = ""


def default_partitions(grace_seconds: int = 30) -> tuple[Partition, ...]:
    """`high` takes nodes from `low`, which is asked to end before; nobody takes any from `main`."""
    return (
        Partition("main", "Default=YES PriorityTier=1 PreemptMode=OFF"),
        Partition("low", f"PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace_seconds}"),
        Partition("high", "PriorityTier=10 PreemptMode=OFF"),
    )


@dataclass(frozen=True)
class Site:
    folder: Path
    nodes: tuple[str, ...]
    cpus: int
    gpus: int
    proctrack: str
    requeue: bool
    partitions: tuple[Partition, ...]
    accounting: str | None
    settings: dict[str, str]  # further lines of slurm.conf, or others in place of the lab's own

    @property
    def memory_mib(self) -> int:
        """Of each node: they share the machine's."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 // len(self.nodes)


def slurm_conf(site: Site, ports: list[int]) -> str:
    """The file, for these ports of the controller and of each node."""
    host = socket.gethostname().partition(".")[0]
    run, log = site.folder / "run", site.folder / "log"
    values = {
        "ClusterName": "lab",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": str(ports[0]),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={run}/munge.socket,cred_expire=5",  # a requeue waits for the credential's end: 120 s
        "CredType": "cred/munge",
        "StateSaveLocation": f"{site.folder}/state",
        "SlurmdSpoolDir": f"{site.folder}/spool/%n",
        "TmpFS": f"{site.folder}/tmp/%n",  # pmix makes a folder there with the name of the step, on each node
        "SlurmctldPidFile": f"{run}/slurmctld.pid",
        "SlurmdPidFile": f"{run}/%n.pid",
        "SlurmctldLogFile": f"{log}/slurmctld.log",
        "SlurmdLogFile": f"{log}/%n.log",
        "SlurmctldDebug": "verbose",
        "SlurmdDebug": "verbose",
        "ProctrackType": f"proctrack/{site.proctrack}",
        "TaskPlugin": "task/affinity" if site.cpus <= (os.cpu_count() or 1) else "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "5",
        "MpiDefault": "none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_Core_Memory",
        "DefMemPerCPU": str(site.memory_mib // site.cpus),
        "GresTypes": "gpu",
        "SlurmdParameters": "config_overrides",  # the nodes may have more than this machine
        "SchedulerType": "sched/backfill",
        "SchedulerParameters": "sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1",
        "PreemptType": "preempt/partition_prio",
        "PreemptMode": "REQUEUE",
        "JobRequeue": str(int(site.requeue)),
        "EnforcePartLimits": "ALL",
        "ReturnToService": "2",
        "SlurmdTimeout": "10",
        "SlurmctldTimeout": "10",
        "InactiveLimit": "0",
        # Ports of a job follow from its number, and labs that are up at once share this machine's.
        "FirstJobId": str(random.randrange(1, 30_000)),
        "MinJobAge": "300",
        "MailProg": shutil.which("true") or "/bin/true",
    }
    if site.accounting == "filetxt":
        values |= {"JobCompType": "jobcomp/filetxt", "JobCompLoc": f"{site.folder}/jobcomp.txt"}
    values |= site.settings
    lines = [f"{name}={value}" for name, value in values.items()]
    gres = f"Gres=gpu:{site.gpus}" if site.gpus else ""
    for number, (node, port) in enumerate(zip(site.nodes, ports[1:], strict=True)):
        feature = f"Feature=node{number + 1},{'left' if number < len(site.nodes) / 2 else 'right'}"
        lines.append(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={site.cpus}"
            f" RealMemory={site.memory_mib} {gres} {feature}"
        )
    for partition in site.partitions:
        limits = "MaxTime=1-00:00:00 DefaultTime=01:00:00"
        lines.append(f"PartitionName={partition.name} Nodes=ALL State=UP {limits} {partition.options}")
    return "\n".join(lines) + "\n"


def gres_conf(site: Site) -> str:
    if not site.gpus:
        return "AutoDetect=off\n"
    devices = f"{site.folder}/dev/nvidia[0-{site.gpus - 1}]"
    return f"AutoDetect=off\nNodeName={','.join(site.nodes)} Name=gpu File={devices}\n"


def cluster_yaml(site: Site) -> str:
    gpu = "gpu: {name: fake, memory_gib: 16}" if site.gpus else ""
    return f"""\
# A Slurm lab: {len(site.nodes)} nodes that share one machine, with GPUs that are there in name only.
name: lab
nodes: {len(site.nodes)}
gpus_per_node: {site.gpus}
{gpu}
cpu_cores: {site.cpus}
memory_gib: {site.memory_mib / 1024:.2f}
scheduler:
  kind: slurm
  partition: {site.partitions[0].name}
"""


def free_ports(count: int) -> list[int]:
    """Different ones that nobody listens at."""
    found: set[int] = set()
    while len(found) < count:
        found.add(free_port())
    return list(found)
