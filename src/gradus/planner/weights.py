"""Weights: whether `model.weights` is there and fits the recipe's model, as far as headers tell, without torch."""

from __future__ import annotations

from pathlib import Path

from gradus.checkpoint.weights import open_weights
from gradus.models import catalogue
from gradus.models.config_json import recognised
from gradus.models.settings import BERTSettings, GPTSettings
from gradus.schema.recipe import Recipe


def check_weights(recipe: Recipe) -> None:
    """Refuse what cannot be loaded before a run directory is made. Ranks check the rest when they have the model."""
    if recipe.model.weights is None:
        return
    with recipe.blamed():
        weights = open_weights(Path(recipe.model.weights), every_byte=False)
        if not recipe.model.built_in:
            return
        _, settings = catalogue.resolve(recipe.model.use, recipe.model.options)
        if isinstance(settings, (GPTSettings, BERTSettings)):
            shapes = {name: tensor.shape for name, tensor in weights.tensors.items()}
            recognised(settings, shapes, weights.config, str(weights.path))
