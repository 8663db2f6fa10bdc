"""Loaders: what a script asks of torch's DataLoader, with the line that does."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from gradus.diagnosis.user_source.files import UserFile
from gradus.diagnosis.user_source.kinds import dotted

_POSITIONS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory")


@dataclass(frozen=True)
class LoaderLine:
    """A call of DataLoader. Settings are as they are written; None where it leaves them to torch."""

    file: str
    line: int
    code: str
    name: str | None  # that it is bound to
    settings: dict[str, str]

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def workers(self) -> int | None:
        """0 where nothing is said; None where it is no plain number."""
        text = self.settings.get("num_workers", "0")
        return int(text) if text.isdecimal() else None

    @property
    def batch_size_text(self) -> str | None:
        size = self.settings.get("batch_size")
        return f"batch_size={size} at {self.place}" if size is not None else None


def loader_lines(files: Sequence[UserFile]) -> list[LoaderLine]:
    found = []
    for file in files:
        try:
            tree = ast.parse(file.text)
        except (SyntaxError, ValueError):
            continue
        names = {
            id(node.value): dotted(node.targets[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        }
        lines = file.text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (dotted(node.func) or "").rpartition(".")[2] == "DataLoader":
                given = dict(zip(_POSITIONS, (ast.unparse(each) for each in node.args), strict=False))
                given |= {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg is not None}
                code = lines[node.lineno - 1].strip()
                found.append(LoaderLine(str(file.path), node.lineno, code, names.get(id(node)), given))
    return found


def training_loader(files: Sequence[UserFile]) -> LoaderLine | None:
    """The one that training reads: the only one, or the one that is named so, or the first that shuffles."""
    found = loader_lines(files)
    named = [one for one in found if "train" in (one.name or "")]
    shuffled = [one for one in found if one.settings.get("shuffle") == "True" or "sampler" in one.settings]
    return next(iter([*named, *shuffled, *found]), None)
