"""Shifted cuts: small images, moved and mirrored on the training device as their positions in the stream say."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradus.bench import made_up
from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.order import noise
from gradus.data.shifted_cuts import cut_out, drawn_cuts, frame
from gradus.data.source import Source, open_source
from gradus.data.sources import cifar10
from gradus.data.sources.image import normalised
from gradus.schema.errors import InputError

CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "digits": {"limit": 60},
    "synthetic-images": {"size": 12, "samples": 60},
}


def opened(use: str, split: Any = "train", **options: Any) -> Source:
    return open_source(use, {**SMALL.get(use, {}), **options}, split, seed=1)


# --- a batch of pictures


@pytest.mark.parametrize(
    ("top", "left", "plain", "mirrored"),
    [
        (1, 1, [[1, 2], [3, 4]], [[2, 1], [4, 3]]),
        (0, 0, [[0, 0], [0, 1]], [[0, 0], [1, 0]]),
        (2, 1, [[3, 4], [0, 0]], [[4, 3], [0, 0]]),
        (1, 2, [[2, 0], [4, 0]], [[0, 2], [0, 4]]),
    ],
)
def test_a_cut_is_what_one_would_cut_by_hand(top: int, left: int, plain: Any, mirrored: Any) -> None:
    """Out of four by four pixels, of which the outer ones are black."""
    picture = torch.tensor([[[1, 2], [3, 4]], [[10, 20], [30, 40]]], dtype=torch.uint8)  # two channels
    cut = 2 * (4 * top + left)
    found = cut_out(torch.stack([picture, picture]), torch.tensor([cut, cut + 1]))
    assert found.dtype == torch.uint8
    for channel, factor in ((0, 1), (1, 10)):
        assert found[0, channel].tolist() == (factor * np.array(plain)).tolist()
        assert found[1, channel].tolist() == (factor * np.array(mirrored)).tolist()


@pytest.mark.parametrize(("side", "pixels"), [(32, 4), (28, 3), (8, 1), (2, 1), (64, 8)])
def test_the_frame_is_an_eighth_of_the_side(side: int, pixels: int) -> None:
    assert frame(side) == pixels


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 5, 17)])
def test_a_batch_is_cut_as_its_pictures_one_by_one(shape: tuple[int, int, int]) -> None:
    _, height, width = shape
    down, across = frame(height), frame(width)
    pictures = np.random.default_rng(0).integers(0, 256, (50, *shape), np.uint8)
    cuts = drawn_cuts(noise(3, np.arange(50)), height, width, mirrors=True)
    found = cut_out(torch.from_numpy(pictures), torch.from_numpy(cuts)).numpy()
    assert {int(cut) % 2 for cut in cuts} == {0, 1}
    for picture, cut, seen in zip(pictures, cuts, found, strict=True):
        framed = np.pad(picture, ((0, 0), (down, down), (across, across)))
        top, left = divmod(int(cut) // 2, width + 2 * across)
        part = framed[:, top : top + height, left : left + width]
        assert np.array_equal(seen, part[:, :, ::-1] if cut % 2 else part)


def test_all_cuts_are_equally_likely() -> None:
    """Nine rows to begin in, nine columns, mirrored or not."""
    each = 400
    cuts = drawn_cuts(noise(7, np.arange(2 * 81 * each)), 32, 32, mirrors=True)
    top, left = np.divmod(cuts // 2, 40)
    counts = np.zeros((9, 9, 2), np.int64)
    np.add.at(counts, (top, left, cuts % 2), 1)
    squares = ((counts - each) ** 2 / each).sum()
    assert abs(squares - 161) < 4 * np.sqrt(2 * 161)  # chi-squared with 161 degrees of freedom


def test_without_mirroring_the_cuts_are_in_the_same_places() -> None:
    words = noise(7, np.arange(1000))
    mirrored, plain = (drawn_cuts(words, 28, 28, mirrors=mirrors) for mirrors in (True, False))
    assert not (plain % 2).any()
    assert np.array_equal(plain // 2, mirrored // 2)


def test_bytes_are_normalised_to_the_same_bits_as_by_plain_arithmetic() -> None:
    form = cifar10.FORM
    every = torch.arange(256, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 2, 2)
    expected = np.stack(
        [
            (np.arange(256, dtype=np.float32) - np.float32(255 * mean)) / np.float32(255 * deviation)
            for mean, deviation in zip(form.mean, form.deviation, strict=True)
        ],
        axis=1,
    )
    found = normalised(every, form, torch.float32)
    assert np.array_equal(found[:, :, 1, 0].numpy(), expected)
    assert torch.equal(normalised(every, form, torch.bfloat16), found.to(torch.bfloat16))


# --- in a source


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, str]]:
    """Small copies of what is published."""
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", 4)
    random = np.random.default_rng(0)
    for name in (name for names in cifar10.FILES.values() for name in names):
        records = random.integers(0, 256, (4, cifar10.RECORD_BYTES), np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / name)
    for prefix in ("train", "t10k"):
        images, labels = random.integers(0, 256, (20, 28, 28), np.uint8), np.arange(20, dtype=np.uint8) % 10
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
            (tmp_path / name).write_bytes(header + array.tobytes())
    return {use: {"path": str(tmp_path)} for use in ("cifar10", "mnist")} | {use: {} for use in SMALL}


@pytest.mark.parametrize("use", ["cifar10", "mnist", "digits", "synthetic-images"])
def test_pictures_are_cut_in_training_and_never_in_validation(files: Any, use: str) -> None:
    words = noise(2, np.arange(4))
    for split in ("train", "validation"):
        plain, augmented = (opened(use, split, augment=augment, **files[use]) for augment in ("none", "standard"))
        images, labels = plain.fetch(np.arange(4))
        assert len(plain.fetch_drawn(np.arange(4), words)) == 2
        batch = augmented.fetch_drawn(np.arange(4), words)
        assert np.array_equal(batch[0], images)  # type: ignore[index]
        assert np.array_equal(batch[1], labels)  # type: ignore[index]
        assert len(augmented.fetch(np.arange(4))) == 2, "what is only looked at is as it is"
        if split == "validation":
            assert len(batch) == 2
            assert augmented.drawn(words) is None
            continue
        cuts = batch[2]  # type: ignore[index]
        assert cuts.dtype == np.int64
        raw = torch.from_numpy(images), torch.from_numpy(labels)
        found, _ = augmented.finish((*raw, torch.from_numpy(cuts)), torch.float32)
        expected, _ = plain.finish((cut_out(raw[0], torch.from_numpy(cuts)), raw[1]), torch.float32)
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("use", "mirrors"), [("cifar10", True), ("synthetic-images", True), ("mnist", False), ("digits", False)]
)
def test_digits_are_never_mirrored(files: Any, use: str, mirrors: bool) -> None:
    cuts = opened(use, augment="standard", **files[use]).drawn(noise(2, np.arange(500)))
    assert cuts is not None
    assert set((cuts % 2).tolist()) == ({0, 1} if mirrors else {0})


@pytest.mark.parametrize("use", SMALL)
def test_an_unknown_augmentation_is_refused_with_those_there_are(use: str) -> None:
    with pytest.raises(InputError, match=r"data\.augment: found 'heavy'.*'none' or 'standard'"):
        opened(use, augment="heavy")


def test_texts_cannot_be_augmented() -> None:
    with pytest.raises(InputError, match=r"synthetic-tokens.*augment"):
        opened("synthetic-tokens", context=8, augment="standard")


# --- in a stream


def in_memory(augment: Any = "standard", split: Any = "train") -> Source:
    return made_up.images(split, 16, 3, 4, 30, augment)


def by_position(
    source: Source, slices: list[Slices], start: int = 0, seed: int | None = 5, **options: Any
) -> dict[int, bytes]:
    found = {}
    for of_rank in slices:
        loader = Loader(Indexed(source), of_rank, CPU, torch.float32, seed=seed, **options)
        for micro in loader.micro_batches(start, 3):
            images, labels = micro.inputs  # type: ignore[misc]
            for offset in range(micro.samples):
                found[micro.position + offset] = images[offset].numpy().tobytes() + bytes([int(labels[offset])])
    return found


@pytest.mark.parametrize(
    "source", [in_memory(), opened("digits", augment="standard", size=32)], ids=["made up", "digits"]
)
def test_cuts_follow_from_seed_and_position_alone(source: Source) -> None:
    """Not from the rank, the worker, the size of a micro-batch, where the data is, or where the run was resumed."""
    alone = by_position(source, [Slices(24, 24, 1, 0, 66)])
    assert len(alone) == 66
    assert by_position(source, [Slices(24, 24, 1, 0, 66)], on_device=False) == alone
    for on_device, workers in ((True, 0), (False, 1)):
        shared = [Slices(24, 4, 3, rank, 66) for rank in (0, 1)]
        assert by_position(source, shared, on_device=on_device, workers=workers) == alone
        resumed = by_position(source, shared, start=1, on_device=on_device, workers=workers)
        assert resumed == {position: sample for position, sample in alone.items() if position >= 24}
    assert by_position(source, [Slices(24, 24, 1, 0, 66)], seed=6) != alone


def test_cuts_do_not_depend_on_how_many_indices_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [Slices(24, 4, 6, 0, 66)]
    alone = by_position(in_memory(), slices)
    monkeypatch.setattr("gradus.data.loader.INDICES_AT_ONCE", 8)
    assert by_position(in_memory(), slices) == alone


def test_each_epoch_sees_a_picture_in_another_way() -> None:
    source = in_memory()
    samples = by_position(source, [Slices(27, 27, 1, 0, 81)])
    assert len(source) == 27
    assert len(set(samples.values())) > 75, "among 81 draws of 50 cuts of 27 pictures, few are the same"
    plain = by_position(in_memory("none"), [Slices(27, 27, 1, 0, 81)])
    assert len(set(plain.values())) == 27


@pytest.mark.parametrize("on_device", [True, False])
def test_an_evaluation_sees_pictures_as_they_are(on_device: bool) -> None:
    slices = [Slices(3, 3, 1, 0, 3)]
    drawn, plain = (
        by_position(in_memory(augment, "validation"), slices, seed=None, on_device=on_device)
        for augment in ("standard", "none")
    )
    assert drawn == plain


def test_in_a_mixture_each_source_cuts_its_own() -> None:
    options = {"plain": {"use": "digits", "weight": 1}, "cut": {"use": "digits", "weight": 1, "augment": "standard"}}
    mixed = open_source("mixture", {"sources": options}, "train", 1)
    plain, cut = opened("digits", limit=None), opened("digits", limit=None, augment="standard")
    data, words = Indexed(mixed), noise(4, np.arange(4))
    numbers = np.array([3, len(plain) + 3, 8, len(plain) + 8])
    raw = mixed.fetch_drawn(numbers, words)
    assert isinstance(raw, dict)
    images, _ = data.finish({name: torch.from_numpy(column) for name, column in raw.items()}, torch.float32)  # type: ignore[misc]
    for source, rows in ((plain, [0, 2]), (cut, [1, 3])):
        own = source.fetch_drawn(np.array([3, 8]), words[rows])
        expected, _ = source.finish(tuple(torch.from_numpy(column) for column in own), torch.float32)
        assert torch.equal(images[rows], expected)
