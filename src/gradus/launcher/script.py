"""Script: a user's own program that expects torchrun's environment, as it was typed after `--`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal

from gradus.record import strict_json
from gradus.record.environment import mask_secrets
from gradus.record.variables import ARGUMENTS
from gradus.schema.errors import DoNotRestart, InputError, nearest

COMMAND_FILE = "command.json"
_FIELD = "-- SCRIPT"
_ALLOWED = "script.py, -m package.module, or an executable file"
_LAUNCHERS = ("python", "python3", "torchrun", "accelerate", "srun", "mpirun", "deepspeed")


@dataclass(frozen=True)
class Script:
    """What each rank runs: a Python file, a module, or an executable, with its arguments, in a directory."""

    kind: Literal["file", "module", "executable"]
    target: str  # as it was typed
    arguments: tuple[str, ...]
    directory: Path
    ranks: int = 1
    secrets_left_out: bool = False  # of a script that was loaded: its arguments are not all there

    @property
    def name(self) -> str:
        """The name of its runs."""
        if self.kind == "module":
            stem = self.target.removesuffix(".__main__").rpartition(".")[2]
        else:
            stem = Path(self.target).stem
        return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip("._-") or "script"

    @property
    def text(self) -> str:
        """As it is typed, without what looks like a secret."""
        return shlex.join(mask_secrets([*(["-m"] if self.kind == "module" else []), self.target, *self.arguments]))

    @property
    def torchrun_arguments(self) -> list[str]:
        """The end of torchrun's command line."""
        if self.kind == "executable":
            return ["--no-python", os.path.abspath(self.directory / self.target), *self.arguments]
        return [*(["--module"] if self.kind == "module" else []), self.target, *self.arguments]

    @property
    def command(self) -> list[str]:
        """What a rank runs, without anybody's help."""
        if self.kind == "executable":
            return [os.path.abspath(self.directory / self.target), *self.arguments]
        return [sys.executable, "-u", *(["-m"] if self.kind == "module" else []), self.target, *self.arguments]

    @property
    def unrecorded(self) -> dict[str, str]:
        """What processes on other nodes need in their environment to know the arguments that no file has."""
        is_all_recorded = mask_secrets(self.arguments) == list(self.arguments)
        return {} if is_all_recorded else {ARGUMENTS: json.dumps(self.arguments)}

    def to_json(self) -> str:
        masked = mask_secrets(self.arguments)
        document = {
            "kind": self.kind,
            "target": self.target,
            "arguments": masked,
            "directory": str(self.directory),
            "ranks": self.ranks,
            "secrets_left_out": masked != list(self.arguments),
        }
        return strict_json.pretty(document)

    @classmethod
    def load(cls, path: Path) -> Script:
        document = strict_json.decode(path.read_bytes())
        known: dict[str, Any] = {**document, "arguments": tuple(document["arguments"])}
        return cls(**{**known, "directory": Path(document["directory"])})

    @classmethod
    def of_job(cls, path: Path) -> Script:
        """As a process of a job has it: from its file, and from its environment what is not recorded."""
        script = cls.load(path)
        if not script.secrets_left_out:
            return script
        if ARGUMENTS not in os.environ:
            raise DoNotRestart(
                f"the command has arguments that look like secrets: {script.text}. No file has those, and the job's "
                "environment, in which they are handed on, has not come along",
                hint="leave out scheduler.export, or add ALL to it; or have the script read them from a file",
            )
        return replace(script, arguments=tuple(json.loads(os.environ[ARGUMENTS])), secrets_left_out=False)


def script_from(command: Sequence[str], directory: Path | None = None) -> Script:
    """The script that a command line stands for, or an error that says what to type instead."""
    directory = directory or Path.cwd()
    if not command:
        raise _refusal("nothing follows it", "nothing", "gradus train --nproc 2 -- script.py")
    first, *rest = command
    if first in ("-m", "--module"):
        if not rest:
            raise _refusal("-m needs the name of a module", "-m", "gradus train --nproc 2 -- -m package.module")
        _check_module(rest[0], directory)
        return Script("module", rest[0], tuple(rest[1:]), directory)
    _check_no_launcher(first, rest, directory)
    path = directory / first
    if not path.is_file():
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, names)
        what = "a folder" if path.is_dir() else "no such file"
        raise _refusal(
            f"{first}: {what}" + (f"; did you mean {close}?" if close else ""),
            first,
            "options of gradus itself go before the --" if first.startswith("-") else None,
            nearest=close,
        )
    if path.suffix == ".py":
        return Script("file", first, tuple(rest), directory)
    if path.suffix in (".yaml", ".yml"):
        raise _refusal(f"{first} is a recipe and no script", first, f"gradus train {first}")
    if not os.access(path, os.X_OK):
        raise _refusal(f"{first} is neither a Python file nor executable", first, f"chmod +x {shlex.quote(first)}")
    return Script("executable", first, tuple(rest), directory)


def script_of_this_process(ranks: int) -> Script | None:
    """The script that Python was started with, if it is one that can be started again: not somebody who types."""
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules or not os.path.isfile(sys.argv[0]):
        return None
    first, *rest = sys.argv
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    command = ["-m", spec.name, *rest] if spec is not None else [first, *rest]
    try:
        return with_ranks(script_from(command), ranks)
    except InputError:  # neither a Python file nor executable, or a module that was found in some other way
        return None


def with_ranks(script: Script, ranks: int) -> Script:
    return replace(script, ranks=ranks)


def _refusal(message: str, found: str, hint: str | None, **details: Any) -> InputError:
    return InputError(f"--: {message}", hint=hint, field=_FIELD, found=found, allowed=_ALLOWED, **details)


def _check_no_launcher(first: str, rest: Sequence[str], directory: Path) -> None:
    if Path(first).name not in _LAUNCHERS or (directory / first).is_file():
        return
    script = next((index for index, word in enumerate(rest) if word.endswith(".py") or word == "-m"), None)
    line = shlex.join(rest[script:]) if script is not None else "script.py"
    raise _refusal(f"{first} is not needed: gradus starts the ranks itself", first, f"gradus train -- {line}")


def _check_module(name: str, directory: Path) -> None:
    """Whether a module is there, found without importing anything of it: that would be the script's own code."""
    parts = name.split(".")
    with _importing_from(directory):
        try:
            spec = importlib.util.find_spec(parts[0])
        except (ImportError, ValueError):
            spec = None
        for depth in range(1, len(parts) + 1):
            module = ".".join(parts[:depth])
            if depth > 1:
                assert spec is not None
                within = spec.submodule_search_locations
                # By its last name alone: with the whole one, folders without __init__.py need their parent imported.
                spec = PathFinder.find_spec(parts[depth - 1], list(within)) if within is not None else None
            if spec is None:
                raise _refusal(
                    f"-m {name}: there is no module {module}"
                    + (f" in {directory}, nor installed" if depth == 1 else ""),
                    name,
                    "give the module as Python imports it, without .py" if name.endswith(".py") else None,
                )
        _check_can_run(name, spec)


def _check_can_run(name: str, spec: ModuleSpec | None) -> None:
    within = spec.submodule_search_locations if spec else None
    if within is not None and PathFinder.find_spec("__main__", list(within)) is None:
        raise _refusal(f"-m {name}: the package has no __main__.py", name, f"name a module in it: -m {name}.MODULE")


@contextmanager
def _importing_from(directory: Path) -> Iterator[None]:
    """As `python -m` finds modules: the current directory comes first."""
    before = list(sys.path)
    sys.path.insert(0, str(directory))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before
