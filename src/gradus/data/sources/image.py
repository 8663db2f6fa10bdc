"""What all image sources share: raw uint8 [N, C, H, W] with int64 labels, normalised on the training device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices
from gradus.data.source import Batch, Source
from gradus.data.split import Part

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImageFormat:
    """What the images look like. Mean and deviation are per channel, of pixels scaled to 0..1."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


class ImageSource(Source):
    """Labelled images."""

    def __init__(self, length: int, form: ImageFormat) -> None:
        super().__init__(length)
        self.form = form
        self.classes = form.classes
        self.sample_shape = form.shape

    def finish(self, batch: Any, dtype: Any) -> Any:
        raw, labels = batch
        images = raw.float()  # normalised in fp32 whatever `dtype` is: bf16 would round at each step
        # Scalars, one channel at a time: a tensor of means would be copied from the host, and waited for, in each step.
        for channel, (mean, deviation) in enumerate(zip(self.form.mean, self.form.deviation, strict=True)):
            images[:, channel].sub_(255 * mean).div_(255 * deviation)
        return images.to(dtype), labels.long()


class MemoryImages(ImageSource):
    """Images that are small enough to be held in memory."""

    def __init__(self, images: Pixels, labels: Indices, part: Part, form: ImageFormat) -> None:
        super().__init__(part.length, form)
        self.part = part
        chosen = part.locate(np.arange(part.length))
        self.images, self.labels = images[chosen], labels[chosen]

    @property
    def columns(self) -> Batch:
        return self.images, self.labels

    def fetch(self, indices: Indices) -> Batch:
        return self.images[indices], self.labels[indices]
