"""Model facts: what a recipe says of its model before anything is built. No torch."""

from __future__ import annotations

from typing import Any

from gradus.models import catalogue
from gradus.models.huggingface_settings import HuggingFaceSettings
from gradus.parallel.case import ModelFacts
from gradus.schema.callables import short_name
from gradus.schema.recipe import OWN, Recipe

WITH_BATCH_NORM = ("resnet", "simple-cnn")


def facts_of(recipe: Recipe) -> ModelFacts:
    if recipe.model.use == OWN:
        return ModelFacts("the model", "unknown")
    if not recipe.model.built_in:
        return ModelFacts(short_name(recipe.model.use), "user")
    reference, settings = catalogue.resolve(recipe.model.use, recipe.model.options)
    if isinstance(settings, HuggingFaceSettings):
        vocabulary = settings.vocabulary if settings.task == "causal-lm" else None
        return ModelFacts("the Hugging Face model", "huggingface", vocabulary=vocabulary)
    known: Any = settings
    longest = getattr(known, "context", None)
    given = recipe.data.options.get("context")
    return ModelFacts(
        recipe.model.use,
        "reference",
        reference=reference.name,
        blocks=getattr(known, "layers", None),
        heads=getattr(known, "heads", None),
        kv_heads=getattr(known, "key_value_heads", None),
        head_widths=_head_widths(known),
        inner=getattr(known, "inner_width", None),
        longest=longest,
        sequence=given if isinstance(given, int) else longest,  # as the data has it, by default all that fits
        dropout=getattr(known, "dropout", 0.0),
        experts=getattr(known, "experts", None),
        capacity=getattr(known, "capacity_factor", None),
        balance=getattr(known, "balance", None),
        latent_attention=getattr(known, "attention", None) == "latent",
        batch_norm=reference.name in WITH_BATCH_NORM,
        vocabulary=getattr(known, "vocabulary", None),
    )


def _head_widths(settings: Any) -> tuple[int, ...]:
    """Of a key and of a value; none where there is no attention."""
    if getattr(settings, "attention", None) == "latent":
        plain, rotary, value = settings.latent_widths
        return plain + rotary, value
    heads = getattr(settings, "heads", None)
    return (settings.width // heads,) * 2 if heads else ()
