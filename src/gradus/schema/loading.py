"""From YAML text and `--set` overrides to a validated model, with errors that name file, field, found and allowed."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from gradus.schema.errors import InputError, nearest, unknown_name

Model = TypeVar("Model", bound=BaseModel)
Document = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """Safe YAML in which `1e-3` is a number (YAML 1.1 reads text) and a repeated key is an error, not the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a plain word", problem_mark=key_node.start_mark)
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} appears twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    """The value of a YAML text; a syntax error names the source, the line and the column."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise InputError(
            f"{source}, line {line}, column {column}: not valid YAML: {error.problem or error}",
            hint="check the indentation and the brackets around that line",
            file=source,
            line=line,
        ) from None
    except yaml.YAMLError as error:
        raise InputError(f"{source}: not valid YAML: {error}", file=source) from None


def read_document(path: Path) -> Document:
    """The mapping in a YAML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        siblings = sorted(str(p) for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        close = nearest(str(path), siblings)
        raise InputError(
            f"{path}: no such file" + (f"; did you mean {close}?" if close else ""),
            hint=f"files there: {', '.join(siblings)}" if siblings else None,
            file=str(path),
            found=str(path),
            allowed=siblings,
            nearest=close,
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}", file=str(path)) from None
    document = parse_yaml(text, str(path))
    if not isinstance(document, dict):
        found = "nothing" if document is None else f"a {_type_name(document)}"
        raise InputError(
            f"{path}: found {found}, allowed: a mapping of keys to values", file=str(path), found=found, field="."
        )
    return document


def apply_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """A copy of the document with each `a.b.c=value` set; values are YAML, so numbers are numbers."""
    result = _copied(document)
    for override in overrides:
        path, separator, text = override.partition("=")
        keys = path.strip().split(".")
        if not separator or not all(keys):
            raise InputError(
                f"--set {override}: found {override!r}, allowed: key.key=value",
                hint="for example --set optimizer.lr=1e-3",
                file="--set",
                field=path.strip() or ".",
                found=override,
                allowed="key.key=value",
            )
        place = result
        for depth, key in enumerate(keys[:-1]):
            inner = place.setdefault(key, {})
            if inner is None:
                inner = place[key] = {}
            if not isinstance(inner, dict):
                at = ".".join(keys[: depth + 1])
                raise InputError(
                    f"--set {override}: {at} is {inner!r}, which has no keys of its own",
                    file="--set",
                    field=at,
                    found=override,
                    allowed=f"{at}=value",
                )
            place = inner
        place[keys[-1]] = parse_yaml(text, f"--set {override}")
    return result


def validated(model: type[Model], document: Document, file: str, overrides: Sequence[str] = ()) -> Model:
    """The document as `model`, or one InputError that lists everything wrong with it."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problems = [_explained(model, e, file, overrides) for e in _telling(error, document)]
        first = problems[0]
        raise InputError(
            "\n".join(p.message for p in problems),
            hint=first.hint,
            **{**first.details, "problems": [p.document() for p in problems]},
        ) from None


def dump_yaml(document: Document) -> str:
    return yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)


_ALLOWED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
    "too_short": ("min_length", "a list as long as"),
    "too_long": ("max_length", "a list as long as"),
}


def _telling(error: ValidationError, document: Document) -> list[dict[str, Any]]:
    """What is wrong at each place. Of a union, pydantic tells what each of its members would have liked.

    Of a mapping where a name is allowed too, only what is wrong inside it counts; else members are alternatives.
    """
    errors: list[dict[str, Any]] = [{**e, "place": _place(e, document)} for e in error.errors()]
    places = [e["place"] for e in errors]
    told: list[dict[str, Any]] = []
    for e in errors:
        place = e["place"]
        inside = any(other[: len(place)] == place and len(other) > len(place) for other in places)
        if isinstance(e["input"], dict) and inside and e["type"] in (*_ALLOWED, "literal_error"):
            continue
        same = [other for other in told if other["place"] == place]
        if same and len(e["loc"]) > len(place):
            same[0]["others"] = [*same[0].get("others", []), e]
        else:
            told.append(e)
    return told


def _explained(model: type[BaseModel], error: dict[str, Any], file: str, overrides: Sequence[str]) -> InputError:
    """One of pydantic's errors in our words."""
    location = error["place"]
    field = ".".join(location)
    file = origin(field, file, overrides)
    kind, found = error["type"], error["input"]
    if kind == "extra_forbidden":
        return unknown_name("key", location[-1], _fields_at(model, location[:-1]), field=field, file=file)
    if kind == "missing":
        return InputError(
            f"{file}: {field}: missing, and it is required",
            file=file,
            field=field,
            found="nothing",
            allowed=f"a value for {field}",
        )
    alternatives = [error, *error.get("others", [])]
    allowed = ", or ".join(dict.fromkeys(_allowed(each) for each in alternatives))
    names = [n for each in alternatives if each["type"] == "literal_error" for n in _allowed(each).split(", ")]
    close = nearest(str(found), names)
    suggestion = f"; did you mean {close!r}?" if close else ""
    shown = "" if isinstance(found, dict) else f"found {found!r} ({_type_name(found)}), "
    where = file if field == "." else f"{file}: {field}"
    return InputError(
        f"{where}: {shown}allowed: {allowed}{suggestion}",
        file=file,
        field=field,
        found=found if isinstance(found, (str, int, float, bool)) else _type_name(found),
        allowed=allowed,
        nearest=close,
    )


def _allowed(error: Mapping[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "").replace(" or ", ", ")
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{words} {context[key]}"
    return str(context["error"]) if kind == "value_error" else _ALLOWED.get(kind, str(error["msg"]))


def origin(field: str, file: str, overrides: Sequence[str]) -> str:
    """The `--set` that gave this field its value, or else the file."""
    for override in reversed(overrides):
        path = override.partition("=")[0].strip()
        if field == path or field.startswith(path + ".") or path.startswith(field + "."):
            return f"--set {override}"
    return file


def _place(error: Mapping[str, Any], document: Any) -> list[str]:
    """Keys to where the value is written, less the members of unions that pydantic names (`gpu.GpuNumbers.name`).

    Those are no keys of what was read; nor is what is missing, which comes last.
    """
    place, value = [], document
    for number, part in enumerate(error["loc"]):
        is_key = part in value if isinstance(value, dict) else isinstance(part, int)
        if is_key:
            value = value[part] if isinstance(value, dict) or (isinstance(value, list) and part < len(value)) else None
        elif error["type"] != "missing" or number < len(error["loc"]) - 1:
            continue
        place.append(str(part))
    return place or ["."]


def _fields_at(model: type[BaseModel], location: Sequence[str]) -> list[str]:
    """Names of the fields of the (nested) model at a location."""
    current: type[BaseModel] = model
    for part in location:
        field = current.model_fields.get(part)
        inner = _model_in(field.annotation) if field else None
        if inner is None:
            return []
        current = inner
    return list(current.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, list, typing.Annotated):
        return next((m for m in map(_model_in, typing.get_args(annotation)) if m), None)
    return None


def _type_name(value: Any) -> str:
    names = {str: "text", bool: "true/false", int: "whole number", float: "number", list: "list", dict: "mapping"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def _copied(document: Document) -> Document:
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in document.items()}
