"""Synthetic content is a pure function of (seed, index), and can be learned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradus.data.source import Batch, Source, open_source

SMALL: dict[str, dict[str, Any]] = {
    "synthetic-tokens": {"context": 12, "vocabulary": 50, "samples": 200},
    "synthetic-images": {"size": 12, "channels": 3, "classes": 4, "samples": 200},
}


def arrays(batch: Batch) -> list[np.ndarray]:
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


def everything(source: Source) -> list[np.ndarray]:
    return arrays(source.fetch(np.arange(len(source))))


@pytest.mark.parametrize("use", SMALL)
def test_content_is_a_pure_function_of_seed_and_index(use: str) -> None:
    source, again, other = (open_source(use, SMALL[use], "train", seed) for seed in (1, 1, 2))
    wanted = np.array([17, 3, 17])
    for whole, batch in zip(everything(source), arrays(again.fetch(wanted)), strict=True):
        assert np.array_equal(whole[wanted], batch)
    assert not np.array_equal(everything(source)[0], everything(other)[0])


@pytest.mark.parametrize("use", SMALL)
def test_no_sample_is_in_both_splits(use: str) -> None:
    train, validation = (
        {row.tobytes() for row in everything(open_source(use, SMALL[use], split, 1))[0]}
        for split in ("train", "validation")
    )
    assert (len(train), len(validation), len(train & validation)) == (180, 20, 0)


@pytest.mark.parametrize("use", SMALL)
def test_a_limit_takes_some_of_the_same_samples(use: str) -> None:
    full = open_source(use, SMALL[use], "train", 1)
    limited = open_source(use, {**SMALL[use], "limit": 5}, "train", 1)
    assert len(limited) == 5
    assert len(open_source(use, {**SMALL[use], "limit": 5}, "validation", 1)) == 20
    for few, all_ in zip(everything(limited), everything(full), strict=True):
        known = {sample.tobytes() for sample in all_}
        assert all(sample.tobytes() in known for sample in few)


@pytest.mark.parametrize(("use", "total"), [("synthetic-tokens", 57455), ("synthetic-images", 9992804)])
def test_the_content_is_the_one_of_all_versions(use: str, total: int) -> None:
    content = everything(open_source(use, SMALL[use], "train", 1))
    assert sum(int(array.sum(dtype=np.int64)) for array in content) == total


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(2, np.uint8), (256, np.uint8), (50_257, np.uint16), (2**17, np.uint32)]
)
def test_each_token_is_one_to_four_more_than_the_last(vocabulary: int, dtype: Any) -> None:
    options = {"context": 100, "vocabulary": vocabulary, "samples": 100}
    windows = everything(open_source("synthetic-tokens", options, "train", 1))[0]
    assert windows.dtype == dtype
    assert windows.max() < vocabulary
    steps = np.diff(windows.astype(np.int64), axis=1) % vocabulary
    assert set(np.unique(steps)) == {step % vocabulary for step in (1, 2, 3, 4)}


def test_the_nearest_class_mean_names_the_class_of_an_unseen_image() -> None:
    train, validation = (
        open_source("synthetic-images", SMALL["synthetic-images"], s, 1) for s in ("train", "validation")
    )
    (images, labels), (unseen, truth) = everything(train), everything(validation)
    means = np.stack([images[labels == label].mean(axis=0) for label in range(4)])
    distances = ((unseen[:, None].astype(float) - means) ** 2).sum(axis=(2, 3, 4))
    assert np.array_equal(distances.argmin(axis=1), truth)
    assert set(truth) == {0, 1, 2, 3}
