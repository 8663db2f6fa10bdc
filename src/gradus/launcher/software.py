"""The software environment of a job: lines of bash that load it or end the job, and the interpreter it comes with."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from gradus.schema.errors import EXIT_DO_NOT_RESTART, InputError
from gradus.schema.software import Environment

_ASKING_SECONDS = 120  # patience with an interpreter on a slow file system
# Where a shell that is no login shell finds `module`, if it was not given it as an exported function.
_MODULE_SETUP = (
    *('"${LMOD_PKG:-}/init/bash"', '"${MODULESHOME:-}/init/bash"'),
    *("/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh", "/etc/profile.d/modules.sh"),
    *("/usr/share/lmod/lmod/init/bash", "/usr/share/modules/init/bash", "/usr/share/Modules/init/bash"),
)


def environment_lines(environment: Environment) -> list[str]:
    """Lines of bash. What is not there ends the job with a message, and with the code for what would fail again."""
    lines = []
    if environment.modules or environment.module_use:
        lines += [*module_setup(), *_module_lines(environment)]
    if environment.conda:
        lines += _conda_lines(environment.conda)
    if environment.venv:
        lines += _venv_lines(_folder(environment.venv))
    return guarded(lines) + [f"export {name}={shlex.quote(value)}" for name, value in environment.variables.items()]


def python_of(environment: Environment) -> str:
    """The job's interpreter, as a word of the shell that has run the lines."""
    if environment.venv:
        return shlex.quote(f"{_folder(environment.venv)}/bin/python")
    if environment.conda:
        return '"$CONDA_PREFIX/bin/python"'
    return shlex.quote(sys.executable)


# ---- lines ----


def guarded(lines: list[str]) -> list[str]:
    """With a way to fail, and in a shell for which an unset variable is no error: modules and conda need that."""
    fail = f'gradus_fail() {{ echo "gradus: on ${{SLURMD_NODENAME:-$HOSTNAME}}: $*" >&2; exit {EXIT_DO_NOT_RESTART}; }}'
    before, after = "gradus_options=$-; set +u", "case $gradus_options in *u*) set -u ;; esac"
    return [fail, before, *lines, after] if lines else []


def module_setup() -> list[str]:
    """Lines after which a shell that began without its user's settings has `module`, if the machine does."""
    return [
        "if ! type module >/dev/null 2>&1; then",
        f"  for gradus_file in {' '.join(_MODULE_SETUP)}; do",
        '    if [ -r "$gradus_file" ]; then . "$gradus_file" && type module >/dev/null 2>&1 && break; fi',
        "  done",
        "fi",
    ]


def _module_lines(environment: Environment) -> list[str]:
    lines = [
        'type module >/dev/null 2>&1 || gradus_fail "environment.modules: there is no module command here"',
        "gradus_module() {",
        '  module load "$1" || gradus_fail "the module $1 could not be loaded; see above, and: module spider ${1%%/*}"',
        # Before its version 4, the Tcl program that is not Lmod called every load a success.
        '  [ -n "${LMOD_CMD:-}${MODULES_CMD:-}" ] || case ":${LOADEDMODULES:-}" in *":${1%%/*}"*) ;;',
        '    *) gradus_fail "the module $1 could not be loaded; see above" ;; esac',
        "}",
        'module purge || gradus_fail "module purge failed"',
    ]
    for folder in environment.module_use:
        path = shlex.quote(_folder(folder))
        lines.append(f"[ -d {path} ] || gradus_fail environment.module_use: {path} is no folder; module use {path}")
    return lines + [f"gradus_module {shlex.quote(name)}" for name in environment.modules]


def _conda_lines(name: str) -> list[str]:
    program = conda_program()
    known = shlex.quote(program) if program else ""
    wanted = shlex.quote(_folder(name) if _is_folder(name) else name)
    return [
        # `conda init` writes into .bashrc, which a job does not read: what it would have done is done here.
        f"gradus_conda={known or '${CONDA_EXE:-$(command -v conda || command -v mamba || command -v micromamba)}'}",
        '[ -x "$gradus_conda" ] || gradus_fail "environment.conda: neither conda, mamba nor micromamba is here"',
        "case ${gradus_conda##*/} in",
        '  micromamba) eval "$("$gradus_conda" shell hook --shell bash)"; gradus_activate=micromamba ;;',
        '  *) gradus_base=$("$gradus_conda" info --base) && . "$gradus_base/etc/profile.d/conda.sh"; '
        "gradus_activate=conda ;;",
        "esac",
        f'"$gradus_activate" activate {wanted} || gradus_fail environment.conda: {wanted} could not be activated',
        f'[ -x "$CONDA_PREFIX/bin/python" ] || gradus_fail environment.conda: {wanted} has no bin/python',
    ]


def _venv_lines(folder: str) -> list[str]:
    python = shlex.quote(f"{folder}/bin/python")
    return [
        f"[ -x {python} ] || gradus_fail environment.venv: there is no {python}",
        f"export VIRTUAL_ENV={shlex.quote(folder)}",
        'export PATH="$VIRTUAL_ENV/bin:$PATH"; unset PYTHONHOME',
    ]


