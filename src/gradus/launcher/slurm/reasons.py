"""Reasons: why Slurm lets a job wait, or ended it, in plain words, with what one can do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ASK = "ask the people who run the cluster"
_LESS = "ask for less, or wait; `sacctmgr show associations user=$USER` and `sacctmgr show qos` list the limits"

# Slurm's words (`man squeue`, JOB REASON CODES, and job_reason_string of its sources): meaning, advice.
_PLAIN: dict[str, tuple[str, str]] = {
    "None": ("Slurm has not looked at it yet", ""),
    "WaitingForScheduling": ("Slurm has not looked at it yet", ""),
    "SchedDefer": ("Slurm starts no job at once when it is submitted; it looks at it soon", ""),
    "Priority": (
        "jobs with a higher priority are before it",
        "a shorter --time or fewer nodes may start earlier, in a gap",
    ),
    "Resources": (
        "it is next, and waits until enough nodes are free",
        "a shorter --time or fewer nodes may start earlier",
    ),
    "Dependency": ("it waits for another job to end", "squeue -j JOB -o %E shows which"),
    "DependencyNeverSatisfied": (
        "it waits for a job that ended otherwise than it hoped, and so for ever",
        "gradus runs cancel RUN, and submit it again without --after",
    ),
    "BeginTime": (
        "its earliest start is not yet here: the one that was asked for, or a pause after a requeue",
        "gradus runs shows the start that Slurm expects",
    ),
    "JobHeldUser": ("it is held: somebody with your account said so", "gradus runs release RUN lets it go on"),
    "JobHeldAdmin": ("it is held by an administrator, or because it failed to start too often", _ASK),
    "JobHoldMaxRequeue": ("it was requeued so often that Slurm holds it", "see gradus runs why RUN; then release it"),
    "SpecialExit": ("it is held after an exit code that a script asked to be treated so", "gradus runs release RUN"),
    "JobArrayTaskLimit": ("as many jobs of its array run as may at once", "scheduler.array_limit says how many"),
    "Cleaning": ("it was requeued, and its last start is still being cleaned up", ""),
    "Prolog": ("the nodes are being prepared for it", ""),
    "PrologSlurmctld": ("the nodes are being prepared for it", ""),
    "Licenses": ("it waits for a licence", "`scontrol show licenses` shows how many are in use"),
    "Reservation": ("its reservation has not begun, or is full", "`scontrol show reservation` shows when it begins"),
    "ReservationDeleted": ("its reservation was deleted", "submit it again without scheduler.reservation"),
    "ReqNodeNotAvail": (
        "nodes that it must have are down, reserved, or kept free for maintenance",
        "leave out scheduler.nodelist, or ask for a --time that ends before the maintenance",
    ),
    "NodeDown": ("a node that it must have is down", "leave out scheduler.nodelist, or wait for the node"),
    "FrontEndDown": ("no front-end node is up", _ASK),
    "BadConstraints": (
        "no nodes are as it asks: features, GPUs, cores or memory",
        "gradus cluster show says what there is; see scheduler.constraint, gres, mem and cpus_per_task",
    ),
    "PartitionDown": ("its partition takes no jobs now", "choose another one: gradus cluster show"),
    "PartitionInactive": ("its partition is switched off", "choose another one: gradus cluster show"),
    "PartitionConfig": ("its partition does not allow such a job", "gradus cluster show has the limits"),
    "PartitionNodeLimit": (
        "its partition does not take jobs of so many nodes, or too many of its nodes are down",
        "set --nodes: gradus cluster show has the limits",
    ),
    "PartitionTimeLimit": (
        "its time limit is longer than the partition allows",
        "set --time: gradus cluster show has the limits",
    ),
    "AccountNotAllowed": ("its account may not use this partition", "set scheduler.account or another partition"),
    "InvalidAccount": ("its account is not known", "set scheduler.account"),
    "InvalidQOS": ("its QoS is not known", "set scheduler.qos"),
    "QOSNotAllowed": ("its QoS may not be used in this partition or account", "set scheduler.qos"),
    "QOSUsageThreshold": ("your use of the cluster is above what its QoS allows for now", "wait, or set scheduler.qos"),
    "AccountingPolicy": ("a rule of the site forbids it", _ASK),
    "AssociationJobLimit": ("your account runs as many jobs as it may", _LESS),
    "AssociationResourceLimit": ("your account has as much of something as it may", _LESS),
    "AssociationTimeLimit": ("your account has used up the time that it may", _LESS),
    "QOSJobLimit": ("as many jobs of its QoS run as may", _LESS),
    "QOSResourceLimit": ("its QoS has as much of something as it may", _LESS),
    "QOSTimeLimit": ("its QoS has used up the time that it may", _LESS),
    "MaxMemPerLimit": ("it asks for more memory than the limit for each node or core", "see scheduler.mem"),
    "FedJobLock": ("another cluster of the federation is about to start it", ""),
    "BurstBufferResources": ("it waits for room in the burst buffer", ""),
    "BurstBufferStageIn": ("its files are being copied into the burst buffer", ""),
    "BurstBufferOperation": ("an operation of the burst buffer failed", _ASK),
    "PowerNotAvail": ("there is not enough power for it", ""),
    "PowerReserved": ("the power for it is reserved for others", ""),
    "BlockMaxError": ("a block of nodes has had too many errors", _ASK),
    "BlockFreeAction": ("a block of nodes is being freed", ""),
    "InactiveLimit": ("it did nothing for longer than the site allows, and was ended", _ASK),
    "JobLaunchFailure": ("its nodes could not start it", f"gradus runs release RUN tries again; else {_ASK}"),
    "SystemFailure": ("Slurm, the network or a file system failed", "submit it again with --resume RUN"),
    "NonZeroExitCode": ("it ended with an error", "gradus runs why RUN"),
    "RaisedSignal": ("it was ended by a signal", "gradus runs why RUN"),
    "OutOfMemory": ("it took more memory than it had asked for", "set scheduler.mem"),
    "TimeLimit": ("its time was over", "gradus submit --resume RUN goes on with it"),
    "DeadLine": ("its deadline was over before it could run", "submit it again without --deadline"),
}
_PARTS = {
    "Cpu": "cores",
    "CPU": "cores",
    "Mem": "memory",
    "Memory": "memory",
    "Node": "nodes",
    "GRES": "GPUs",
    "Jobs": "running jobs",
    "SubmitJobs": "submitted jobs",
    "SubmitJob": "submitted jobs",
    "Wall": "time",
    "WallDuration": "time",
    "License": "licences",
    "BB": "burst buffer",
    "Energy": "energy",
    "Billing": "billing units",
    "Unknown": "some resource",
}
_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS|)(?P<kind>Grp|Max|Min)(?P<part>[A-Za-z]+?)(?P<run>Run)?(?P<minutes>Minutes)?"
    r"(?:Per(?P<per>Job|Node|User|Account))?(?:Limit|NotSatisfied)?"
)
_WHOSE = {"Assoc": "your account", "QOS": "its QoS", "": "your account"}


# `man squeue`, JOB STATE CODES.
_ENDED = {
    "BOOT_FAIL": "its nodes could not be started",
    "CANCELLED": "somebody took it out of the queue",
    "COMPLETED": "its script came to its end",
    "DEADLINE": "its deadline was over",
    "FAILED": "its script ended with an error",
    "NODE_FAIL": "one of its nodes failed",
    "OUT_OF_MEMORY": "it took more memory than it had asked for",
    "PREEMPTED": "jobs with a higher priority took its nodes",
    "REVOKED": "another cluster of the federation started it",
    "TIMEOUT": "its time was over",
}


def ended_words(state: str) -> str | None:
    """How a job ended, in plain words."""
    return _ENDED.get(state.split(" ")[0])


@dataclass(frozen=True)
class Reason:
    """Why a job waits: Slurm's own word, what it means, and what to do (nothing, mostly)."""

    slurm: str
    words: str
    advice: str = ""

    @property
    def text(self) -> str:
        return self.words if self.slurm == "None" else f"{self.words} ({self.slurm})"


