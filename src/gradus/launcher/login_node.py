"""Login nodes: shared by everybody on a cluster and no place to train, which is said before anything runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from gradus.hardware.detect import detect_machine
from gradus.schema.errors import InputError

_PATIENCE_SECONDS = 5.0
FEW_STEPS = 20  # enough to see that something works


def looks_like_a_login_node() -> bool:
    """Jobs can be submitted from here, this is not one of them, and there is no GPU."""
    sbatch = shutil.which("sbatch")
    if sbatch is None or "SLURM_JOB_ID" in os.environ or detect_machine().gpus:
        return False
    return not _has_no_cluster(Path(sbatch).with_name("sinfo"))


def _has_no_cluster(sinfo: Path) -> bool:
    """Whether Slurm's commands are installed and belong to no cluster, as on a machine of one's own."""
    if not sinfo.exists():
        return False
    try:
        done = subprocess.run([sinfo, "--noheader"], capture_output=True, text=True, timeout=_PATIENCE_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode != 0 and "configuration source" in done.stderr


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
