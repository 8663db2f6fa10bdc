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
from gradus.data.shifted_cuts import cut_out, drawn_cuts
from gradus.data.source import Batch, Source
from gradus.data.sources.options import Options
from gradus.data.split import Part, Split


@dataclass(frozen=True)
class ImageFormat:
    """What the images look like. Mean and deviation are per channel, of pixels scaled to 0..1."""

    shape: tuple[int, int, int]
    classes: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    mirrors: bool = True  # a mirror image shows the same class


class ImageOptions(Options):
    """The keys of all sources that can augment their pictures."""

    augment: Augment = "none"  # standard: a random cut of each picture, perhaps mirrored

    def augment_of(self, split: Split) -> Augment:
        """Validation is never augmented: its figures would depend on chance."""
        return self.augment if split == "train" else "none"


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


class ShiftedImages(ImageSource):
    """Small images. To augment them is to shift and perhaps mirror them, which is done on the training device."""

    def __init__(self, length: int, form: ImageFormat, augment: Augment) -> None:
        super().__init__(length, form)
        self.augment = augment

    def fetch_drawn(self, indices: Indices, draws: Words) -> Batch:
        batch, cuts = self.fetch(indices), self.drawn(draws)
        return batch if cuts is None else (*batch, cuts)

    def drawn(self, draws: Words) -> Indices | None:
        if self.augment == "none":
            return None
        _, height, width = self.form.shape
        return drawn_cuts(draws, height, width, mirrors=self.form.mirrors)

    def finish(self, batch: Any, dtype: Any) -> Any:
        raw, labels, *cuts = batch
        return super().finish((cut_out(raw, *cuts) if cuts else raw, labels), dtype)


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


class MemoryImages(ShiftedImages):
    """Images that are small enough to be held in memory."""

    def __init__(
        self, images: Pixels, labels: Indices, part: Part, form: ImageFormat, augment: Augment = "none"
    ) -> None:
        super().__init__(part.length, form, augment)
        self.part = part
        chosen = part.locate(np.arange(part.length))
        self.images, self.labels = images[chosen], labels[chosen]

    @property
    def columns(self) -> Batch:
        return self.images, self.labels

    def fetch(self, indices: Indices) -> Batch:
        return self.images[indices], self.labels[indices]
