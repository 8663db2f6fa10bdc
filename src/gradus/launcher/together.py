"""Together: the same command, started as several processes at once by srun or mpirun, and who this one is of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradus.record.variables import RUN
from gradus.schema.stable_hash import stable_hash


@dataclass(frozen=True)
class Together:
    """One of several processes that were started with the same command."""

    process: int  # from 0; process 0 leads
    processes: int
    started_by: str  # "srun" or "mpirun"
    key: str  # the same for all of them, and for no others

    @property
    def leads(self) -> bool:
        return self.process == 0


def started_together(
    variables: Mapping[str, str] = os.environ, command: Sequence[str] | None = None
) -> Together | None:
    """Whether this process is one of several; None for one that is alone, as in a batch shell or `srun --pty bash`.

    An MPI starter's own variables come before Slurm's: inside of a job, it starts its helpers by srun, one for each
    node, and what Slurm says is then about these.
    """
    if RUN in variables or "TORCHELASTIC_RUN_ID" in variables:
        return None  # something that a rank has started
    found = _open_mpi(variables) or _pmi(variables, command) or _slurm(variables)
    return found if found is not None and found.processes > 1 else None


def _open_mpi(variables: Mapping[str, str]) -> Together | None:
    rank, size = _number(variables, "OMPI_COMM_WORLD_RANK"), _number(variables, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    job = variables.get("PMIX_NAMESPACE") or variables.get("OMPI_MCA_ess_base_jobid") or ""
    return Together(rank, size, "mpirun", _key("mpirun", job, variables.get("OMPI_MCA_orte_hnp_uri", "")))


def _pmi(variables: Mapping[str, str], command: Sequence[str] | None) -> Together | None:
    """MPICH, Intel MPI and others that speak PMI; also `srun --mpi=pmi2`."""
    rank, size = _number(variables, "PMI_RANK"), _number(variables, "PMI_SIZE")
    if rank is None or size is None:
        return None
    if size == _number(variables, "SLURM_STEP_NUM_TASKS") and rank == _number(variables, "SLURM_PROCID"):
        return _slurm(variables)
    # Not all of them name a job. Then the command itself, and where it was typed, must do.
    names = ("PMI_JOBID", "PMI_PORT", "PMI_ID_FILE", "I_MPI_JOB_ID", "HYDI_JOB_ID", "SLURM_JOB_ID")
    job = [variables.get(name, "") for name in names]
    typed = list(sys.argv if command is None else command)
    return Together(rank, size, "mpirun", _key("mpirun", *job, str(size), os.getcwd(), *typed))


def _slurm(variables: Mapping[str, str]) -> Together | None:
    """A task of a step. A batch shell has SLURM_NTASKS and SLURM_PROCID, too, but is in no step."""
    task, tasks = _number(variables, "SLURM_PROCID"), _number(variables, "SLURM_STEP_NUM_TASKS")
    step = variables.get("SLURM_STEP_ID", variables.get("SLURM_STEPID"))
    if task is None or tasks is None or step is None:
        return None
    restart = variables.get("SLURM_RESTART_COUNT", "0")
    return Together(task, tasks, "srun", f"srun-{variables.get('SLURM_JOB_ID', '')}.{step}.{restart}")


def _number(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


def _key(*parts: str) -> str:
    return f"{parts[0]}-{stable_hash(*parts):016x}"
