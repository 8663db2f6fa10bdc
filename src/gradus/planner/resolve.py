"""Resolve: check every name in a recipe and complete what follows from the rest. No torch, so it is quick and early."""

from __future__ import annotations

from dataclasses import asdict

from gradus.data.source import check_source
from gradus.data.sources import BUILT_IN
from gradus.models import catalogue
from gradus.schema.callables import check_import_path, is_import_path
from gradus.schema.errors import InputError
from gradus.schema.recipe import OWN, Recipe


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with nothing left open, or an error that names the field. Changes nothing on disk."""
    with recipe.blamed():
        return _resolved(recipe)


def _resolved(recipe: Recipe) -> Recipe:
    for field in ("model", "data", "optimizer"):
        if getattr(recipe, field).use == OWN:
            raise InputError(
                f"{field}: missing",
                hint="only a script with a loop of its own brings it: gradus train -- script.py",
                field=field,
                found="nothing",
                allowed="a block with `use`",
            )
    model, data = recipe.model, recipe.data
    settings: dict[str, object] = {}
    if is_import_path(model.use):
        check_import_path(model.use, "model.use")
    else:
        settings = asdict(catalogue.resolve(model.use, model.options)[1])
    if is_import_path(data.use):
        check_import_path(data.use, "data.use")
    else:
        if data.use in BUILT_IN and settings:
            recipe = _with_data_from_model(recipe, settings)
        check_source(recipe.data.use, data_options(recipe))
    named = [("optimizer.use", recipe.optimizer.use), ("optimizer.decay", recipe.optimizer.decay)]
    named += [("loss", recipe.loss.use)] if recipe.loss else []
    named += [("metrics", name) for name in recipe.metrics]
    named += [("hooks", hook.use) for hook in recipe.hooks]
    for field, name in named:
        if is_import_path(name):
            check_import_path(name, field)
    return recipe


def data_options(recipe: Recipe) -> dict[str, object]:
    """What the data source is given: its own keys and the limit."""
    options = dict(recipe.data.options)
    if recipe.data.limit is not None:
        options["limit"] = recipe.data.limit
    return options


def check_model_fits_data(recipe: Recipe, vocabulary: int | None, classes: int | None) -> None:
    """A reference model must have an output for every token or class of the data."""
    if is_import_path(recipe.model.use):
        return
    settings = asdict(catalogue.resolve(recipe.model.use, recipe.model.options)[1])
    for key, needed in (("vocabulary", vocabulary), ("classes", classes)):
        has = settings.get(key)
        if needed is not None and isinstance(has, int) and has < needed:
            raise InputError(
                f"model.{key}: found {has}, but {recipe.data.use} has {needed}",
                hint=f"--set model.{key}={needed}",
                field=f"model.{key}",
                found=has,
                allowed=f"at least {needed}",
            )


def _with_data_from_model(recipe: Recipe, settings: dict[str, object]) -> Recipe:
    """The data has the model's context, vocabulary, image size and channels unless the recipe says otherwise.

    And its objective: `bert` sees the whole text, so predicting the next token would teach it to copy.
    """
    counterparts = {"context": "context", "vocabulary": "vocabulary", "size": "image", "channels": "channels"}
    inherited = {
        key: settings[setting]
        for key, setting in counterparts.items()
        if key in BUILT_IN[recipe.data.use].model_fields and settings.get(setting) is not None
    }
    masked = catalogue.resolve(recipe.model.use, {})[0].name == "bert"
    if masked and "objective" in BUILT_IN[recipe.data.use].model_fields:
        inherited["objective"] = "masked"
    given = recipe.data.model_dump(exclude_unset=True)
    return recipe.model_copy(update={"data": type(recipe.data)(**{**inherited, **given})})
