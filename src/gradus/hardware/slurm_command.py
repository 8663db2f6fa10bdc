"""One question to Slurm through one of its own commands, and its answer, whatever that is."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PATIENCE_SECONDS = 5.0
# What each of its commands says where only the packages are installed.
NOT_CONFIGURED = "Could not establish a configuration source"
# By these a user's or a site's settings would change what a command prints or leaves out.
_CHANGE_ANSWERS = ("SQUEUE_", "SINFO_", "SCONTROL_", "SPRIO_", "SLURM_TIME_FORMAT", "SLURM_JSON")


@dataclass(frozen=True)
class Answer:
    """What a command printed. `failure` is why there is nothing to go by."""

    out: str
    err: str = ""
    failure: str | None = None


def ask(
    command: Sequence[str],
    *,
    seconds: float = PATIENCE_SECONDS,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Answer:
    """Run a command of Slurm, with `text` on its standard input."""
    shown = " ".join(command)
    variables = os.environ if environment is None else environment
    known = {name: value for name, value in variables.items() if not name.startswith(_CHANGE_ANSWERS)}
    try:
        done = subprocess.run(
            command,
            input=text or "",
            capture_output=True,
            text=True,
            timeout=seconds,
            env={**known, "SLURM_TIME_FORMAT": "standard", "LC_ALL": "C.UTF-8"},
        )
    except subprocess.TimeoutExpired:
        return Answer("", failure=f"`{shown}` took more than {seconds:.0f} s")
    except (OSError, UnicodeDecodeError) as error:
        return Answer("", failure=f"`{shown}` cannot be run: {error}")
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip()).splitlines()
        failure = words[-1] if words else f"`{shown}` ended with {done.returncode}"
        return Answer(done.stdout, done.stderr, failure)
    return Answer(done.stdout, done.stderr)


# Where somebody's own words are, they have the rest of the line, so that they cannot pass for another field.
_OWN_WORDS = ("JobName", "Comment", "Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Reason", "AdminComment")


def records(text: str) -> list[dict[str, str]]:
    """The records that `scontrol show` prints, with an empty line between them: `Name=value Name=value`, in lines."""
    found = []
    for block in re.split(r"\n\s*\n", text.strip()):
        record: dict[str, str] = {}
        for line in block.splitlines():
            for name, value in _pairs(line.strip()):
                record.setdefault(name, value)
        if record:
            found.append(record)
    return found


def _pairs(line: str) -> list[tuple[str, str]]:
    parts = re.split(r"(?:^|\s)([A-Z][A-Za-z0-9:/_-]*)=", line)
    pairs = list(zip(parts[1::2], parts[2::2], strict=True))
    for number, (name, _) in enumerate(pairs):
        if name in _OWN_WORDS and not (name == "Reason" and "Dependency" in dict(pairs)):
            rest = line[line.index(f"{name}=") + len(name) + 1 :]
            return [*pairs[:number], (name, rest)]
    return pairs
