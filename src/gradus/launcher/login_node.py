"""Login nodes: shared by everybody on a cluster and no place to train, which is said before anything runs."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence

from gradus.hardware.detect import detect_machine
from gradus.schema.errors import InputError

FEW_STEPS = 20  # enough to see that something works


def looks_like_a_login_node() -> bool:
    """Jobs can be submitted from here, this is not one of them, and there is no GPU."""
    return shutil.which("sbatch") is not None and "SLURM_JOB_ID" not in os.environ and not detect_machine().gpus


def check_not_on_a_login_node(what: str, submit: Sequence[str]) -> None:
    """Refuse work that belongs into a job, with the command that makes it one."""
    if looks_like_a_login_node():
        raise InputError(
            f"this looks like a login node (sbatch is here, no job is active, and there is no GPU), and {what}",
            hint=f"{shlex.join(submit)}   or, if it may run on this machine after all, add --here",
            found="a login node",
            allowed=f"up to {FEW_STEPS} steps of a recipe",
            submit=shlex.join(submit),
        )
