"""`file.py:name` and `package.module:name`: finding what a recipe names, without running it until it is wanted.

A name may have dots, as in `package.module:Class.method`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradus.schema.errors import InputError, nearest


def is_import_path(name: str) -> bool:
    """Whether a name is `file.py:name` or `package.module:name` rather than a built-in."""
    return ":" in name


def absolute(name: str, folder: Path) -> str:
    """The import path with its file made absolute: as seen from `folder`, or else from the current directory."""
    file, _, attribute = name.rpartition(":")
    return f"{found_from(folder, file)}:{attribute}" if file.endswith(".py") else name


def found_from(folder: Path, file: str) -> str:
    """The absolute path of a file that a recipe in `folder` names: beside it, or else in the current directory."""
    beside = folder / file
    # Without `..`: the same file must have the same name, from wherever a run goes on.
    return os.path.abspath(beside if beside.exists() else file)


def check_import_path(name: str, field: str) -> None:
    """Refuse a file that does not exist or does not define the name. Files are parsed, not run."""
    file, _, attribute = name.rpartition(":")
    if not file or not attribute:
        raise InputError(
            f"{field}: found {name!r}, allowed: file.py:name or package.module:name",
            field=field,
            found=name,
            allowed="file.py:name or package.module:name",
        )
    if not file.endswith(".py"):
        return
    path = Path(file)
    if not path.is_file():
        siblings = sorted(str(found) for found in path.parent.glob("*.py"))
        close = nearest(str(path), siblings)
        raise InputError(
            f"{field}: {file}: no such file" + (f"; did you mean {close}?" if close else ""),
            field=field,
            found=name,
            allowed=siblings,
            nearest=close,
        )
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    except SyntaxError as error:
        raise InputError(
            f"{field}: {file}, line {error.lineno}: not valid Python: {error.msg}",
            field=field,
            found=name,
            line=error.lineno,
        ) from None
    names = _bound_names(tree)
    first = attribute.partition(".")[0]
    if first not in names and "*" not in names:
        close = nearest(first, names)
        raise InputError(
            f"{field}: {file} has no {first!r}" + (f"; did you mean {close!r}?" if close else ""),
            field=field,
            found=first,
            allowed=sorted(names),
            nearest=close,
        )


def short_name(name: str) -> str:
    """What a callable is called, without where it is: `top5` of `metrics.py:top5`."""
    return name.rpartition(":")[2].rpartition(".")[2]


def import_callable(name: str, field: str) -> Callable[..., Any]:
    """What an import path names, imported."""
    check_import_path(name, field)
    module_name, _, attribute = name.rpartition(":")
    if module_name.endswith(".py"):
        module = _module_from_file(Path(module_name))
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not (module_name + ".").startswith(error.name + "."):
                raise  # the module exists, but something that it imports does not: that is the error to show
            raise InputError(
                f"{field}: no module named {error.name!r}",
                hint="is it installed here, or is its folder on PYTHONPATH?",
                field=field,
                found=name,
            ) from None
    return _attribute(module, module_name, attribute, field)


def _attribute(module: Any, module_name: str, attribute: str, field: str) -> Callable[..., Any]:
    """The attribute of a module, or of an attribute of it, and so on along the dots."""
    found, where = module, module_name
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = nearest(part, [name for name in dir(found) if not name.startswith("_")])
            raise InputError(
                f"{field}: {part!r} in {where} does not exist" + (f"; did you mean {close!r}?" if close else ""),
                field=field,
                found=f"{module_name}:{attribute}",
                nearest=close,
            )
        found, where = getattr(found, part), f"{where}:{part}" if found is module else f"{where}.{part}"
    if not callable(found):
        raise InputError(
            f"{field}: {attribute!r} in {module_name} is not callable", field=field, found=f"{module_name}:{attribute}"
        )
    return found  # type: ignore[no-any-return]


def _module_from_file(path: Path) -> Any:
    # Registered under a name of its own, so that dataclasses and loader workers can look the module up again.
    name = f"gradus_user_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.resolve().parent) not in sys.path:  # a script may import its neighbours
        sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _bound_names(tree: ast.Module) -> set[str]:
    """Every name the file binds anywhere: an `if` or `try` around a definition must not hide it."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update((alias.asname or alias.name) for alias in node.names)
    return names
