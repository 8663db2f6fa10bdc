"""Made-up images that are there at once: a benchmark of a model is not to measure how they are made."""

from __future__ import annotations

import numpy as np

from gradus.data.sources.image import MemoryImages
from gradus.data.sources.synthetic import PatternImages, SyntheticImages
from gradus.data.split import Split, whole

_SEED = 1


def images(split: Split, size: int, channels: int, classes: int, samples: int) -> MemoryImages:
    """The samples of `synthetic-images`, held in memory."""
    options = SyntheticImages(size=size, channels=channels, classes=classes, samples=samples)  # type: ignore[arg-type]
    source = options.open(split, _SEED)
    assert isinstance(source, PatternImages)
    found = source.fetch(np.arange(len(source)))
    assert isinstance(found, tuple)
    pixels, labels = found
    return MemoryImages(pixels, labels, whole(len(source)), source.form)
