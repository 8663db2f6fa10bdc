"""What is wrong, or will be at scale, with a software environment; said before a job waits in the queue for it."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from gradus.launcher.software import Interpreter, guarded, interpreter, interpreter_of, module_setup
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError, nearest
from gradus.schema.software import Environment

# `import torch` opens 1,145 files (2.13.0, CPU build, counted with sys.addaudithook): 8 nodes with 8 ranks each open
# 73,000 at the same moment.
_MANY_NODES = 8
_ASKING_SECONDS = 120  # `module spider` reads every modulefile of a site if its cache is stale
_STARTUP_FILES = (".bashrc", ".bash_profile", ".profile")
_LOADS = re.compile(r"^\s*(?:module\s+(?:load|add)|ml\s+[^-\s]|conda\s+activate|source\s+\S*bin/activate)")


def environment_warnings(cluster: Cluster, nodes: int) -> list[str]:
    """Warnings for a job on so many nodes. A module of which the site has none is an error."""
    environment = cluster.environment
    return [
        *_of_modules(environment),
        *_of_startup_files(Path.home()),
        *_of_interpreter(cluster, interpreter_of(environment), nodes),
    ]


def _of_modules(environment: Environment) -> Iterator[str]:
    if not environment.modules:
        return
    for name, found in modules_at(tuple(environment.modules), tuple(environment.module_use)).items():
        base = name.partition("/")[0]
        if not found:
            raise InputError(
                f"environment.modules: this site has no module {base!r}",
                hint=f"module spider {base}; folders of modules that are not searched by default go into "
                "environment.module_use",
                field="environment.modules",
                found=name,
            )
        if name in found:  # with its version, or one that has none
            continue
        # cuda/12 stands for the newest 12.x in some sites, and a folder may stand for all that is in it.
        inside = [other for other in found if other.startswith((f"{name}/", f"{name}."))]
        if not inside:
            close = nearest(name, found)
            raise InputError(
                f"environment.modules: there is no {name}" + (f"; did you mean {close}?" if close else "."),
                hint=f"there are: {', '.join(found)}",
                field="environment.modules",
                found=name,
                allowed=found,
                nearest=close,
            )
        yield (
            f"environment.modules: {name} has no version: what it stands for may change while a run is in the queue. "
            f"There are: {', '.join(inside)}"
        )


@functools.cache  # a site's cache may be stale, and then it takes long
def modules_at(modules: tuple[str, ...], module_use: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """For each module, those of the site with that name, as they are when the ones before it are loaded."""
    folders = [f"module use {shlex.quote(os.path.expanduser(folder))}" for folder in module_use]
    lines = ["module purge >/dev/null 2>&1", *folders]
    for name in modules:
        base = shlex.quote(name.partition("/")[0])
        lines += [
            f"echo '### '{shlex.quote(name)}",
            # Both Lmod and the Tcl program write this to standard error. A spider finds what needs others loaded first.
            f"gradus_said=$(module -t avail {base} 2>&1); "
            f'grep -q ^{base} <<< "$gradus_said" || gradus_said=$(module -t spider {base} 2>&1)',
            'echo "$gradus_said"',
            *([f"module load {shlex.quote(name)} >/dev/null 2>&1"] if name != modules[-1] else []),
        ]
    check = "type module >/dev/null 2>&1 || gradus_fail environment.modules: there is no module command here"
    script = "\n".join(guarded([*module_setup(), check, *lines]))
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=_ASKING_SECONDS)
    if "### " not in done.stdout:
        raise InputError(
            "environment.modules: there is no module command on this machine",
            hint="leave out environment.modules, or submit from a machine that has it",
            field="environment.modules",
            found=", ".join(modules),
        )
    found: dict[str, list[str]] = {}
    for block in done.stdout.split("### ")[1:]:
        name, *said = block.splitlines()
        found[name] = names_in(said, name.partition("/")[0])
    return found


def names_in(lines: list[str], base: str) -> list[str]:
    """The modules called `base` in a terse listing, which has folders (with a colon) and other names between them."""
    words = [re.sub(r"\(.*\)$", "", line.strip()).rstrip("/") for line in lines if not line.rstrip().endswith(":")]
    return list(dict.fromkeys(word for word in words if word == base or word.startswith(f"{base}/")))


def _of_startup_files(home: Path) -> Iterator[str]:
    for name in _STARTUP_FILES:
        try:
            lines = (home / name).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for number, line in enumerate(lines, 1):
            if _LOADS.match(line):
                yield (
                    f"~/{name}, line {number} loads software ({line.strip()}): whether a job has it depends on how its "
                    "shell is started. Name it in the cluster file's environment instead"
                )
                break


def _of_interpreter(cluster: Cluster, found: Interpreter | None, nodes: int) -> Iterator[str]:
    if found is None or (cluster.container is not None and cluster.container.python == "image"):
        return
    if found.prefix == "/usr":
        yield (
            f"{found.executable} is the system's own interpreter: an update of the nodes changes the run. "
            f"Use an environment: {found.executable} -m venv FOLDER"
        )
    home = os.path.realpath(Path.home())
    if nodes >= _MANY_NODES and not cluster.environment.pack and os.path.realpath(found.prefix).startswith(f"{home}/"):
        yield (
            f"{found.prefix} is in a home folder: on {nodes} nodes, every rank opens about a thousand small files "
            "there before the first step. environment.pack: true unpacks it to each node's own disk"
        )
    here = interpreter(sys.executable)
    for what, theirs, ours in (
        ("Python", _minor(found.version), _minor(here.version)),
        ("torch", found.torch, here.torch),
    ):
        if theirs != ours:
            yield f"{found.executable} has {what} {theirs or '(none)'}, and here it is {ours}, for which plans are made"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
