"""Made-up images that are there at once: a benchmark of a model is not to measure how they are made."""

from __future__ import annotations

from typing import Literal

import numpy as np

from gradus.data.images import Augment
from gradus.data.sources.image import MemoryImages
from gradus.data.sources.synthetic import PatternImages, SyntheticImages
from gradus.data.split import Split, whole

_SEED = 1


def images(
    split: Split, size: int, channels: Literal[1, 3], classes: int, samples: int, augment: Augment = "none"
) -> MemoryImages:
    """The samples of `synthetic-images`, held in memory."""
    options = SyntheticImages(size=size, channels=channels, classes=classes, samples=samples, augment=augment)
    source = options.open(split, _SEED)
    assert isinstance(source, PatternImages)
    found = source.fetch(np.arange(len(source)))
    assert isinstance(found, tuple)
    pixels, labels = found
    return MemoryImages(pixels, labels, whole(len(source)), source.form, source.augment)
