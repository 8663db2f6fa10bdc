"""Options: what a job asks Slurm for, as the header of its batch script and as arguments of srun inside it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.intervals import seconds_of
from gradus.schema.loading import validated
from gradus.schema.scheduler import Scheduler, job_seconds

# In this order in the header. A field has the name of its option, with underscores for dashes.
_TYPED = (
    *("job_name", "partition", "account", "qos", "reservation", "time", "constraint", "nodelist", "exclude"),
    *("begin", "dependency", "cpus_per_task", "mem", "mem_per_cpu", "switches", "distribution", "export"),
    *("comment", "mail_type", "mail_user", "nice"),
)
_SHORT = {
    "A": "account",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "d": "dependency",
    "m": "distribution",
    "e": "error",
    "x": "exclude",
    "J": "job-name",
    "l": "label",
    "w": "nodelist",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "t": "time",
    "q": "qos",
    "a": "array",
    "D": "chdir",
    "W": "wait",
    "F": "nodefile",
    "i": "input",
    "k": "no-kill",
    "L": "licenses",
    "M": "clusters",
    "O": "overcommit",
    "s": "oversubscribe",
    "S": "core-spec",
    "G": "gpus",
    "B": "extra-node-info",
    "H": "hold",
    "Q": "quiet",
    "v": "verbose",
}
_NUMBERS = ("cpus_per_task", "ntasks", "ntasks_per_node", "nice")
_SWITCHES = {"exclusive": True, "label": True}  # without a value
# These settings of a shell win over a script's header: what the header says must not be one of them.
_SETTINGS = {"time": "SBATCH_TIMELIMIT", "mem": "SBATCH_MEM_PER_NODE", "switches": "SBATCH_REQ_SWITCH"}
# What the batch script rests on: given otherwise, a job would not do what gradus promises.
_OURS = {
    "nodes": "the number of nodes belongs to the plan: use --nodes",
    "signal": "the script answers SIGUSR1 to the batch shell; how long before the time limit says scheduler.lead",
    "open-mode": "a job that is requeued must go on in its file, so that it is always append",
    "requeue": "say scheduler.requeue: true",
    "no-requeue": "say scheduler.requeue: false",
    "array": "arrays are for sweeps: use --sweep, and scheduler.array_limit for how many at once",
    "wrap": "gradus writes the script itself",
    "test-only": "use --dry-run, or gradus cluster show",
    "parsable": "gradus prints the job's number itself; use --json",
    "wait": "use gradus submit --wait",
    "chdir": "the job runs in the folder that it is submitted from",
    "input": "a job has no input",
    "hold": "submit it and say gradus runs stop RUN",
    "clusters": "one cluster file describes one cluster: set SLURM_CLUSTERS for another",
    "gpus": "the GPUs belong to the plan: use --nproc, or scheduler.gres",
    "gpus-per-node": "the GPUs belong to the plan: use --nproc, or scheduler.gres",
    "kill-on-bad-exit": "nodes end each other in order",
}


@dataclass(frozen=True)
class Shape:
    """How much of a cluster a job takes."""

    nodes: int
    ranks_per_node: int
    gpus_per_node: int = 0
    cpus_per_node: int | None = None

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node


def shape_of(cluster: Cluster, nodes: int, ranks_per_node: int, ranks_per_gpu: int = 1) -> Shape:
    """What so many ranks need of each node: of a node's cores, as great a part as of its GPUs."""
    if not cluster.gpus_per_node:
        return Shape(nodes, ranks_per_node, 0, cluster.cpu_cores)
    gpus = min(cluster.gpus_per_node, -(-ranks_per_node // ranks_per_gpu))
    return Shape(nodes, ranks_per_node, gpus, max(1, cluster.cpu_cores * gpus // cluster.gpus_per_node))


def with_options(scheduler: Scheduler, typed: Sequence[str], field: str = "--sbatch") -> Scheduler:
    """The scheduler with options as sbatch has them. Those that have a field of their own go there."""
    given = [pair for text in typed for pair in _split(text, field)]
    return _with_pairs(scheduler, given, field)


def settled(scheduler: Scheduler) -> Scheduler:
    """The scheduler with those of its own `options` that have a field in their fields: these have one form."""
    pairs = [pair for text in scheduler.options for pair in _split(text, "scheduler.options")]
    return _with_pairs(scheduler.model_copy(update={"options": []}), pairs, "scheduler.options")


def sbatch_options(
    scheduler: Scheduler, shape: Shape, *, name: str, output: str, lead_seconds: int, array: int | None = None
) -> list[str]:
    """The header of a job's script, in a fixed order, each option as sbatch has it on its command line.

    `output` is a file name in which Slurm fills in %j; `array` is the number of runs of a sweep.
    """
    mpi = scheduler.launcher == "mpi"
    tasks = shape.ranks_per_node if mpi else 1
    _check_tasks(scheduler, shape.nodes, tasks)
    values: dict[str, Any] = {name: getattr(scheduler, name) for name in _TYPED}
    values["job_name"] = scheduler.job_name or name
    if scheduler.cpus_per_task is None and shape.cpus_per_node is not None:
        values["cpus_per_task"] = max(1, shape.cpus_per_node // tasks)
    if isinstance(scheduler.mail_type, list):
        values["mail_type"] = ",".join(scheduler.mail_type)
    options = [f"--{field.replace('_', '-')}={values[field]}" for field in _TYPED if values[field] is not None]
    options += [f"--nodes={shape.nodes}", f"--ntasks={shape.nodes * tasks}", f"--ntasks-per-node={tasks}"]
    options += _gpu_options(scheduler, shape)
    if scheduler.exclusive:
        options.append("--exclusive" if scheduler.exclusive is True else f"--exclusive={scheduler.exclusive}")
    if array is not None:
        limit = f"%{scheduler.array_limit}" if scheduler.array_limit else ""
        options.append(f"--array=0-{array - 1}{limit}")
    options.append(f"--output={scheduler.output or output}")
    options += [f"--error={scheduler.error}"] if scheduler.error else []
    options += ["--open-mode=append", f"--signal=B:USR1@{lead_seconds}"]
    options.append("--no-requeue" if scheduler.requeue is False else "--requeue")
    return [*options, *scheduler.options]


def srun_options(scheduler: Scheduler) -> list[str]:
    """What only srun knows. The shape of a step is said by whoever starts it."""
    options = [f"--cpu-bind={scheduler.cpu_bind}"] if scheduler.cpu_bind else []
    options += [f"--distribution={scheduler.distribution}"] if scheduler.distribution else []
    options += ["--label"] if scheduler.label else []
    # A job that was given less than all variables would hand its tasks even less: none of those of its own script.
    return [*options, *(["--export=ALL"] if scheduler.export not in (None, "ALL") else [])]


def header_word(option: str) -> str:
    """An option as a line of the header: Slurm cuts those at spaces and at #, and knows quotes and backslashes."""
    if re.fullmatch(r"[\w@%+=:,./~^*&|()\[\]{}<>!?$;-]*", option):
        return option
    name, equals, value = option.partition("=")
    inner = (value if equals else name).replace("\\", "\\\\").replace('"', '\\"')
    return f'{name}="{inner}"' if equals else f'"{inner}"'


def submission_variables(header: Sequence[str]) -> dict[str, str]:
    """This process's variables, less those that would change what the header says."""
    names = {option.partition("=")[0].removeprefix("--") for option in header}
    settings = {_SETTINGS.get(name, "SBATCH_" + name.upper().replace("-", "_")) for name in names}
    settings |= {"SBATCH_REQUEUE", "SBATCH_NO_REQUEUE", "SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_DEBUG"}
    return {name: value for name, value in os.environ.items() if name not in settings}


def file_name(path: str) -> str:
    """A path as the beginning of a file name in which Slurm fills in what begins with %."""
    return path.replace("%", "%%")


def lead_seconds(scheduler: Scheduler, default: int, limit: float | None = None) -> int:
    """How long before its time limit a job is asked to stop; of a short job, no more than a quarter of its time.

    `limit` are the seconds that a job has which does not say how long it takes.
    """
    if scheduler.lead is not None:
        return max(1, round(seconds_of(scheduler.lead)))
    seconds = job_seconds(scheduler.time) if scheduler.time else limit or float("inf")
    return max(1, int(min(default, seconds / 4)))


def _gpu_options(scheduler: Scheduler, shape: Shape) -> list[str]:
    if scheduler.gpus_per_task is not None:
        return [f"--gpus-per-task={scheduler.gpus_per_task}"]
    if scheduler.gres is not None:
        return [] if scheduler.gres == "none" else [f"--gres={scheduler.gres}"]
    return [f"--gres=gpu:{shape.gpus_per_node}"] if shape.gpus_per_node else []


def _check_tasks(scheduler: Scheduler, nodes: int, tasks: int) -> None:
    wanted = {"ntasks_per_node": tasks, "ntasks": nodes * tasks}
    for field, number in wanted.items():
        given = getattr(scheduler, field)
        if given is not None and given != number:
            why = "one for each rank" if scheduler.launcher == "mpi" else "one for each node, which starts its ranks"
            raise InputError(
                f"scheduler.{field}: found {given}, but the job has {number}: {why}",
                hint="the number of ranks on each node is --nproc, the number of nodes --nodes",
                field=f"scheduler.{field}",
                found=given,
                allowed=number,
            )


def _split(text: str, field: str) -> list[tuple[str, str | None, str]]:
    """Name, value and text of each option in a text: `--mem=4G`, `-C gpu`, or several of them."""
    try:
        words = shlex.split(text)
    except ValueError:  # a quote without its other half: then it is part of a value
        words = [text]
    if not words or not re.match(r"--?[A-Za-z]", words[0]):
        raise _no_option(text, field)
    if len(words) > 1 and not all(re.match(r"--?[A-Za-z]", word) for word in words):
        first, _, rest = text.strip().partition(" ")
        if "=" in first:
            words = [text.strip()]  # spaces in a value
        elif len(words) == 2:
            return [_named(first, words[1], f"{_long(first)}={words[1]}", field)]
        else:
            return [_named(first, rest, f"{_long(first)}={rest}", field)]
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2 and not equals:
            name, equals, value = word[:2], "=", word[2:]  # -pdebug
        found.append(_named(name, value if equals else None, f"{_long(name)}{equals}{value}", field))
    return found


def _named(name: str, value: str | None, text: str, field: str) -> tuple[str, str | None, str]:
    long = _long(name)
    if value is not None and not value:
        raise _no_option(text, field)
    return long.lstrip("-"), value, text


def _long(name: str) -> str:
    if name.startswith("--"):
        return name
    known = _SHORT.get(name[1:2])
    return f"--{known}" if known else name


def _with_pairs(scheduler: Scheduler, pairs: Sequence[tuple[str, str | None, str]], field: str) -> Scheduler:
    document = scheduler.model_dump(exclude_unset=True)
    passed = list(document.get("options", []))
    for name, value, text in pairs:
        if name in _OURS:
            raise InputError(
                f"{field}: {text}: {_OURS[name]}", field=field, found=text, allowed="any other option of sbatch"
            )
        key = name.replace("-", "_")
        if key in _NUMBERS and value is not None:
            document[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
        elif key in _SWITCHES and value is None:
            document[key] = _SWITCHES[key]
        elif key in Scheduler.model_fields and key not in ("kind", "lead", "launcher", "mpi", "options", "array_limit"):
            if value is None:
                raise _no_option(text, field)
            document[key] = value
        else:
            passed.append(text)
    if passed:
        document["options"] = passed
    return validated(Scheduler, document, field)


def _no_option(text: str, field: str) -> InputError:
    return InputError(
        f"{field}: found {text!r}, allowed: an option of sbatch with its value",
        hint=f'{field} "--licenses=matlab:1"' if field == "--sbatch" else None,
        field=field,
        found=text,
        allowed="--name=value",
    )
