"""Source lines: where in the user's files a trace's Python frame asks for a synchronisation.

A trace has for each frame the file and the line where its function begins, and not the line that is being run. So the
function is looked up in its source, and the calls in it that could be meant are counted off.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from gradus.schema.user_code import OUR_FOLDER

_FRAME = re.compile(r"^(?P<file>.+)\((?P<line>\d+)\): (?P<function>.+)$")
_LIBRARIES = frozenset(
    (
        "torch",
        "torchvision",
        "torchaudio",
        "torchao",
        "triton",
        "numpy",
        "scipy",
        "pandas",
        "sklearn",
        "PIL",
        "tqdm",
        "rich",
        "click",
        "typer",
        "yaml",
        "pydantic",
        "gradus",
        "transformers",
        "accelerate",
        "datasets",
        "tokenizers",
        "safetensors",
        "diffusers",
        "peft",
        "timm",
        "lightning",
        "pytorch_lightning",
        "lightning_fabric",
        "deepspeed",
        "apex",
        "flash_attn",
        "webdataset",
        "wandb",
        "mlflow",
        "tensorboard",
        "pytest",
        "_pytest",
        "pluggy",
    )
)
_INSTALLED = re.compile(r"(?:^|/)(?:site-packages|dist-packages|lib/python3[^/]*)/|^<")
# What reads a value of a tensor without a method of its, which a trace would name: by torch's operator.
_CALLS = {
    "aten::item": ("float", "int", "bool", "complex", "round"),
    "aten::_local_scalar_dense": ("float", "int", "bool"),
    "aten::is_nonzero": ("bool",),
}


@dataclass(frozen=True)
class Frame:
    """A Python function in a trace."""

    file: str
    line: int  # where it begins
    function: str


def frame_of(name: str) -> Frame | None:
    """From the name of an event; None for what is no function in a file."""
    match = _FRAME.match(name)
    return Frame(match["file"], int(match["line"]), match["function"]) if match else None


class Sources:
    """The user's files, found again from the names in a trace: torch cuts off what is on Python's path."""

    def __init__(self, paths: Sequence[str] = ()) -> None:
        self._paths = tuple(path or "." for path in paths)
        self._found: dict[str, Path | None] = {}

    def found(self, file: str) -> Path | None:
        if file not in self._found:
            self._found[file] = self._find(file)
        return self._found[file]

    def _find(self, file: str) -> Path | None:
        if Path(file).is_absolute():
            return Path(file) if Path(file).is_file() else None
        for folder in (*self._paths, "."):
            candidate = Path(folder) / file
            if candidate.is_file():
                return candidate
        return None

    def is_users(self, file: str) -> bool:
        """Whether it is neither torch nor any other library, as far as can be told."""
        first = Path(file).parts[0] if Path(file).parts else file
        if file.startswith("<") or first.removesuffix(".py") in sys.stdlib_module_names or first in _LIBRARIES:
            return False
        if _INSTALLED.search(file) or file.startswith(OUR_FOLDER):
            return False
        if self._paths and (place := self.found(file)) is not None:
            return not _INSTALLED.search(str(place))
        return True

    def line(self, frame: Frame, operator: str, method: str | None, nth: int, of: int) -> int:
        """The line of the nth of so many such calls that the function made while it ran once."""
        lines = self.lines(frame, operator, method)
        if not lines:
            return frame.line
        return lines[nth] if of == len(lines) else lines[0] if len(lines) == 1 else lines[min(nth, len(lines) - 1)]

    def lines(self, frame: Frame, operator: str, method: str | None) -> list[int]:
        """All lines of the function that may be meant, in order."""
        path = self.found(frame.file)
        if path is None:
            return []
        wanted = (method,) if method is not None else _CALLS.get(operator, ())
        tests = method is None and operator == "aten::is_nonzero"
        return sorted(_lines(str(path), frame.line, frame.function, wanted, tests))


@lru_cache(maxsize=512)
def _lines(path: str, first_line: int, function: str, calls: tuple[str, ...], tests: bool) -> tuple[int, ...]:
    try:
        tree = ast.parse(Path(path).read_text())
    except (OSError, SyntaxError, ValueError):
        return ()
    body = _function(tree, first_line, function)
    if body is None:
        return ()
    return tuple(node.lineno for node in _own_nodes(body) if _is_meant(node, calls, tests))


def _function(tree: ast.Module, first_line: int, function: str) -> ast.AST | None:
    if function == "<module>":
        return tree
    named = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in named:  # with decorators, Python counts from the first of them
        begins = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if node.name == function and begins <= first_line <= (node.end_lineno or node.lineno):
            return node
    return None


def _own_nodes(body: ast.AST) -> Iterator[ast.expr]:
    """Expressions of a function, without those of functions inside it, which have frames of their own."""
    for child in ast.iter_child_nodes(body):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.If | ast.While | ast.Assert):
            pass  # their tests come as expressions
        yield from _own_nodes(child)


def _is_meant(node: ast.expr, calls: tuple[str, ...], tests: bool) -> bool:
    if isinstance(node, ast.Call):
        target = node.func
        name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else None
        return name in calls
    return tests and isinstance(node, ast.Compare)
