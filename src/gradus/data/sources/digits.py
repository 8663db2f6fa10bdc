"""`digits`: the 1,797 handwritten 8 x 8 digits that come with scikit-learn."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from gradus.data.source import Source
from gradus.data.sources.image import ImageFormat, ImageOptions, MemoryImages, Pixels
from gradus.data.split import Split, scattered

SIDE = 8
IMAGES = 1797
BRIGHTEST = 16
# Of all pixels at their original size.
MEAN, DEVIATION = 0.2873, 0.3539


class Digits(ImageOptions):
    use = "digits"
    content = "images"

    size: Annotated[int, Field(ge=SIDE)] = SIDE
    channels: Literal[1, 3] = 1

    def image_shape(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size

    def images_in_memory(self, split: Split) -> int:
        part = scattered(IMAGES, self.validation, split)
        return part.first(self.limit if split == "train" else None).length

    def open(self, split: Split, seed: int) -> Source:
        try:
            from sklearn.datasets import load_digits
        except ImportError:
            message = "source 'digits' needs scikit-learn, which is not installed"
            raise self.refuse("use", message, hint='pip install "gradus[digits]"') from None
        data, labels = load_digits(return_X_y=True)
        images = (data * (255 // BRIGHTEST)).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)
        images = enlarged(images, self.size).repeat(self.channels, axis=1)
        part = self.limited(scattered(len(images), self.validation, split), len(images), split, "scikit-learn")
        shape = (self.channels, self.size, self.size)
        form = ImageFormat(shape, 10, (MEAN,) * self.channels, (DEVIATION,) * self.channels, mirrors=False)
        return MemoryImages(images, labels.astype(np.int64), part, form, self.augment_of(split))


def enlarged(images: Pixels, size: int) -> Pixels:
    """Each pixel repeated as often as fits, in a black frame that makes up the rest."""
    factor, frame = divmod(size, SIDE)
    before, after = frame // 2, frame - frame // 2
    large = images.repeat(factor, axis=2).repeat(factor, axis=3)
    return np.pad(large, ((0, 0), (0, 0), (before, after), (before, after)))
