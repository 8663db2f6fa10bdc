"""Kinds: where a value of the user's code is, on the device or on the host, as far as its text tells.

Nothing is run. What cannot be told is `None`, and nobody is blamed for it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Literal

# device: a tensor that a model, a loss or an operation on such made. maybe: a parameter of a forward pass or a loss,
# a tensor as a rule. host: a number, a text, or a tensor that never left the host.
Kind = Literal["device", "maybe", "host"]

_HOST_ATTRIBUTES = frozenset(
    {"shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "itemsize", "nbytes", "training", "layout"}
)
_TENSOR_ATTRIBUTES = frozenset({"data", "grad", "T", "mT", "loss", "logits", "values", "real"})
_TO_HOST = frozenset({"item", "tolist", "numpy", "cpu", "size", "dim", "numel", "stride", "element_size", "get_device"})
_TENSOR_METHODS = frozenset(
    {"abs", "all", "amax", "amin", "any", "argmax", "argmin", "backward", "bool", "clamp", "clone"}
    | {"contiguous", "cos", "cross_entropy", "cumsum", "detach", "div", "double", "eq", "exp", "expand"}
    | {"flatten", "float", "ge", "gt", "half", "int", "isfinite", "isinf", "isnan", "le", "log"}
    | {"log_softmax", "long", "lt", "masked_fill", "matmul", "max", "mean", "median", "min", "mul", "ne"}
    | {"neg", "norm", "permute", "pow", "relu", "requires_grad_", "reshape", "sigmoid", "sin", "softmax"}
    | {"sqrt", "square", "squeeze", "std", "sub", "sum", "t", "tanh", "topk", "transpose", "unsqueeze"}
    | {"var", "view", "view_as"}
)
_HOST_FUNCTIONS = frozenset(
    {"float", "int", "bool", "len", "str", "repr", "isinstance", "range", "round", "hasattr", "type"}
    | {"id", "format", "time", "perf_counter", "get_rank", "get_world_size", "is_initialized"}
    | {"is_available"}
)
_SAME_AS_ARGUMENTS = frozenset({"abs", "sum", "min", "max", "sorted"})
_TORCH_MAKES_ON_HOST = frozenset(
    {"tensor", "rand", "randn", "randint", "zeros", "ones", "full", "empty", "arange", "linspace", "eye"}
    | {"randperm", "from_numpy", "as_tensor"}
)
_TORCH_IS_NO_TENSOR = ("cuda", "distributed", "utils", "backends", "profiler", "amp", "optim", "autograd", "device")
_CALLED_MODELS = ("model", "net", "criterion", "loss_fn", "loss_func", "loss_of", "ddp", "fsdp", "engine")


class Values:
    """What is known of the names of a function, in the order of its statements."""

    def __init__(
        self, known: Mapping[str, Kind | None], models: frozenset[str], returned: Mapping[str, Kind | None]
    ) -> None:
        self._known: dict[str, Kind | None] = dict(known)
        self._models = models  # names of what was made as a module
        self._returned = returned  # by functions of the file

    def learn(self, target: ast.expr, kind: Kind | None) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self.learn(each, kind)
        elif isinstance(target, ast.Starred):
            self.learn(target.value, kind)
        elif (name := dotted(target)) is not None:
            self._known[name] = kind

    def assign(self, statement: ast.stmt) -> None:
        """What an assignment says of its targets."""
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._assign(target, statement.value)
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            self._assign(statement.target, statement.value)
        elif isinstance(statement, ast.AugAssign):
            kinds = {self.kind(statement.target), self.kind(statement.value)}
            self.learn(statement.target, "device" if "device" in kinds else _common(kinds))

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        pairs = isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List))
        if pairs and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
            for one, its in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
                self.learn(one, self.kind(its))
        else:
            self.learn(target, self.kind(value))

    def kind(self, node: ast.expr | None) -> Kind | None:
        if node is None or isinstance(node, (ast.Constant, ast.JoinedStr)):
            return "host"
        if isinstance(node, ast.Name):
            return self._known.get(node.id)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self.kind(node.value)
        if isinstance(node, ast.Compare):
            if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
                return "host"
            return self._together([node.left, *node.comparators])
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.Mod) and isinstance(node.left, (ast.Constant, ast.JoinedStr)):
                return "host"  # text
            return self._together([node.left, node.right])
        if isinstance(node, ast.UnaryOp):
            return "host" if isinstance(node.op, ast.Not) else self.kind(node.operand)
        if isinstance(node, ast.IfExp):
            return self._together([node.body, node.orelse])
        if isinstance(node, ast.NamedExpr):
            return self.kind(node.value)
        return None

    def _attribute(self, node: ast.Attribute) -> Kind | None:
        name = dotted(node)
        if name is not None and name in self._known:
            return self._known[name]
        if node.attr in _HOST_ATTRIBUTES:
            return "host"
        base = self.kind(node.value)
        if node.attr == "grad":
            return "device"
        return ("device" if base == "maybe" else base) if node.attr in _TENSOR_ATTRIBUTES else None

    def _call(self, node: ast.Call) -> Kind | None:
        name, method = dotted(node.func), node.func.attr if isinstance(node.func, ast.Attribute) else None
        last = (name or method or "").rpartition(".")[2]
        if name is not None and name.split(".")[0] in ("torch", "F", "nn", "math", "np", "numpy"):
            return self._torch(node, name)
        if method is not None:
            if method in ("to", "cuda"):
                return "host" if is_cpu(node) else "device"
            if method in _TO_HOST:
                return "host"
            base = self.kind(node.func.value)  # type: ignore[attr-defined]
            if method in _TENSOR_METHODS and base is not None:
                return "device" if base == "maybe" else base
        if "clip_grad_norm" in last:
            return "device"
        if last in _HOST_FUNCTIONS:
            return "host"
        if last in _SAME_AS_ARGUMENTS:
            return self._together(node.args)
        if name is not None and (own := self._returned.get(name.removeprefix("self."))) is not None:
            return own
        if (name in self._models) or any(word in last.lower() for word in _CALLED_MODELS):
            return "device"
        if name is not None and name.startswith("self.") and self._together(node.args) in ("device", "maybe"):
            return "device"  # a layer
        return None

    def _torch(self, node: ast.Call, name: str) -> Kind | None:
        parts = name.split(".")
        if parts[0] in ("math", "np", "numpy"):
            return "host"
        if "clip_grad_norm" in parts[-1]:
            return "device"
        if len(parts) > 1 and parts[1] in _TORCH_IS_NO_TENSOR:
            return None
        if parts[0] == "nn" and parts[1:2] != ["functional"]:
            return None
        if parts[-1] in _TORCH_MAKES_ON_HOST:
            return "device" if any(word.arg == "device" for word in node.keywords) else "host"
        found = self._together(node.args)
        return "device" if found == "maybe" else found

    def _together(self, nodes: list[ast.expr]) -> Kind | None:
        kinds = {self.kind(node) for node in nodes}
        if "device" in kinds:
            return "device"
        return "maybe" if "maybe" in kinds else _common(kinds)


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` as text; None where something else is in it."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base is not None else None
    return None


def is_cpu(call: ast.Call) -> bool:
    """Whether a `.to(...)` names the host."""
    given = [*call.args, *(word.value for word in call.keywords if word.arg == "device")]
    named = [value.args[0] if _makes_device(value) else value for value in given]  # type: ignore[attr-defined]
    return any(isinstance(value, ast.Constant) and value.value == "cpu" for value in named)


def _makes_device(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) in ("torch.device", "device") and len(node.args) == 1


def _common(kinds: set[Kind | None]) -> Kind | None:
    return next(iter(kinds)) if len(kinds) == 1 else None
