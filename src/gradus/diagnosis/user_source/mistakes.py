"""Mistakes of training loops that the text shows for sure: gradients that add up, samples that never change order."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gradus.diagnosis.user_source.files import UserFile
from gradus.diagnosis.user_source.hot_code import SourceFile
from gradus.diagnosis.user_source.kinds import dotted

_ZEROED = re.compile(
    r"zero_grad|\.grad\s*=|set_to_none|autograd\.grad|\.grad\.zero_|functional_call|deepspeed|accelerate"
)
_LOCAL = re.compile(r"local_rank", re.IGNORECASE)


@dataclass(frozen=True)
class Mistake:
    id: str
    file: str
    line: int
    code: str


def gradients_that_add_up(files: Sequence[UserFile]) -> Mistake | None:
    """The optimizer step of a loop in files that nowhere set gradients back."""
    if any(_ZEROED.search(file.text) for file in files):
        return None
    for file in files:
        source = _parsed(file)
        for hot in source.hot_loops() if source is not None else ():
            calls = [node for part in hot.body for node in ast.walk(part) if isinstance(node, ast.Call)]
            names = [dotted(call.func) or "" for call in calls]
            backward = any(isinstance(call.func, ast.Attribute) and call.func.attr == "backward" for call in calls)
            step = next((at for at, name in enumerate(names) if name.endswith(".step") and "opt" in name.lower()), None)
            if backward and step is not None:
                return _at("gradients-add-up", file, calls[step])
    return None


def order_that_never_changes(files: Sequence[UserFile]) -> Mistake | None:
    """A DistributedSampler that shuffles, read for several epochs, and never told which one it is."""
    if any("set_epoch" in file.text for file in files):
        return None
    for file in files:
        source = _parsed(file)
        if source is None or not _has_epochs(source):
            continue
        for call in _samplers(source.tree):
            if not any(word.arg == "shuffle" and ast.unparse(word.value) == "False" for word in call.keywords):
                return _at("sampler-without-epoch", file, call)
    return None


def rank_within_the_node(files: Sequence[UserFile]) -> Mistake | None:
    """A DistributedSampler that is given LOCAL_RANK: on several nodes, part of the data is never read."""
    for file in files:
        source = _parsed(file)
        for call in _samplers(source.tree) if source is not None else ():
            given = [*call.args[2:3], *(word.value for word in call.keywords if word.arg == "rank")]
            if any(_LOCAL.search(ast.unparse(value)) for value in given):
                return _at("sampler-local-rank", file, call)
    return None


def _parsed(file: UserFile) -> SourceFile | None:
    try:
        return SourceFile(ast.parse(file.text))
    except (SyntaxError, ValueError):
        return None


def _samplers(tree: ast.Module) -> list[ast.Call]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if (dotted(call.func) or "").rpartition(".")[2] == "DistributedSampler"]


def _has_epochs(source: SourceFile) -> bool:
    """Whether a loop that runs more than once is around the loop that trains."""
    for hot in source.hot_loops():
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.For) or node is hot.loop or not any(n is hot.loop for n in ast.walk(node)):
                continue
            if ast.unparse(node.iter) not in ("range(1)", "range(0, 1)"):
                return True
    return False


def _at(name: str, file: UserFile, node: ast.Call) -> Mistake:
    return Mistake(name, str(file.path), node.lineno, file.text.splitlines()[node.lineno - 1].strip())
