"""What the peers' loops are given: the recipe's own model, and its samples in gradus's order, on the device already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from peer_works import Work
from torch import Tensor, nn

from gradus.data.loader import Indexed
from gradus.data.orders import order_for
from gradus.data.sources.image import ImageSource
from gradus.schema.recipe import Recipe
from gradus.training.building import initial_model, open_data

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
PADDING = 4  # pixels around an image, from which an augmented one is cut
Samples = Callable[[int, int], Iterator[tuple[Tensor, ...]]]


class MeanLoss(nn.Module):
    """A model that returns the mean loss of a batch, so that all of the forward pass is compiled as one."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.model = initial_model(recipe, DEVICE, torch.float32)
        self.task = recipe.model.options.get("task")
        if self.task is not None:  # what gradus put around a model of transformers comes off again
            self.model.__class__ = type(self.model).__base__  # type: ignore[assignment]

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.task == "causal-lm":
            return self.model(input_ids=inputs, labels=targets, shift_labels=targets, use_cache=False).loss
        if self.task == "image-classification":
            return self.model(pixel_values=inputs, labels=targets).loss
        output = self.model(inputs, targets)
        return output.loss_sum / output.count


def samples_of(work: Work, recipe: Recipe) -> Samples:
    """A function from a step and a number of steps to their batches. Peers augment by themselves."""
    data = open_data(recipe, "train")
    assert data is not None
    numbers = _Numbers(data, recipe)
    if isinstance(data.source, ImageSource):
        return _Images(work, data.source, numbers).batches
    return _Tokens(data, numbers).batches


class _Numbers:
    """Which samples a step has, as in gradus's run."""

    def __init__(self, data: Indexed, recipe: Recipe) -> None:
        self._order = order_for(data, recipe.data, recipe.seed, recipe.batch)
        self.batch = recipe.batch

    def of(self, first: int, steps: int) -> np.ndarray[Any, Any]:
        positions = np.arange(first * self.batch, (first + steps) * self.batch, dtype=np.int64)
        return self._order.at(positions).reshape(steps, self.batch)


class _Tokens:
    """Whole segments on the device before their clock starts: no peer ever waits for data."""

    def __init__(self, data: Indexed, numbers: _Numbers) -> None:
        self._data, self._numbers = data, numbers

    def batches(self, first: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        found = []
        for numbers in self._numbers.of(first, steps):
            raw = {name: column.to(DEVICE) for name, column in self._data.fetch(numbers).items()}
            batch = self._data.finish(raw, torch.float32)
            found.append((batch["tokens"], batch["targets"]))  # type: ignore[call-overload]
        return iter(found)


class _Images:
    """All images live on the device, and what is done to a batch of them is one compiled function."""

    def __init__(self, work: Work, source: ImageSource, numbers: _Numbers) -> None:
        columns = source.columns
        assert columns is not None
        assert isinstance(columns, tuple)
        images, self._labels = (torch.from_numpy(column).to(DEVICE) for column in columns)
        self._augmented = work.recipe["data"].get("augment") == "standard"
        self._images = nn.functional.pad(images, (PADDING,) * 4) if self._augmented else images
        self._numbers = numbers
        scales = (source.form.mean, source.form.deviation)
        self._mean, self._deviation = (255 * torch.tensor(scale, device=DEVICE)[:, None, None] for scale in scales)
        self._layout = torch.channels_last if work.channels_last and CUDA else torch.contiguous_format
        self._seen = torch.compile(self._seen_by_model) if CUDA and not work.plain else self._seen_by_model

    def batches(self, first: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
        numbers = torch.from_numpy(self._numbers.of(first, steps)).to(DEVICE)
        places = 2 * PADDING + 1
        drawn = torch.randint(2 * places**2, numbers.shape, device=DEVICE)
        return ((self._seen(*pair), self._labels[pair[0]]) for pair in zip(numbers, drawn, strict=True))

    def _seen_by_model(self, numbers: Tensor, drawn: Tensor) -> Tensor:
        raw = self._cut(numbers, drawn) if self._augmented else self._images[numbers]
        return ((raw.float() - self._mean) / self._deviation).contiguous(memory_format=self._layout)

    def _cut(self, numbers: Tensor, drawn: Tensor) -> Tensor:
        """Each image from another place, half of them mirrored: one gathering read of all pixels."""
        channels, size = self._images.shape[1], self._images.shape[-1] - 2 * PADDING
        places, pixels = 2 * PADDING + 1, torch.arange(size, device=DEVICE)
        columns = torch.where(drawn[:, None] % 2 == 1, size - 1 - pixels, pixels) + (drawn // 2 % places)[:, None]
        rows = pixels + (drawn // 2 // places)[:, None]
        channel = torch.arange(channels, device=DEVICE)[None, :, None, None]
        return self._images[numbers[:, None, None, None], channel, rows[:, None, :, None], columns[:, None, None, :]]
