"""The live run of a case, for measure_cases.py: built on the device, and fed with batches that were made beforehand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from plan_cases import Case

from gradus.parallel.world import World
from gradus.record.directory import RunDirectory
from gradus.training import described
from gradus.training.live_run import LiveRun

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


class SameBatches:
    """In place of the loader's own fetching: two batches, made once and pinned, by turns."""

    def __init__(self, fetch: Any) -> None:
        self._fetch = fetch
        self._made: dict[int, list[Any]] = {}
        self._turn = 0

    def __call__(self, request: tuple[int, int]) -> Any:
        made = self._made.setdefault(request[1], [])
        if len(made) < 2:
            made.append(_pinned(self._fetch(request)))
        self._turn += 1
        return made[self._turn % len(made)]


def _pinned(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {key: _pinned(value) for key, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_pinned(value) for value in batch)
    return batch.pin_memory() if ON_GPU and isinstance(batch, torch.Tensor) else batch


@contextmanager
def built_on_device() -> Iterator[None]:
    """Models that are not gradus's own draw their weights on the GPU, which is much faster than in host memory."""
    original = described.constructed

    def constructed(recipe: Any, dtype: torch.dtype) -> Any:
        if torch.get_default_device().type == "meta":
            return original(recipe, dtype)
        try:
            with DEVICE:
                return original(recipe, dtype)
        except Exception:  # one that insists on the host
            return original(recipe, dtype)

    described.constructed = constructed  # type: ignore[assignment]
    try:
        yield
    finally:
        described.constructed = original  # type: ignore[assignment]


def live_run(case: Case, run: RunDirectory, world: World) -> LiveRun:
    recipe = case.recipe()
    with built_on_device():
        live = LiveRun.from_recipe(recipe, recipe.plan, run, 1, world)
    live.loader._fetch = SameBatches(live.loader._fetch)  # type: ignore[assignment]
    return live
