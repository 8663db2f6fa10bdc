"""A model of the catalogue as benchmarks are told of it: `--model resnet50 --set model.image=64`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from gradus.schema.errors import InputError, unknown_name
from gradus.schema.plan import Precision


def model_options(overrides: Sequence[str]) -> dict[str, Any]:
    """Settings of the model, from `--set model.KEY=VALUE`."""
    import yaml

    options: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key.startswith("model.") or key == "model.":
            raise InputError(
                f"--set: found {override!r}, allowed with --model: model.KEY=VALUE",
                hint="what else a run has, a recipe says: give one in place of --model",
                field="--set",
                found=override,
                allowed="model.KEY=VALUE",
            )
        options[key.removeprefix("model.")] = yaml.safe_load(value)
    return options


def check_precision(precision: str) -> None:
    allowed = get_args(Precision)
    if precision not in allowed:
        raise unknown_name("precision", precision, allowed, field="--precision")
