"""Given: what a caller in Python hands over as a recipe, made into one: a path, a mapping, or a recipe itself."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe

Given = Recipe | str | Path | Mapping[str, Any]
Overrides = Sequence[str] | Mapping[str, Any]


def recipe_given(recipe: Given, overrides: Overrides = ()) -> Recipe:
    """The recipe with its overrides, `["optimizer.lr=1e-3"]` or `{"optimizer.lr": 1e-3}`."""
    texts = _override_texts(overrides)
    if isinstance(recipe, Recipe):
        if not texts:
            return recipe
        return Recipe.from_document(recipe.model_dump(exclude_unset=True), overrides=texts)
    if isinstance(recipe, Mapping):
        return Recipe.from_document(_plain(recipe), overrides=texts)
    if isinstance(recipe, (str, Path)):
        return Recipe.load(recipe, texts)
    raise InputError(
        f"recipe: found {type(recipe).__name__}, allowed: a path to a recipe.yaml, a dict, or a gradus.Recipe",
        field="recipe",
        found=type(recipe).__name__,
        allowed="a path, a dict or a Recipe",
    )


def _override_texts(overrides: Overrides) -> list[str]:
    if isinstance(overrides, str):
        raise InputError(
            f"overrides: found the text {overrides!r}, allowed: a list of such texts, or a dict",
            hint=f"overrides=[{overrides!r}]",
            field="overrides",
            found=overrides,
        )
    if not isinstance(overrides, Mapping):
        return list(overrides)
    texts = []
    for key, value in _plain(overrides).items():
        try:
            texts.append(f"{key}={json.dumps(value)}")  # JSON is YAML
        except TypeError:
            raise InputError(
                f"overrides: {key}: found {type(value).__name__}, allowed: text, numbers, lists and mappings",
                field=str(key),
                found=type(value).__name__,
            ) from None
    return texts


def _plain(value: Any, field: str = "") -> Any:
    """The value as YAML would have it: numbers of numpy as numbers, paths as text.

    A class or function cannot travel to the ranks, which are processes of their own: they import it by its name.
    """
    if isinstance(value, Mapping):
        return {key: _plain(inner, f"{field}.{key}" if field else str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, field) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return value.item()
    if callable(value):
        raise _object_error(value, field)
    return value


def _object_error(value: Any, field: str) -> InputError:
    is_definition = inspect.isclass(value) or inspect.isfunction(value)
    name = value.__name__ if is_definition else type(value).__name__
    kind = "class" if inspect.isclass(value) else "function" if inspect.isfunction(value) else "object"
    found = f"the {kind} {name} itself" if is_definition else f"an object of the class {name}"
    has_a_name = is_definition and name.isidentifier()
    importable = _import_path(value) if has_a_name else None
    if importable is not None:
        hint = f'name it: "{importable}"'
    elif has_a_name:
        stem = field.partition(".")[0] or "own"
        hint = f'put `%%writefile {stem}.py` as the first line into the cell that defines it; then "{stem}.py:{name}"'
    else:
        hint = 'write a function that returns it to a file, for example with `%%writefile own.py`; then "own.py:name"'
    return InputError(
        f"{field}: found {found}, allowed: a name, file.py:name or package.module:name, because ranks are processes of "
        "their own and import what they use",
        hint=hint,
        field=field,
        found=name,
        allowed="file.py:name or package.module:name",
    )


def _import_path(value: Any) -> str | None:
    """How ranks can import it, if they can: not from a notebook's cell, nor from inside a function."""
    module = sys.modules.get(value.__module__)
    if value.__module__ == "__main__" or value.__qualname__ != value.__name__ or module is None:
        return None
    if module.__package__:
        return f"{value.__module__}:{value.__name__}"
    file = getattr(module, "__file__", None)
    return f"{file}:{value.__name__}" if file else None