# ---- what is there ----


def conda_program() -> str | None:
    """conda, or what stands in for it, as far as this shell knows."""
    given = os.environ.get("CONDA_EXE") or os.environ.get("MAMBA_EXE")
    if given and os.access(given, os.X_OK):
        return given
    return next((found for name in ("conda", "mamba", "micromamba") if (found := shutil.which(name))), None)


@dataclass(frozen=True)
class Interpreter:
    """What an interpreter says of itself."""

    executable: str
    version: str
    prefix: str
    base_prefix: str
    path: tuple[str, ...]
    packages: str  # the folder that packages are installed to
    torch: str | None
    gradus: str | None  # the folder that it imports gradus from


_ASK = """
import importlib.util, json, sys, sysconfig
from importlib import metadata
def version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None
spec = importlib.util.find_spec("gradus")
print(json.dumps({"executable": sys.executable, "version": "%d.%d.%d" % sys.version_info[:3], "prefix": sys.prefix,
    "base_prefix": sys.base_prefix, "path": [p for p in sys.path if p],
    "packages": sysconfig.get_path("purelib"), "torch": version("torch"),
    "gradus": spec.submodule_search_locations[0] if spec else None}))
"""


@functools.cache
def interpreter(python: str) -> Interpreter:
    """Ask an interpreter what it is. It is started as a job would start it: not in this folder."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASKING_SECONDS, cwd="/")
    except OSError as error:
        raise _no_interpreter(python, str(error)) from None
    if done.returncode:
        raise _no_interpreter(python, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    return Interpreter(**{**found, "path": tuple(found["path"])})


def _no_interpreter(python: str, why: str) -> InputError:
    return InputError(
        f"environment: {python} does not start: {why}",
        hint="name an environment with an interpreter that runs on the nodes",
        field="environment",
        found=python,
    )


def interpreter_of(environment: Environment) -> Interpreter | None:
    """The job's interpreter, if it can be known here: not where a module or conda's own search decides."""
    if environment.venv:
        return interpreter(f"{_folder(environment.venv)}/bin/python")
    if environment.conda:
        prefix = conda_prefix(environment.conda)
        return interpreter(f"{prefix}/bin/python") if prefix else None
    return interpreter(sys.executable)


def conda_prefix(name: str) -> str | None:
    """The folder of a conda environment, if conda is here to be asked."""
    if _is_folder(name):
        return _folder(name)
    program = conda_program()
    if program is None:
        return None
    done = subprocess.run([program, "env", "list", "--json"], capture_output=True, text=True, timeout=_ASKING_SECONDS)
    prefixes: list[str] = json.loads(done.stdout).get("envs", []) if done.returncode == 0 else []
    return next((prefix for prefix in prefixes if Path(prefix).name == name), prefixes[0] if name == "base" else None)


def check_environment(environment: Environment) -> None:
    """Refuse what is not there, before anything is submitted."""
    for folder in environment.module_use:
        if not os.path.isdir(_folder(folder)):
            raise InputError(
                f"environment.module_use: {folder}: no such folder", field="environment.module_use", found=folder
            )
    if environment.conda and _is_folder(environment.conda) and not os.path.isdir(_folder(environment.conda)):
        raise InputError(
            f"environment.conda: {environment.conda}: no such folder",
            field="environment.conda",
            found=environment.conda,
        )
    if environment.conda and not environment.modules and not _is_folder(environment.conda):
        _check_conda_name(environment.conda)
    found = interpreter_of(environment)
    if found is not None and found.gradus is None:
        raise InputError(
            f"environment: {found.executable} has no gradus: a job could not start it",
            hint=f"{found.executable} -m pip install gradus",
            field="environment",
            found=found.executable,
        )


def _check_conda_name(name: str) -> None:
    if conda_program() is None:
        raise InputError(
            f"environment.conda: {name}: neither conda, mamba nor micromamba is on this machine",
            hint="give the environment's folder, or the module that brings conda (environment.modules)",
            field="environment.conda",
            found=name,
        )
    if conda_prefix(name) is None:
        raise InputError(
            f"environment.conda: there is no environment {name!r}",
            hint="conda env list",
            field="environment.conda",
            found=name,
        )


def interpreter_folders(environment: Environment) -> list[Path]:
    """The folders that the job's interpreter lives in: all that it needs in a container."""
    found = interpreter_of(environment)
    if found is None or found.base_prefix in ("/usr", "/usr/local"):
        where = found.executable if found else "it"
        raise InputError(
            f"container.python: environment: {where} is the system's own, which cannot be bound over the image's",
            hint="use an environment with an interpreter of its own (conda, uv, pyenv), or the image's Python",
            field="container.python",
            found="environment",
        )
    own = [found.prefix, found.base_prefix, os.path.dirname(os.path.realpath(found.executable))]
    return [Path(folder) for folder in (*own, *found.path) if os.path.isdir(folder)]


def _is_folder(name: str) -> bool:
    return name.startswith(("/", "~", "."))


def _folder(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
