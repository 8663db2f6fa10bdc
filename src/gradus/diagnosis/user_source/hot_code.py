"""Hot code: the loops and functions of a file that run at every step, found in its text.

A loop is hot if it is the innermost around a backward pass or an optimizer step. What it calls, it runs as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradus.diagnosis.user_source.kinds import dotted

Loop = ast.For | ast.AsyncFor | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef
_STEPS = re.compile(r"opt|scaler|engine|^run$|\.run$", re.IGNORECASE)
_NOT_A_STEP = re.compile(r"sched|lr", re.IGNORECASE)
_MODULE = re.compile(r"(^|\.)(Module|LightningModule|PreTrainedModel)$")
_HOOK = re.compile(r"(^|\.)Hook$")
_MAKES_MODULE = re.compile(
    r"(^|\.)(DistributedDataParallel|DDP|FullyShardedDataParallel|FSDP|DataParallel|Sequential|compile|fully_shard)$"
)


@dataclass(frozen=True)
class HotCode:
    """Statements that run at every step."""

    body: Sequence[ast.stmt]
    loop: Loop | None  # None: a function that whoever drives the steps calls
    function: Function | None  # whose body it is, or is in


class SourceFile:
    """A parsed file, with its functions by name."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.functions: dict[str, Function] = {}
        self.forwards: list[Function] = []
        self.hook_steps: list[Function] = []
        self._methods: dict[str, dict[str, Function]] = {}  # by class
        self._around: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self._around[child] = node
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self.functions.setdefault(node.name, node)
            if isinstance(node, ast.ClassDef):
                self._note_class(node)
        self.optimizers = {
            name
            for name, call in self._made()
            if (".optim." in f".{call}." and ".lr_scheduler." not in f".{call}.") or call.endswith("Run.start")
        }
        self._objects = {name: call for name, call in self._made() if call in self._methods}
        self.models = frozenset(name for name, call in self._made() if self._makes_module(call))
        self._stepping: set[str] = set()
        self._find_functions_that_step()

    def _note_class(self, node: ast.ClassDef) -> None:
        bases = [name for base in node.bases if (name := dotted(base)) is not None]
        methods = [each for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self._methods[node.name] = {each.name: each for each in methods}
        if any(_MODULE.search(base) for base in bases):
            self.forwards += [each for each in methods if each.name in ("forward", "training_step")]
        if any(_HOOK.search(base) for base in bases):
            self.hook_steps += [each for each in methods if each.name == "on_step"]

    def _made(self) -> Iterator[tuple[str, str]]:
        """Names with the call that made them."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                call = dotted(node.value.func)
                for target in node.targets:
                    for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                        if call is not None and (name := dotted(each)) is not None:
                            yield name, call

    def _makes_module(self, call: str) -> bool:
        if call.startswith(("nn.", "torch.nn.")) and ".functional" not in call and ".utils." not in call:
            return True
        return bool(_MAKES_MODULE.search(call)) or call.endswith(".prepare")

    def around(self, node: ast.AST) -> Function | None:
        """The function that a node is in."""
        at: ast.AST | None = self._around.get(node)
        while at is not None and not isinstance(at, (ast.FunctionDef, ast.AsyncFunctionDef)):
            at = self._around.get(at)
        return at

    def hot_loops(self) -> list[HotCode]:
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.For, ast.AsyncFor, ast.While)):
                own = _without_inner_loops(node.body)
                if any(isinstance(each, ast.Call) and self.is_step(each) for each in own):
                    found.append(HotCode(node.body, node, self.around(node)))
        return found

    def is_step(self, call: ast.Call) -> bool:
        """Whether a call makes a backward pass or an optimizer step, be it through a function of this file."""
        if isinstance(call.func, ast.Attribute):
            if call.func.attr == "backward":
                return True
            owner = dotted(call.func.value) or ""
            if call.func.attr == "step" and (owner in self.optimizers or _steps_by_name(owner)):
                return True
        called = self.called(call)
        return called is not None and called.name in self._stepping

    def called(self, call: ast.Call) -> Function | None:
        """The function of this file that a call calls: by its name, or as a method of an object made in it."""
        name = dotted(call.func)
        if name is None:
            return None
        first, _, last = name.rpartition(".")
        if first in self._objects:
            return self._methods[self._objects[first]].get(last)
        return self.functions.get(last) if first in ("", "self", "cls") else None

    def _find_functions_that_step(self) -> None:
        """Outside of loops of their own: then the loop that calls them is the hot one."""
        while True:
            more = {
                name
                for name, function in self.functions.items()
                if name not in self._stepping
                and any(isinstance(n, ast.Call) and self.is_step(n) for n in _without_inner_loops(function.body))
            }
            if not more:
                return
            self._stepping |= more


def _steps_by_name(owner: str) -> bool:
    return _STEPS.search(owner) is not None and _NOT_A_STEP.search(owner) is None


def _without_inner_loops(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """All nodes that run when the statements do, but none of loops and functions inside them."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.For, ast.AsyncFor, ast.While, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield node
        waiting += list(ast.iter_child_nodes(node))


def imported_names(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """By the name that a file knows it by: the module that it is from, and its name there."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
    return found
