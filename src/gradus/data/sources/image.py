"""What all image sources share: raw uint8 [N, C, H, W] with int64 labels, normalised on the training device."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from gradus.data.cuts import Pixels as Pixels  # for the sources that build on this
from gradus.data.images import Augment
from gradus.data.order import Indices, Words
from gradus.data.source import Batch, Source
from gradus.data.split import Part


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
        return normalised(raw, self.form, dtype), labels.long()


class Augmented(Source):
    """Samples with pictures that may be augmented. Without `augment`, what is drawn for a sample changes nothing."""

    augment: Augment

    def fetch(self, indices: Indices) -> Batch:
        return self._fetched(indices, None)

    def fetch_drawn(self, indices: Indices, draws: Words) -> Batch:
        return self._fetched(indices, draws if self.augment == "standard" else None)

    @abstractmethod
    def _fetched(self, indices: Indices, draws: Words | None) -> Batch:
        """These samples, cut as the draws say, or their middle."""


def normalised(raw: Any, form: ImageFormat, dtype: Any) -> Any:
    """Pixels as a model sees them."""
    mean, deviation = _scale(form, raw.device)
    # In fp32 whatever `dtype` is: bf16 would round at each step.
    return raw.float().sub_(mean).div_(deviation).to(dtype)


@cache
def _scale(form: ImageFormat, device: Any) -> tuple[Any, Any]:
    """Mean and deviation of each channel, of bytes. Kept on the device: a copy in each step would be waited for."""
    import torch

    mean, deviation = (
        torch.tensor([255 * value for value in values], dtype=torch.float32, device=device)[:, None, None]
        for values in (form.mean, form.deviation)
    )
    return mean, deviation


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
