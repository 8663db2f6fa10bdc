"""The user's own files that a run ran: its script with what lies beside it, or the files that its recipe names."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gradus.diagnosis.evidence import Evidence
from gradus.launcher.script import Script
from gradus.schema.callables import is_import_path
from gradus.schema.recipe import Recipe
from gradus.schema.user_code import OUR_FOLDER

_MOST_FILES = 40  # of a script: what it imports from its own folder
_LARGEST_BYTES = 2_000_000


@dataclass(frozen=True)
class UserFile:
    path: Path
    text: str
    functions: tuple[str, ...] | None  # that a recipe names, of those that run at every step; None: a script
    changed_since: bool  # written after the attempt began: lines may have moved

    @property
    def note(self) -> tuple[str, ...]:
        """What a reader of a line number should know."""
        moved = f"{self.path} was changed after the run began: line numbers are of the file as it is now"
        return (moved,) if self.changed_since else ()


def user_files(evidence: Evidence) -> list[UserFile]:
    """As they are now: a run keeps the changes that git knows, and no copy of the files."""
    began = _began(evidence)
    if evidence.script is not None:
        return [file for path in _of_script(evidence.script) if (file := _read(path, None, began)) is not None]
    found = [] if evidence.recipe is None else list(_of_recipe(evidence.recipe))
    files = [file for path, names in found if (file := _read(path, names, began)) is not None]
    typed = _typed(evidence)
    if not files and typed is not None:
        return [file for path in _with_neighbours(typed) if (file := _read(path, None, began)) is not None]
    return files


def _began(evidence: Evidence) -> float | None:
    """When the attempt was made, in seconds since 1970: its description is written then and never again."""
    folder = evidence.attempt_path
    for name in ("environment.json", "command.json", "recipe.yaml"):
        if folder is not None and (folder / name).is_file():
            return (folder / name).stat().st_mtime
    return None


def _of_script(script: Script) -> list[Path]:
    if script.kind == "executable":
        return []
    if script.kind == "module":
        base = script.directory / Path(*script.target.split("."))
        path = next((each for each in (base.with_suffix(".py"), base / "__main__.py") if each.is_file()), None)
    else:
        path = script.directory / script.target
    return _with_neighbours(path) if path is not None and path.is_file() else []


def _typed(evidence: Evidence) -> Path | None:
    """The script of an own loop that nobody launched: what Python was started with."""
    command = evidence.environment.get("command") or []
    first = Path(str(command[0])) if command else None
    if first is None or first.suffix != ".py" or not first.is_file() or _is_ours(first):
        return None
    return first.absolute()


def _is_ours(path: Path) -> bool:
    return os.path.abspath(path).startswith(OUR_FOLDER)


def _with_neighbours(path: Path) -> list[Path]:
    """A script, and the modules beside it that it imports."""
    found: list[Path] = []
    waiting = [path]
    while waiting and len(found) < _MOST_FILES:
        at = waiting.pop(0)
        if at in found:
            continue
        found.append(at)
        waiting += [each for each in _imported(at, path.parent) if each not in found]
    return found


def _imported(path: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(path.read_text(errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        else:
            continue
        base = path.parent if isinstance(node, ast.ImportFrom) and node.level else folder
        for name in names:
            place = base / Path(*name.split(".")) if name else base
            for each in (place.with_suffix(".py"), place / "__init__.py"):
                if name and each.is_file():
                    yield each


def _of_recipe(recipe: Recipe) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The files that the recipe names for what runs at every step, each with those functions. Not data: it is loaded
    on the host. Not metrics: they are for evaluations."""
    named: dict[Path, list[str]] = {}
    for block in (recipe.model, recipe.loss, *recipe.hooks):
        if block is None or not is_import_path(block.use):
            continue
        file, _, name = block.use.rpartition(":")
        if file.endswith(".py"):
            own = [name.rpartition(".")[2]] if block is recipe.loss else []
            named.setdefault(Path(file), []).extend(own)
    for path, names in named.items():
        yield path, tuple(names)


def _read(path: Path, functions: tuple[str, ...] | None, began: float | None) -> UserFile | None:
    try:
        stat = path.stat()
        if stat.st_size > _LARGEST_BYTES:
            return None
        text = path.read_text(errors="replace")
    except OSError:
        return None
    return UserFile(path, text, functions, began is not None and stat.st_mtime > began + 1.0)
