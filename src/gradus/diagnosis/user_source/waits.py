"""Waits: places in the user's own code that make the host wait for the device at every step."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gradus.diagnosis.user_source.guards import constants_of, ends_the_loop, is_rare, skips_the_rest
from gradus.diagnosis.user_source.hot_code import Function, HotCode, SourceFile, imported_names
from gradus.diagnosis.user_source.kinds import Kind, Values, dotted, is_cpu

_NUMBERS = {"float": "float()", "int": "int()", "bool": "bool()"}
_READ_BY = ("math.", "np.", "numpy.")  # to which a tensor is a number, or an array of the host
_SHOWS = frozenset({"print", "str", "repr", "format"})
_LOGS = frozenset({"add_scalar", "add_scalars", "set_postfix", "set_postfix_str", "log_metric", "log_metrics"})
_LOGGERS = frozenset({"logging", "logger", "log", "wandb", "mlflow", "tqdm"})
_DEVICE_WAITS = {
    "torch.cuda.synchronize": "torch.cuda.synchronize() waits for all that the device was given",
    "torch.cuda.empty_cache": "torch.cuda.empty_cache() waits for the device, and makes the allocator start anew",
    "dist.barrier": "a barrier waits for all ranks",
    "torch.distributed.barrier": "a barrier waits for all ranks",
}
_BATCHES_ON_DEVICE = ("run.batches", ".batches")


@dataclass(frozen=True)
class Wait:
    """A line that waits, and why."""

    file: str
    line: int
    code: str
    why: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def waits_in(
    path: Path,
    text: str,
    *,
    functions: Sequence[str] | None = None,
    arguments: Iterable[str] = (),
    beside: Mapping[Path, str] | None = None,
) -> list[Wait]:
    """The waits in the loops of a script; or, with `functions`, in those that a recipe names and in forward passes.

    `arguments` are those that the script was started with; `beside` are texts of files that it may import from. Nothing
    is told of a file that is no Python: that it cannot run is somebody else's to say.
    """
    source = _parsed(path, text)
    if source is None:
        return []
    words = frozenset(part for word in arguments for part in (word, *word.split("=", 1)))
    look = _Look(source, path, text.splitlines(), words, beside or {})
    hot = source.hot_loops() if functions is None else []
    for code in hot:
        look.at_loop(code)
    if functions is not None or hot:
        named = [source.functions[name] for name in functions or () if name in source.functions]
        for function in [*source.forwards, *named, *(source.hook_steps if functions is not None else ())]:
            look.at_function(function, {})
    return sorted(look.found.values(), key=lambda wait: (wait.file != str(path), wait.line))


def _parsed(path: Path, text: str) -> SourceFile | None:
    try:
        return SourceFile(ast.parse(text, str(path)))
    except (SyntaxError, ValueError):
        return None


def _given(call: ast.Call, function: Function, values: Values) -> dict[str, Kind | None]:
    """What a call gives to each name that the function has for it."""
    names = [each.arg for each in function.args.args if each.arg not in ("self", "cls")]
    kinds = dict(zip(names, (values.kind(each) for each in call.args), strict=False))
    kinds |= {word.arg: values.kind(word.value) for word in call.keywords if word.arg is not None}
    return {each: kinds.get(each) for each in names}


class _Look:
    def __init__(
        self, source: SourceFile, path: Path, lines: list[str], arguments: frozenset[str], beside: Mapping[Path, str]
    ) -> None:
        self._source, self._path, self._file, self._lines = source, path, str(path), lines
        self._arguments, self._beside = arguments, beside
        self._imported = imported_names(source.tree)
        self._elsewhere: dict[Path, _Look | None] = {}
        self._constants = constants_of(source.tree)
        self._looked_at: set[ast.AST] = set()
        self._returned: dict[str, Kind | None] = {}
        self._inside: list[str] = []  # names of the functions that are looked at
        self.found: dict[tuple[str, int], Wait] = {}

    def at_loop(self, code: HotCode) -> None:
        if code.loop in self._looked_at:
            return
        values = Values(self._losses(code.body), self._source.models, self._returned)
        if isinstance(code.loop, (ast.For, ast.AsyncFor)):
            values.learn(code.loop.target, self._of_batches(code.loop.iter))
        elif isinstance(code.loop, ast.While):
            self._expression(code.loop.test, values, truth=True)
        self._statements(code.body, values)

    def at_function(self, function: Function, given: dict[str, Kind | None]) -> None:
        if function in self._looked_at:
            return
        self._looked_at.add(function)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        known: dict[str, Kind | None] = {name: given.get(name, "maybe") for name in names if name != "self"}
        known |= self._losses(function.body)
        self._inside.append(function.name)
        self._statements(function.body, Values(known, self._source.models, self._returned))
        self._inside.pop()

    def _losses(self, body: Iterable[ast.stmt]) -> dict[str, Kind | None]:
        """What has a backward pass is a tensor of the device, wherever it was made."""
        found: dict[str, Kind | None] = {}
        for node in (each for statement in body for each in ast.walk(statement)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = dotted(node.func.value)
                if node.func.attr == "backward" and owner is not None and not node.args:
                    found[owner] = "device"
                if node.func.attr in ("backward", "scale") or (node.func.attr == "step" and owner == "run"):
                    found |= {given.id: "device" for given in node.args if isinstance(given, ast.Name)}
        return found

    def _of_batches(self, iterated: ast.expr) -> Kind | None:
        while isinstance(iterated, ast.Call) and dotted(iterated.func) in ("enumerate", "tqdm", "tqdm.tqdm", "zip"):
            if not iterated.args:
                return None
            iterated = iterated.args[0]
        call = dotted(iterated.func) if isinstance(iterated, ast.Call) else None
        if call is not None and call.endswith(_BATCHES_ON_DEVICE):
            return "maybe"
        text = ast.unparse(iterated)
        prepared = any(word in ast.unparse(self._source.tree) for word in (".prepare(", ".setup_dataloaders("))
        return "maybe" if prepared and "range(" not in text else "host"

    # -- statements ----------------------------------------------------------------------------------------------------

    def _statements(self, body: Iterable[ast.stmt], values: Values) -> None:
        for statement in body:
            self._statement(statement, values)
            if skips_the_rest(statement, self._constants):
                return

    def _statement(self, node: ast.stmt, values: Values) -> None:
        if isinstance(node, (ast.If, ast.While)):
            self._expression(node.test, values, truth=True)
            often = isinstance(node, ast.While) or not ends_the_loop(node, in_function=bool(self._inside))
            if often and (isinstance(node, ast.While) or not self._rare(node.test, values)):
                self._statements(node.body, values)
            self._statements(node.orelse, values)
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._looked_at.add(node)
            self._expression(node.iter, values)
            values.learn(node.target, values.kind(node.iter))
            self._statements([*node.body, *node.orelse], values)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._expression(item.context_expr, values)
            self._statements(node.body, values)
        elif isinstance(node, ast.Try):
            self._statements([*node.body, *node.orelse, *node.finalbody], values)
        elif isinstance(node, ast.Assert):
            self._expression(node.test, values, truth=True)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Match)):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.expr):
                    self._expression(child, values)
            values.assign(node)
            if isinstance(node, ast.Return) and self._inside and node.value is not None:
                self._returned[self._inside[-1]] = values.kind(node.value)

    def _rare(self, test: ast.expr, values: Values) -> bool:
        return values.kind(test) == "device" or is_rare(test, self._constants, self._arguments)

    # -- expressions ---------------------------------------------------------------------------------------------------

    def _expression(self, node: ast.expr, values: Values, *, truth: bool = False) -> None:
        """`truth`: whether something is decided by it."""
        if isinstance(node, (ast.Lambda, ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)):
            if not isinstance(node, ast.Lambda):
                for child in ast.walk(node):
                    if isinstance(child, ast.Call):
                        self._call(child, values)
            return
        if isinstance(node, ast.BoolOp):
            for value in node.values:
                self._expression(value, values, truth=truth)
                if isinstance(node.op, ast.And) and self._rare(value, values):
                    return
            return
        if isinstance(node, ast.IfExp):
            self._expression(node.test, values, truth=True)
            self._expression(node.orelse, values)
            if not self._rare(node.test, values):
                self._expression(node.body, values)
            return
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._expression(node.operand, values, truth=True)
            return
        if truth and values.kind(node) == "device":
            self._note(node, "the host decides by a tensor, and has to wait for it")
        if isinstance(node, ast.FormattedValue) and values.kind(node.value) == "device":
            self._note(node, "a tensor is turned into text")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
            self._shown([node.right], values, "a tensor is turned into text")
        if isinstance(node, ast.Call):
            self._call(node, values)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expression(child, values)
            elif isinstance(child, ast.keyword):
                self._expression(child.value, values)

    def _call(self, node: ast.Call, values: Values) -> None:
        name = dotted(node.func)
        if name in _DEVICE_WAITS:
            self._note(node, _DEVICE_WAITS[name])
        elif isinstance(node.func, ast.Attribute):
            self._method(node, node.func, values)
        given = [*node.args, *(word.value for word in node.keywords)]
        if name in _NUMBERS and any(values.kind(each) == "device" for each in node.args):
            self._note(node, f"{_NUMBERS[name]} of a tensor waits for it")
        if name is not None and name.startswith(_READ_BY) and any(values.kind(each) == "device" for each in node.args):
            self._note(node, f"{name}() of a tensor waits for it")
        if self._shows(name, node.func):
            self._shown(given, values, f"{(name or 'it').rpartition('.')[2]}() of a tensor waits for it")
        function = self._source.called(node)
        if function is not None:
            self.at_function(function, _given(node, function, values))
        elif name in self._imported:
            self._in_another_file(node, *self._imported[name], values)

    def _in_another_file(self, node: ast.Call, module: str, name: str, values: Values) -> None:
        """A function that the file imports from one beside it runs as often as its own."""
        place = self._path.parent / Path(*module.split(".")) if module else self._path.parent
        path = next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each in self._beside), None)
        if path is None:
            return
        if path not in self._elsewhere:
            source = _parsed(path, self._beside[path])
            lines = self._beside[path].splitlines()
            self._elsewhere[path] = _Look(source, path, lines, self._arguments, {}) if source is not None else None
        look = self._elsewhere[path]
        function = look._source.functions.get(name) if look is not None else None
        if look is None or function is None:
            return
        look.at_function(function, _given(node, function, values))
        self.found |= look.found

    def _method(self, node: ast.Call, func: ast.Attribute, values: Values) -> None:
        of = values.kind(func.value)
        if func.attr == "item" and not node.args and of != "host":
            self._note(node, ".item() waits until the device has computed the number")
        elif func.attr in ("tolist", "numpy") and of in ("device", "maybe"):
            self._note(node, f".{func.attr}() waits for the device, and copies the tensor")
        elif (func.attr == "cpu" or (func.attr == "to" and is_cpu(node))) and of in ("device", "maybe"):
            self._note(node, ".cpu() waits for the device, and copies the tensor")
        elif func.attr == "synchronize" and (dotted(func.value) or "").endswith(("stream", "event", "cuda")):
            self._note(node, ".synchronize() waits for the device")
        elif func.attr == "format" and isinstance(func.value, ast.Constant):
            self._shown(node.args, values, "a tensor is turned into text")

    def _shows(self, name: str | None, func: ast.expr) -> bool:
        if name is None:
            return isinstance(func, ast.Attribute) and func.attr in _LOGS
        first, _, last = name.rpartition(".")
        return name in _SHOWS or last in _LOGS or (first.rpartition(".")[2] in _LOGGERS and first != "self")

    def _shown(self, given: Iterable[ast.expr], values: Values, why: str) -> None:
        for each in given:
            inside = [each]
            if isinstance(each, ast.Dict):
                inside = [value for value in each.values if value is not None]
            elif isinstance(each, (ast.Tuple, ast.List)):
                inside = list(each.elts)
            if any(values.kind(one) == "device" for one in inside):
                self._note(each, why)

    def _note(self, node: ast.AST, why: str) -> None:
        line = int(getattr(node, "lineno", 0))
        code = self._lines[line - 1].strip() if 0 < line <= len(self._lines) else ""
        self.found.setdefault((self._file, line), Wait(self._file, line, code, why))
