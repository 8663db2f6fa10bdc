"""`synthetic-tokens` and `synthetic-images`: learnable content, made up as a pure function of (seed, index)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from gradus.data.images import Augment
from gradus.data.order import Indices, noise
from gradus.data.source import Batch, Source
from gradus.data.sources.image import ImageFormat, ImageOptions, Pixels, ShiftedImages
from gradus.data.sources.options import Count, Options
from gradus.data.sources.text import Masking, Objective, TextSource, Tokens
from gradus.data.split import Part, Split, scattered
from gradus.schema.stable_hash import stable_hash

LONGEST_STRIDE = 4
PATTERN_SIZE = 8
# Half a uniform pattern plus half uniform noise.
MEAN, DEVIATION = 0.5, (2 / 12 / 4) ** 0.5


class SyntheticTokens(Options):
    use = "synthetic-tokens"
    content = "text"

    context: Count
    vocabulary: Annotated[int, Field(ge=2, le=2**32)] = 256
    samples: Count = 65536
    objective: Objective = "next"

    def open(self, split: Split, seed: int) -> Source:
        part = self.limited(scattered(self.samples, self.validation, split), self.samples, split, "made up")
        masking = Masking(seed, self.vocabulary - 1, self.vocabulary) if self.objective == "masked" else None
        return CountingText(seed, part, self.context, self.vocabulary, masking)


class CountingText(TextSource):
    """Each token is one to four more than the last, so the loss can fall from log(vocabulary) to log(4)."""

    def __init__(self, seed: int, part: Part, context: int, vocabulary: int, masking: Masking | None) -> None:
        super().__init__(part.length, context, vocabulary, masking)
        self.part = part
        self.key = stable_hash(seed, "synthetic tokens")
        self.modulus = np.uint64(vocabulary)
        self.dtype = np.min_scalar_type(vocabulary - 1)

    def windows(self, indices: Indices) -> Tokens:
        width = self.context + 1
        words = noise(self.key, self.part.locate(indices)[:, None] * width + np.arange(width))
        steps = np.uint64(1) + words % np.uint64(LONGEST_STRIDE)
        steps[:, 0] = words[:, 0] % self.modulus
        return np.asarray(np.cumsum(steps, axis=1) % self.modulus, dtype=self.dtype)


class SyntheticImages(ImageOptions):
    use = "synthetic-images"
    content = "images"

    size: Count = 32
    channels: Literal[1, 3] = 3
    classes: Count = 10
    samples: Count = 65536

    def image_shape(self) -> tuple[int, int, int]:
        return self.channels, self.size, self.size

    def open(self, split: Split, seed: int) -> Source:
        part = self.limited(scattered(self.samples, self.validation, split), self.samples, split, "made up")
        shape = (self.channels, self.size, self.size)
        form = ImageFormat(shape, self.classes, (MEAN,) * self.channels, (DEVIATION,) * self.channels)
        return PatternImages(seed, part, form, self.augment_of(split))


class PatternImages(ShiftedImages):
    """A coarse pattern that belongs to the class, half hidden in noise."""

    def __init__(self, seed: int, part: Part, form: ImageFormat, augment: Augment) -> None:
        super().__init__(part.length, form, augment)
        self.part = part
        self.label_key, self.pixel_key, pattern_key = (
            stable_hash(seed, "synthetic", use) for use in ("label", "pixel", "pattern")
        )
        channels, size, _ = form.shape
        patterns = random_bytes(pattern_key, np.arange(form.classes), channels * PATTERN_SIZE**2) // 2
        self.patterns = patterns.reshape(form.classes, channels, PATTERN_SIZE, PATTERN_SIZE)
        self.cell_of_pixel = np.arange(size) * PATTERN_SIZE // size

    def fetch(self, indices: Indices) -> Batch:
        chosen = self.part.locate(indices)
        labels = (noise(self.label_key, chosen) % np.uint64(self.form.classes)).astype(np.int64)
        pixels = random_bytes(self.pixel_key, chosen, math.prod(self.form.shape)).reshape(-1, *self.form.shape)
        cells = self.cell_of_pixel
        return pixels // 2 + self.patterns[labels][:, :, cells][:, :, :, cells], labels


def random_bytes(key: int, rows: Indices, width: int) -> Pixels:
    """[len(rows), width]: each word of noise gives eight bytes, lowest first on any machine."""
    words = -(-width // 8)
    drawn = noise(key, rows[:, None] * words + np.arange(words))
    return np.ascontiguousarray(drawn.astype("<u8").view(np.uint8)[:, :width])
