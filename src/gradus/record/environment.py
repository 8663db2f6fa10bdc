"""environment.json: what a run ran in. Of the environment variables only a few, named here: the others hold secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.schema.secrets import names_a_secret

_PACKAGES = (
    *("gradus", "torch", "numpy", "pydantic", "PyYAML", "safetensors", "rich", "typer", "jinja2", "nvidia-ml-py"),
    *("triton", "torchao", "transformers", "scikit-learn", "pillow", "tensorboard"),
)
_DIFF_LIMIT_BYTES = 1 << 20
_GIT_TIMEOUT_SECONDS = 20
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_MASK = "***"


def environment(
    gpus: Sequence[Mapping[str, Any]] = (), command: Sequence[str] | None = None, directory: Path | None = None
) -> dict[str, Any]:
    """Versions, machine, source and job of this process; what is not there is left out."""
    document = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "packages": _versions(),
        "git": _git(directory or Path.cwd()),
        "modules": [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name],
        "gpus": [dict(gpu) for gpu in gpus],
        "command": mask_secrets(sys.argv if command is None else command),
        "slurm": _slurm(),
    }
    return {key: value for key, value in document.items() if value is not None}


def mask_secrets(command: Sequence[str]) -> list[str]:
    """The command line without the values of options such as `--token x` or `--set data.api_key=x`."""
    masked = []
    value_is_secret = False
    for argument in command:
        name, equals, _ = argument.partition("=")
        if value_is_secret and not argument.startswith("--"):
            masked.append(_MASK)
        elif equals and names_a_secret(name):
            masked.append(f"{name}={_MASK}")
        else:
            masked.append(_URL_LOGIN.sub(_MASK, argument))
        value_is_secret = argument.startswith("-") and not equals and names_a_secret(argument)
    return masked


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git(directory: Path) -> dict[str, Any] | None:
    commit = _git_output(directory, "rev-parse", "HEAD")
    if commit is None:
        return None
    document: dict[str, Any] = {"commit": commit.decode().strip()}
    diff = _git_output(directory, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "HEAD")
    if diff is not None:
        document["diff"] = diff[:_DIFF_LIMIT_BYTES].decode(errors="replace")
        document["diff_is_whole"] = len(diff) <= _DIFF_LIMIT_BYTES
    return document


def _git_output(directory: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(
            # No optional locks: a user's own git command must not fail because a run starts.
            ["git", "--no-optional-locks", "-C", str(directory), *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _slurm() -> dict[str, str] | None:
    names = {"job_id": "SLURM_JOB_ID", "nodes": "SLURM_JOB_NODELIST"}
    return {key: os.environ[name] for key, name in names.items() if name in os.environ} or None
