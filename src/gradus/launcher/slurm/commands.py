"""Slurm's own commands, asked with patience, and what they say against a job in words that say what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from gradus.hardware.slurm_command import Answer, ask
from gradus.hardware.slurm_command import records as records
from gradus.schema.errors import EXIT_BAD_INPUT, EXIT_FAILED, GradusError

# A controller that is restarted, or swamped with questions, answers again soon; it is asked so often meanwhile.
_AGAIN_AFTER_SECONDS = 2.0
_PASSING = re.compile(
    r"unable to contact slurm controller|socket timed out|connection refused|connection reset|connect failure"
    r"|temporarily unavailable|slurmctld.*(not responding|in standby)|zero bytes were transmitted|took more than",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"Invalid job id|Job \S+ not found")  # the latter of a task of an array

# What Slurm says, what it means, and what to do. The first that matches counts.
_WORDS: tuple[tuple[str, str, str], ...] = (
    (
        r"Could not establish a configuration source",
        "Slurm's commands are installed here, but belong to no cluster",
        "submit from a login node of the cluster",
    ),
    (
        r"Unable to contact slurm controller|Connection refused|connect failure|Socket timed out|took more than",
        "Slurm's controller does not answer",
        "try again in a minute; `scontrol ping` shows whether it is back",
    ),
    (
        r"invalid partition|Invalid partition name",
        "there is no such partition",
        "gradus cluster show lists them; set scheduler.partition or --partition",
    ),
    (
        r"Invalid account",
        "the account is unknown, or may not use this partition",
        "set scheduler.account or --account; `sacctmgr show associations user=$USER` lists yours",
    ),
    (
        r"Invalid qos",
        "the quality of service is unknown, or not for this account or partition",
        "set scheduler.qos or --qos; `sacctmgr show qos` lists them",
    ),
    (
        r"time limit is invalid|time limit.*exceed|PartitionTimeLimit",
        "the time limit is missing, or longer than the partition allows",
        "set --time; gradus cluster show has the limits",
    ),
    (
        r"User's group not permitted|account.*not permitted|Access/permission denied",
        "you are not allowed to do this",
        "ask the people who run the cluster for access, or choose another partition, account or QoS",
    ),
    (
        r"Node count specification invalid|More nodes requested than permitted|too many nodes",
        "the partition does not take jobs of so many nodes",
        "set --nodes; gradus cluster show has the limits",
    ),
    (
        r"Invalid node name",
        "there is no such node",
        "see scheduler.nodelist and scheduler.exclude; `sinfo -N` lists the nodes",
    ),
    (
        r"Invalid feature",
        "no node has such a feature",
        "see scheduler.constraint; `sinfo -o '%N %f'` lists the features of the nodes",
    ),
    (
        r"generic resource|gres",
        "the nodes do not count GPUs under this name",
        "set scheduler.gres, such as gpu:a100:4, or none where whole nodes are given out",
    ),
    (
        r"(Requested|Access denied to requested) reservation|reservation.*invalid|Reservation",
        "there is no such reservation, or it is not yours",
        "see scheduler.reservation; `scontrol show reservation` lists them",
    ),
    (
        r"Memory (required|specification)|memory.*not available",
        "no node of the partition has so much memory",
        "see scheduler.mem and scheduler.mem_per_cpu",
    ),
    (
        r"CPU count|More processors requested|processors.*permitted",
        "the partition has not so many cores on a node, or not so many nodes",
        "see scheduler.cpus_per_task and --nodes; gradus cluster show has what there is",
    ),
    (
        r"Requested node configuration is not available",
        "no nodes of the partition are as asked for: GPUs, cores, memory or features",
        "gradus cluster show says what there is; compare gpus_per_node and cpu_cores in the cluster file",
    ),
    (
        r"partition.*(down|drain|inactive)|partition configuration not available",
        "the partition takes no jobs now",
        "choose another one; gradus cluster show lists them",
    ),
    (
        r"violates accounting|QOS.*Limit|job submit limit|AssocMax|AssocGrp",
        "a limit of your account or QoS forbids this job: too many jobs, too large, or too long",
        "wait for others of yours, ask for less, or see `sacctmgr show associations user=$USER`",
    ),
    (r"dependency", "the job or the run that it is to wait for is not known any more", "see --after"),
    (r"license", "the licences asked for are not there", "`scontrol show licenses` lists them"),
    (r"array", "Slurm does not take so large an array", "`scontrol show config | grep MaxArraySize`; sweep over less"),
    (
        r"unrecognized option|invalid option|ambiguous|Invalid .* specification|requires an argument",
        "sbatch does not know an option, or not this value",
        "see --sbatch and scheduler.options; `sbatch --help` lists what it knows",
    ),
    (r"presently disabled", "the people who run this cluster have switched that off", ""),
    (r"Invalid job id|Job \S+ not found", "Slurm knows no such job, or not any more", "squeue lists those it knows"),
)


class SlurmError(GradusError):
    """Slurm refused, or did not answer. `said` has its own words."""

    kind = "slurm"

    def __init__(self, message: str, *, hint: str | None = None, refused: bool = False, **details: Any) -> None:
        super().__init__(message, hint=hint, **details)
        self.exit_code = EXIT_BAD_INPUT if refused else EXIT_FAILED


# The codes, and what Slurm writes in their place: "job requeued in held state", "launch failed requeued held".
_HELD = re.compile(r"JobHeld|JobHold|(?:\b|_)held(?:\b|_)|special[ _]exit", re.IGNORECASE)


@dataclass(frozen=True)
class JobState:
    """A job as Slurm knows it now."""

    job_id: str
    state: str  # Slurm's long name: PENDING, RUNNING, COMPLETING, ...
    reason: str = "None"
    partition: str = ""
    nodes: str = ""  # their names, once it has some
    node_count: int = 0
    restarts: int = 0
    requeue: bool = False
    exit_code: str = "0:0"
    dependency: str = ""
    submitted_at: datetime | None = None
    starts_at: datetime | None = None  # of one that waits: as far as Slurm can tell
    ends_at: datetime | None = None
    time_limit: str = ""
    command: str = ""  # the script's path
    name: str = ""
    preempted_at: datetime | None = None  # only where it is asked about by its number

    @property
    def waits(self) -> bool:
        return self.state in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def has_nodes(self) -> bool:
        """Whether something more can be started on them. Of one that ends or goes back, processes may be left."""
        return not (self.state == "COMPLETING" or self.waits or self.is_over)

    @property
    def is_preempted(self) -> bool:
        """Whether it was, in its present start; of one that is back in the queue, in its last."""
        if self.preempted_at is None:
            return False
        return self.waits or self.starts_at is None or self.preempted_at >= self.starts_at

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody took it away, also while its processes still end: then Slurm calls it COMPLETING.

        It has a reason then if its time was over or a node failed, and no end yet where Slurm itself requeues it.
        """
        if self.state != "COMPLETING":
            return self.state.startswith("CANCELLED")
        ended = self.ends_at is not None and self.ends_at <= datetime.now(timezone.utc)
        return ended and self.reason == "None" and self.preempted_at is None

    @property
    def is_held(self) -> bool:
        return bool(_HELD.search(self.reason)) or self.state in ("REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")


