"""Resolve: check every name in a recipe and complete what follows from the rest. No torch, so it is quick and early."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from gradus.data.source import prepare_source, source_options
from gradus.data.sources import BUILT_IN
from gradus.data.sources.options import Options
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
        options = source_options(recipe.data.use, data_options(recipe))
        if settings:
            recipe = _with_vocabulary_from_data(recipe, options)
            _check_sample(recipe, options)
    named = [("optimizer.use", recipe.optimizer.use), ("optimizer.decay", recipe.optimizer.decay)]
    named += [("loss", recipe.loss.use)] if recipe.loss else []
    named += [("metrics", metric.use) for metric in recipe.metrics]
    named += [("hooks", hook.use) for hook in recipe.hooks]
    for field, name in named:
        if is_import_path(name):
            check_import_path(name, field)
    return recipe


def prepare_data(recipe: Recipe) -> None:
    """Do now, where people watch, what opening the data would do on a rank: text is tokenised once, and kept."""
    if recipe.data.built_in:
        with recipe.blamed():
            prepare_source(recipe.data.use, data_options(recipe))


def data_options(recipe: Recipe) -> dict[str, object]:
    """What the data source is given: its own keys and the limit."""
    options = dict(recipe.data.options)
    if recipe.data.limit is not None:
        options["limit"] = recipe.data.limit
    return options


def check_model_fits_data(recipe: Recipe, vocabulary: int | None, classes: int | None) -> None:
    """A reference model must have an output for every token or class of the data."""
    if not recipe.model.built_in:
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
    reference = catalogue.resolve(recipe.model.use, recipe.model.options)[0].name
    masked = reference == "bert" or settings.get("task") == "masked-lm"
    if masked and "objective" in BUILT_IN[recipe.data.use].model_fields:
        inherited["objective"] = "masked"
    given = recipe.data.model_dump(exclude_unset=True)
    return recipe.model_copy(update={"data": type(recipe.data)(**{**inherited, **given})})


def _with_vocabulary_from_data(recipe: Recipe, options: Options) -> Recipe:
    """A reference model knows as many tokens as the tokenizer of its data, unless the recipe or a preset says more."""
    tokens = options.token_count()
    if tokens is None:
        return recipe
    given = recipe.model.model_dump(exclude_unset=True)
    reference = catalogue.REFERENCES.get(recipe.model.use)
    if reference is not None and reference.sample == "tokens" and "vocabulary" not in given:
        return recipe.model_copy(update={"model": type(recipe.model)(**{**given, "vocabulary": tokens})})
    check_model_fits_data(recipe, tokens, None)
    return recipe


def _check_sample(recipe: Recipe, options: Options) -> None:
    """A sample that a reference model cannot take is refused here, with the numbers, and not by a layer in a rank."""
    reference, model = catalogue.resolve(recipe.model.use, recipe.model.options)
    settings = asdict(model)
    content = "text" if reference.sample == "tokens" else "images"
    if options.content != content:
        fitting = sorted(name for name, source in BUILT_IN.items() if source.content == content)
        raise InputError(
            f"data.use: {recipe.model.use} learns from {content}, but {recipe.data.use} has {options.content}",
            hint=f"sources of {content}: {', '.join(fitting)}",
            field="data.use",
            found=recipe.data.use,
            allowed=fitting,
        )
    context, longest = getattr(options, "context", None), settings.get("context")
    if context is not None and longest is not None and context > longest:
        raise _unfit(recipe, "context", context, f"model.context is {longest}", f"at most {longest}")
    shape = options.image_shape()
    if shape is not None:
        _check_image(recipe, reference.name, settings, shape)


def _check_image(recipe: Recipe, name: str, settings: dict[str, Any], shape: tuple[int, int, int]) -> None:
    channels, side = shape[0], shape[1]
    wanted = settings.get("channels", 1)  # mnist-cnn, which has no such setting, reads one
    if wanted is not None and channels != wanted:
        raise _unfit(recipe, "channels", channels, f"{recipe.model.use} reads {wanted}", str(wanted))
    # What the layers after the last pooling were made for: a pooling drops what is left over, so a few sides do.
    sides = {"mnist-cnn": (28, 29), "simple-cnn": (32, 39)}.get(name)
    if name == "vit":
        sides = (settings["image"], settings["image"])
    if sides is not None and not sides[0] <= side <= sides[1]:
        raise _unfit(recipe, "size", side, f"{recipe.model.use} reads {sides[0]} x {sides[0]}", str(sides[0]))


def _unfit(recipe: Recipe, key: str, found: object, why: str, allowed: str) -> InputError:
    """The data has a `key` that is not what the model takes; whichever of the two can be set otherwise is the hint."""
    model_key = {"size": "image"}.get(key, key)
    hint = None
    if key in BUILT_IN[recipe.data.use].model_fields:
        hint = f"--set data.{key}={allowed.split()[-1]}"
    elif model_key in asdict(catalogue.resolve(recipe.model.use, recipe.model.options)[1]):
        hint = f"--set model.{model_key}={found}"
    field = f"data.{key}" if hint and hint.startswith("--set data") else "data.use"
    message = f"{field}: {recipe.data.use} has {key} {found}, but {why}"
    return InputError(message, hint=hint, field=field, found=found, allowed=allowed)
