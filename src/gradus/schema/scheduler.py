"""Scheduler: how jobs of a cluster are asked for. Every value ends up in a batch script, so none may end its line."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gradus.schema.intervals import Duration, seconds_of

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
_UNLIMITED = ("unlimited", "infinite")
# days-hours:minutes:seconds, of which Slurm lets the rest be left out; without days, minutes or minutes:seconds.
_SLURM_TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+):(\d+):(\d+)|(\d+)(?::(\d+))?)")
_ALLOWED_TIME = 'a time such as 90m or 1h30m, or as Slurm writes it, in quotes: "1-12:00:00"'


def job_seconds(time: str) -> float:
    """Seconds of a time limit, as people write it (`1h30m`) or as Slurm does (`1-12:00:00`, and `90` for minutes).

    >>> job_seconds("1-00:00:00"), job_seconds("24:00:00"), job_seconds("1440"), job_seconds("24h")
    (86400.0, 86400.0, 86400.0, 86400.0)
    """
    text = time.strip().lower()
    if text in _UNLIMITED:
        return float("inf")
    found = _SLURM_TIME.fullmatch(text)
    if found is None:
        try:
            return seconds_of(text)
        except ValueError:
            raise ValueError(_ALLOWED_TIME) from None
    d, dh, dm, ds, h, m, s, minutes, seconds = (float(part or 0) for part in found.groups())
    return 86400 * d + 3600 * (dh + h) + 60 * (dm + m + minutes) + ds + s + seconds


def slurm_time(seconds: float) -> str:
    """A time limit in the one form that it has in our files: days-hours:minutes:seconds.

    >>> slurm_time(5400), slurm_time(90000)
    ('01:30:00', '1-01:00:00')
    """
    if seconds == float("inf"):
        return "UNLIMITED"
    whole = int(-(-seconds // 1))
    days, rest = divmod(whole, 86400)
    clock = f"{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{clock}" if days else clock


def one_line(text: str) -> str:
    """The text, if it stays on one line wherever it is written."""
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in text) or "\u2028" in text or "\u2029" in text:
        raise ValueError("text on one line, without control characters")
    return text


def _word(text: str) -> str:
    if not one_line(text).strip():
        raise ValueError("text that is not empty")
    return text


def _time(value: object) -> object:
    # Unquoted, YAML reads 24:00:00 as a number, of seconds, and 90 as another, which Slurm would take for minutes.
    if not isinstance(value, str):
        raise ValueError(_ALLOWED_TIME)
    seconds = job_seconds(one_line(value))
    if seconds <= 0:
        raise ValueError("a time above 0")
    return slurm_time(seconds)


def _option(text: str) -> str:
    if not re.match(r"--?[A-Za-z]", one_line(text)):
        raise ValueError('an option of sbatch, such as "--licenses=matlab:1"')
    return text


Word = Annotated[str, AfterValidator(_word)]
JobTime = Annotated[str, BeforeValidator(_time)]
Option = Annotated[str, AfterValidator(_option)]
Memory = Annotated[str, Field(pattern=r"^\d+[KMGT]?B?$")]


class Scheduler(BaseModel):
    """Where jobs go and what they ask for. Names are those of sbatch's options; `options` has any that is not here."""

    model_config = _STRICT

    kind: Literal["local", "slurm"] = "local"
    partition: Word | None = None  # or several, with commas: the one that starts first
    account: Word | None = None
    qos: Word | None = None
    reservation: Word | None = None
    time: JobTime | None = None  # 1h30m, or "1-12:00:00"
    constraint: Word | None = None
    nodelist: Word | None = None  # nodes that must be among those of the job
    exclude: Word | None = None
    begin: Word | None = None  # not before: 20:00, now+1hour, 2026-12-24T08:00:00
    dependency: Word | None = None  # such as afterok:4711
    gres: Word | None = None  # instead of the GPUs that the plan needs: gpu:a100:4, or none where nobody counts them
    gpus_per_task: Word | None = None
    cpus_per_task: int | None = Field(None, ge=1)  # a node's launcher is one task: the cores that a job has of a node
    mem: Memory | None = None  # of each node; 0: all of it
    mem_per_cpu: Memory | None = None
    ntasks: int | None = Field(None, ge=1)
    ntasks_per_node: int | None = Field(None, ge=1)
    exclusive: bool | Literal["user", "mcs"] = False
    switches: Word | None = None  # at most so many, and how long to wait for that: 1, or 1@12:00:00
    distribution: Word | None = None
    cpu_bind: Word | None = None  # srun's: how a node's task is bound to its cores
    label: bool = False  # srun's: each line of output begins with the task that wrote it
    export: Word | None = None  # which variables of this shell a job has: ALL (Slurm's default), NONE, or names
    job_name: Word | None = None
    comment: Word | None = None
    mail_type: Word | list[Word] | None = None
    mail_user: Word | None = None
    nice: int | None = None
    output: Word | None = None  # of the batch script; ranks have logs of their own
    error: Word | None = None
    array_limit: int | None = Field(None, ge=1)  # of the jobs of a sweep, at most so many at once
    lead: Duration | None = None  # how long before the time limit a job is asked to save and stop
    requeue: bool | None = None  # None: as the site has it
    launcher: Literal["torchrun", "mpi"] = "torchrun"
    mpi: Literal["pmix", "pmi2", "mpirun"] | None = None
    options: list[Option] = []

    @model_validator(mode="after")
    def _fits_together(self) -> Scheduler:
        if self.mem is not None and self.mem_per_cpu is not None:
            raise ValueError("mem or mem_per_cpu, and not both")
        if self.mpi is not None and self.launcher != "mpi":
            raise ValueError("mpi only with launcher: mpi")
        return self