# Of `man squeue`, JOB STATE CODES: those after which nothing comes. COMPLETING is not one: processes may be left.
OVER = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)


def run_slurm(command: Sequence[str], *, timeout: float = 30.0, retry_seconds: float = 0) -> str:
    """What a command of Slurm prints; SlurmError with its words explained. What passes is retried for so long."""
    return answered(command, timeout=timeout, retry_seconds=retry_seconds).out


def answered(
    command: Sequence[str],
    *,
    timeout: float = 30.0,
    retry_seconds: float = 0,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """As `run_slurm`, with both outputs; `text` goes to the command's standard input."""
    until = time.monotonic() + retry_seconds
    while True:
        answer = ask(command, seconds=timeout, text=text, environment=environment)
        if answer.failure is None:
            return answer
        error = explained(answer, command)
        if not passes(error) or time.monotonic() + _AGAIN_AFTER_SECONDS > until:
            raise error
        time.sleep(_AGAIN_AFTER_SECONDS)


def explained(answer: Answer, command: Sequence[str]) -> SlurmError:
    """The error for an answer that is none."""
    said = _said(answer)
    for pattern, meaning, advice in _WORDS:
        if re.search(pattern, said, re.IGNORECASE):
            refused = not _PASSING.search(said)
            return SlurmError(
                f"{meaning} ({said})", hint=advice or None, refused=refused, said=said, command=command[0]
            )
    return SlurmError(f"{command[0]} refused: {said}", refused=True, said=said, command=command[0])


def passes(error: SlurmError) -> bool:
    """Whether it is worth asking again: the controller was away, and nothing is wrong with the question."""
    return bool(_PASSING.search(str(error.details.get("said", ""))))


def is_unknown_job(error: SlurmError) -> bool:
    return bool(_UNKNOWN_JOB.search(str(error.details.get("said", ""))))


def job_state(job_id: str, *, retry_seconds: float = 0) -> JobState | None:
    """What Slurm knows of a job; None if it knows it no more. SlurmError while it does not answer."""
    try:
        text = run_slurm(["scontrol", "show", "job", job_id], retry_seconds=retry_seconds)
    except SlurmError as error:
        if is_unknown_job(error):
            return None
        raise
    found = jobs_in_text(text)
    return found[0] if found else None


def jobs_in_text(text: str) -> list[JobState]:
    """The jobs in what `scontrol show job` prints."""
    return [_job(record) for record in records(text)]


def _job(record: Mapping[str, str]) -> JobState:
    array = record.get("ArrayJobId"), record.get("ArrayTaskId")
    job_id = f"{array[0]}_{array[1]}" if array[0] and array[1] else record["JobId"]
    nodes = record.get("NodeList", "")
    return JobState(
        job_id,
        record.get("JobState", "UNKNOWN"),
        record.get("Reason", "None"),
        record.get("Partition", ""),
        "" if nodes == "(null)" else nodes,
        _first_number(record.get("NumNodes", "0")),
        _first_number(record.get("Restarts", "0")),
        record.get("Requeue") == "1",
        record.get("ExitCode", "0:0"),
        "" if record.get("Dependency") == "(null)" else record.get("Dependency", ""),
        slurm_moment(record.get("SubmitTime", "")),
        slurm_moment(record.get("StartTime", "")),
        slurm_moment(record.get("EndTime", "")),
        record.get("TimeLimit", ""),
        record.get("Command", ""),
        record.get("JobName", ""),
        slurm_moment(record.get("PreemptTime", "")),
    )


def slurm_moment(text: str) -> datetime | None:
    """A time as Slurm prints it, which is that of this machine's clock; None for Unknown and N/A."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None


def _first_number(text: str) -> int:
    found = re.match(r"\d+", text)  # 2-4, where it may vary
    return int(found[0]) if found else 0


def _said(answer: Answer) -> str:
    """The telling line: sbatch's last is often only that the submission failed, and why comes after its colon."""
    lines = [line.strip() for line in (answer.err or answer.failure or "").splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r'Try ".* --help"', line)]
    telling = [line for line in lines if not re.search(r"DNS SRV|fetch_config|_establish_config|res_nsearch", line)]
    said = [re.sub(r"^\w+: (error|fatal): ", "", line) for line in telling] or [answer.failure or "no reason given"]
    said = [
        re.sub(r"^(Batch job submission failed|Unable to allocate resources|allocation failure): ", "", s) for s in said
    ]
    return "; ".join(dict.fromkeys(said))