def explained_reason(said: str) -> Reason:
    """A reason in plain words. Slurm adds to some of them, such as the nodes that are not there.

    >>> explained_reason("QOSMaxGRESPerUser").words
    'its QoS does not allow so many GPUs for each user'
    """
    said = said.strip("() ") or "None"
    word, _, more = said.partition(",")
    more = more.strip()
    word = word.split(":")[0].strip()
    if word in _PLAIN:
        words, advice = _PLAIN[word]
    elif word.startswith("Nodes required for job are DOWN"):
        words, advice = _PLAIN["ReqNodeNotAvail"]
    elif (limit := _LIMIT.fullmatch(word)) is not None and limit["part"] in _PARTS:
        words, advice = _limit_words(limit), _LESS
    elif (written := word.replace("_", " ").lower()).startswith("launch failed"):
        words, advice = _PLAIN["JobLaunchFailure"]
    elif written == "job requeued in held state":
        words, advice = "it was stopped and is held", _PLAIN["JobHeldUser"][1]
    elif written == "job requeued in special exit state":
        words, advice = _PLAIN["SpecialExit"]
    else:
        return Reason(said, "Slurm does not say more than this")
    unavailable = re.search(r"UnavailableNodes:(\S+)", more)
    return Reason(said, f"{words}: {unavailable[1]}" if unavailable and unavailable[1] else words, advice)


def _limit_words(limit: re.Match[str]) -> str:
    what = _PARTS[limit["part"]]
    if limit["minutes"]:
        what = f"minutes of {what}"
    whose = _WHOSE[limit["whose"]]
    if limit["kind"] == "Min":
        return f"it asks for fewer {what} than {whose} wants of a job"
    if limit["kind"] == "Grp":
        running = ", counting what running ones may still take" if limit["run"] else ""
        return f"all jobs of {whose} together have all the {what} that they may{running}"
    each = {"Job": "for a job", "Node": "for a node", "User": "for each user", "Account": "for each account"}
    so = "so much" if what in ("memory", "time", "energy", "some resource", "burst buffer") else "so many"
    return f"{whose} does not allow {so} {what} {each.get(limit['per'] or '', 'at once')}"
