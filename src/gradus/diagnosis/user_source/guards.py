"""Guards: whether what an `if` in a training loop leads to happens at every step, or only now and then.

In doubt it counts as now and then: what is told to a user has to be true.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping

# Of what a condition may ask that is the same at all steps of a rank, or of the rank that prints.
_SETTINGS = re.compile(
    r"rank|is_main|main_process|master|verbose|debug|distributed|world_size|is_available|is_initialized|use_\w+|amp"
    r"|training|scaler|cuda|log_loss|quiet",
    re.IGNORECASE,
)
_COUNTERS = re.compile(r"^(i|n|it|idx|index|step\w*|\w+_step|iteration\w*|batch_idx|batch_index|epoch)$", re.IGNORECASE)


def is_rare(test: ast.expr, constants: Mapping[str, object], arguments: frozenset[str] = frozenset()) -> bool:
    """Whether the body of `if test:` is not what happens at every step. `arguments` are the words the script got."""
    if isinstance(test, ast.Constant):
        return not test.value
    if _was_asked_for(test, arguments):
        return False
    if isinstance(test, ast.BoolOp):
        parts = [is_rare(value, constants, arguments) for value in test.values]
        return any(parts) if isinstance(test.op, ast.And) else all(parts)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        if (every := _modulus(test.operand)) is not None:  # `not step % 10`
            return _value(every, constants) != 1
        if ast.unparse(test.operand).endswith("training"):
            return True  # an evaluation
        return not _only_settings(test.operand)
    if _modulus(test) is not None:  # `step % 10`: all steps but some
        return False
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _is_rare_comparison(test, constants)
    name = test.id if isinstance(test, ast.Name) else None
    if name is not None and name in constants:
        return not constants[name]
    return not _only_settings(test)


def _was_asked_for(test: ast.expr, arguments: frozenset[str]) -> bool:
    """`if args.mode == "slow":` of a script that was started with `--mode slow`; `if args.slow:` with `--slow`."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], (ast.Eq, ast.In)):
        words = [node.value for node in ast.walk(test) if isinstance(node, ast.Constant)]
        return any(isinstance(word, str) and word in arguments for word in words)
    name = test.attr if isinstance(test, ast.Attribute) else test.id if isinstance(test, ast.Name) else None
    return name is not None and not arguments.isdisjoint((f"--{name}", f"--{name.replace('_', '-')}"))


def ends_the_loop(statement: ast.If, *, in_function: bool) -> bool:
    """`if step >= last: ...; break`: it happens once. A `return` leaves the loop, too, unless a function has it."""
    return isinstance(statement.body[-1], (ast.Break, ast.Raise) if in_function else (ast.Break, ast.Raise, ast.Return))


def skips_the_rest(statement: ast.stmt, constants: Mapping[str, object]) -> bool:
    """`if step % 10: continue`: what follows in the loop happens now and then."""
    if not isinstance(statement, ast.If) or not isinstance(statement.body[-1], (ast.Continue, ast.Return)):
        return False
    test = statement.test
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotEq):
        every = _modulus(test.left)
    else:
        every = _modulus(test)
    return every is not None and _value(every, constants) != 1


def _is_rare_comparison(test: ast.Compare, constants: Mapping[str, object]) -> bool:
    op = test.ops[0]
    every = _modulus(test.left)
    if every is not None:
        if isinstance(op, ast.Eq):  # `step % 10 == 0`
            return _value(every, constants) != 1
        return not isinstance(op, ast.NotEq)
    if isinstance(op, (ast.IsNot, ast.Is)):
        return isinstance(op, ast.Is)  # `writer is not None`: the one that writes, always
    if isinstance(test.left, ast.Name) and _COUNTERS.match(test.left.id):
        return not isinstance(op, (ast.Gt, ast.GtE, ast.NotEq))  # `step > 10`: from then on
    return not _only_settings(test)


def _modulus(node: ast.expr) -> ast.expr | None:
    """The k of `x % k`, or of `(x + 1) % k`."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and not isinstance(node.left, ast.Constant):
        return node.right
    return None


def _value(node: ast.expr, constants: Mapping[str, object]) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    return constants.get(node.id) if isinstance(node, ast.Name) else None


def _only_settings(test: ast.expr) -> bool:
    """Whether a condition asks for nothing but settings: rank 0, verbose, and the like."""
    asked = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
    asked |= {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)}
    modules = {"dist", "torch", "distributed", "args", "self", "accelerator", "run", "fabric", "config", "cfg", "os"}
    asked -= modules
    return bool(asked) and all(_SETTINGS.search(name) for name in asked)


def constants_of(tree: ast.Module) -> dict[str, object]:
    """Names that the file binds once, to a constant."""
    bound: dict[str, list[object]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    value = node.value.value if isinstance(node.value, ast.Constant) else _NO_CONSTANT
                    bound.setdefault(target.id, []).append(value)
        elif isinstance(node, (ast.AugAssign, ast.For)) and isinstance(node.target, ast.Name):
            bound.setdefault(node.target.id, []).append(_NO_CONSTANT)
    return {name: values[0] for name, values in bound.items() if len(values) == 1 and values[0] is not _NO_CONSTANT}


_NO_CONSTANT = object()
