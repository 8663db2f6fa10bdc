"""Resident data: the bytes of a small dataset that a run keeps on the device, told without loading it. No torch."""

from __future__ import annotations

import math

from gradus.data.source import RESIDENT_BYTES, source_options
from gradus.data.split import Split
from gradus.planner.resolve import data_options
from gradus.schema.recipe import Recipe

SPLITS: tuple[Split, ...] = ("train", "validation")
LABEL_BYTES = 8  # int64 (data/sources/image.py)


def resident_bytes(recipe: Recipe) -> int:
    """Of built-in images that are held in memory, those to train on and those to evaluate with; of all else 0."""
    if not recipe.data.built_in:
        return 0
    options = source_options(recipe.data.use, data_options(recipe))
    shape = options.image_shape()
    if shape is None:
        return 0
    sizes = [(options.images_in_memory(split) or 0) * (math.prod(shape) + LABEL_BYTES) for split in SPLITS]
    return sum(size for size in sizes if size <= RESIDENT_BYTES)
