"""Pictures: the same pixels whichever library decodes them, and cuts that follow from a random word alone."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gradus.data.cuts import NUMBERS, Cut, middle, random_cut, uniform
from gradus.data.images import ADAPTERS as ADAPTERS_OF
from gradus.data.images import check_decoder, pictures
from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.order import noise
from gradus.data.source import Source, open_source
from gradus.schema.errors import GradusError, InputError


def encoded(width: int, height: int, form: str = "JPEG", mode: str = "RGB", length: int = 1, **options: Any) -> bytes:
    """Waves of several lengths, so that every step of decoding has something to get wrong."""
    x, y = np.meshgrid(np.arange(width), np.arange(height))
    x, y = x / length, y / length
    waves = [128 + 60 * np.sin(x / 5 + channel) + 60 * np.cos(y / (3 + channel)) for channel in range(3)]
    stream = io.BytesIO()
    Image.fromarray(np.stack(waves, -1).astype(np.uint8)).convert(mode).save(stream, form, **options)
    return stream.getvalue()


def decoded(contents: list[bytes], size: int, draws: Any = None) -> np.ndarray:
    return pictures(contents, len(contents), size, draws, lambda row: f"picture {row}")


@pytest.fixture
def without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> Any:
    def decoded_by_pillow(*args: Any) -> np.ndarray:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "simplejpeg", None)
            return decoded(*args)

    return decoded_by_pillow


JPEGS = {
    "small": encoded(80, 64),
    "chroma kept": encoded(90, 70, subsampling=0),
    "progressive": encoded(150, 120, progressive=True),
    "grey": encoded(75, 81, mode="L"),
    "cmyk": encoded(75, 81, mode="CMYK"),
    "half": encoded(160, 130),
    "quarter, odd sides": encoded(321, 263),
    "eighth": encoded(517, 700),
}


@pytest.mark.parametrize("augmented", [False, True])
def test_both_decoders_give_the_same_pixels(without_simplejpeg: Any, augmented: bool) -> None:
    """So that a machine without one of them trains on the same data."""
    draws = noise(4, np.arange(len(JPEGS))) if augmented else None
    found = decoded(list(JPEGS.values()), 64, draws)
    expected = without_simplejpeg(list(JPEGS.values()), 64, draws)
    for name, one, other in zip(JPEGS, found, expected, strict=True):
        assert np.array_equal(one, other), name


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_other_formats_are_pictures_too(form: str) -> None:
    assert decoded([encoded(30, 40, form)], 16).shape == (1, 3, 16, 16)


def test_resizing_is_what_pillow_calls_bilinear() -> None:
    content = encoded(100, 100, "PNG")
    for size in (32, 64, 99, 150):
        expected = np.asarray(Image.open(io.BytesIO(content)).resize((size, size), Image.Resampling.BILINEAR))
        difference = decoded([content], size)[0].transpose(1, 2, 0).astype(int) - expected
        assert abs(difference).max() <= 1


def test_a_picture_of_the_wanted_size_is_left_as_it_is() -> None:
    content = encoded(64, 64, "PNG")
    assert np.array_equal(decoded([content], 64)[0].transpose(1, 2, 0), np.asarray(Image.open(io.BytesIO(content))))


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size_and_looks_the_same() -> None:
    content = encoded(517, 700, length=8, quality=95)
    whole = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    cut = middle(517, 700)
    part = whole[cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    expected = np.asarray(Image.fromarray(part).resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
    assert abs(decoded([content], 64)[0].transpose(1, 2, 0) - expected).mean() < 3


@pytest.mark.parametrize("content", [b"", b"no picture", JPEGS["small"][:400], b"\xff\xd8\xff" + bytes(300)])
def test_what_cannot_be_decoded_is_named(content: bytes) -> None:
    with pytest.raises(InputError, match="picture 1 cannot be decoded") as caught:
        decoded([JPEGS["small"], content], 32)
    assert caught.value.details["field"] == "data.path"


def test_memory_that_was_mapped_is_read_in_place() -> None:
    assert np.array_equal(decoded([memoryview(JPEGS["small"])], 32), decoded([JPEGS["small"]], 32))  # type: ignore[list-item]


# --- other libraries

ADAPTERS: list[Any] = ["dali", "spdl"]


def installed(decoder: Any) -> bool:
    try:
        check_decoder(decoder)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("decoder", ADAPTERS)
def test_a_library_that_is_missing_comes_with_the_command_to_run(
    decoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=rf"data\.decoder: {decoder} needs the package") as caught:
        augmented(folder(tmp_path), decoder=decoder)
    assert str(caught.value.hint).startswith("pip install ")


@pytest.mark.parametrize("decoder", ADAPTERS)
def test_another_library_sees_the_same_part_of_a_picture(decoder: Any) -> None:
    if not installed(decoder):
        pytest.skip(f"{decoder} is not installed")
    contents = [encoded(90, 70, length=3, subsampling=0), encoded(75, 81, mode="L"), encoded(60, 60, "PNG")]
    for draws in (None, noise(3, np.arange(3))):
        expected = pictures(contents, 3, 48, draws, str)
        found = pictures(contents, 3, 48, draws, str, decoder)
        assert abs(found.astype(int) - expected).mean() < 1
    with pytest.raises(InputError, match="picture 1 cannot be decoded"):
        pictures([contents[0], b"no picture"], 2, 48, None, lambda row: f"picture {row}", decoder)


def test_a_library_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ADAPTERS_OF, "dali", ModuleType("broken"))
    with pytest.raises(GradusError, match=r"data\.decoder: dali fails where Pillow does not: AttributeError") as caught:
        pictures([JPEGS["small"]], 1, 32, None, str, "dali")
    assert caught.value.hint == "use data.decoder=auto"


# --- cuts


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 2**63))
def test_every_cut_lies_inside_its_picture(width: int, height: int, key: int) -> None:
    for numbers in uniform(noise(key, np.arange(4))):
        cut = random_cut(numbers, width, height)
        assert cut.left >= 0
        assert cut.top >= 0
        assert 0 < cut.width <= width - cut.left
        assert 0 < cut.height <= height - cut.top


def test_cuts_have_the_areas_and_sides_that_were_published() -> None:
    cuts = [random_cut(numbers, 400, 400) for numbers in uniform(noise(1, np.arange(4000)))]
    areas = np.array([cut.width * cut.height for cut in cuts]) / 400**2
    ratios = np.array([cut.width / cut.height for cut in cuts])
    assert 0.075 < areas.min() < 0.1
    assert areas.max() > 0.95
    assert 0.47 < areas.mean() < 0.53, "nearly uniform: the largest crops rarely fit, and are drawn again"
    assert 3 / 4 - 0.02 < ratios.min() < 0.78
    assert 1.29 < ratios.max() < 4 / 3 + 0.02
    assert abs(np.log(ratios).mean()) < 0.01, "as often wide as tall"
    assert 0.47 < np.mean([cut.mirrored for cut in cuts]) < 0.53
    places = np.array([cut.left / max(1, 400 - cut.width) for cut in cuts if cut.width < 300])
    assert 0.47 < places.mean() < 0.53


def test_of_a_strip_the_middle_is_taken() -> None:
    numbers = np.full(NUMBERS, 0.99)  # nearly all of the area: it never fits
    assert random_cut(numbers, 1000, 100) == Cut(433, 0, 133, 100)
    assert random_cut(numbers, 100, 1000) == Cut(0, 433, 100, 133)


def test_a_mirrored_picture_is_mirrored() -> None:
    words = noise(2, np.arange(64))
    turned = np.array([random_cut(numbers, 64, 64).mirrored for numbers in uniform(words)])
    left_dark = np.zeros((64, 64, 3), np.uint8)
    left_dark[:, 32:] = 200
    stream = io.BytesIO()
    Image.fromarray(left_dark).save(stream, "PNG")
    wide = np.array([random_cut(numbers, 64, 64).width > 56 for numbers in uniform(words)])  # has both sides in it
    images = decoded([stream.getvalue()] * 64, 16, words)
    assert {bool(each) for each in turned[wide]} == {True, False}
    dark_right = images[:, 0, 8, 0] > images[:, 0, 8, -1]
    assert np.array_equal(dark_right[wide], turned[wide])


# --- in a source


def folder(root: Path, count: int = 12) -> Path:
    for name in ("ant", "bee"):
        (root / name).mkdir()
        for number in range(count // 2):
            (root / name / f"{number}.jpg").write_bytes(encoded(60 + number, 50, quality=80 + number))
    return root


def augmented(root: Path, split: Any = "train", **options: Any) -> Source:
    return open_source("images", {"path": str(root), "size": 24, "augment": "standard", **options}, split, 3)


def by_position(source: Source, slices: list[Slices], seed: int = 5, workers: int = 0) -> dict[int, bytes]:
    found = {}
    for of_rank in slices:
        loader = Loader(Indexed(source), of_rank, torch.device("cpu"), torch.float32, seed=seed, workers=workers)
        for micro in loader.micro_batches(0, 3):
            for offset in range(micro.samples):
                found[micro.position + offset] = micro.inputs[0][offset].numpy().tobytes()  # type: ignore[index]
    return found


def test_augmentation_follows_from_seed_and_position_alone(tmp_path: Path) -> None:
    """Not from the rank, the worker or the size of a micro-batch."""
    source = augmented(folder(tmp_path), validation=0)
    alone = by_position(source, [Slices(12, 12, 1, 0, 36)])
    assert len(set(alone.values())) == 36, "each of three epochs sees each picture in another way"
    assert by_position(source, [Slices(12, 2, 3, rank, 36) for rank in (0, 1)], workers=1) == alone
    assert by_position(source, [Slices(12, 12, 1, 0, 36)], seed=6) != alone


def test_validation_is_never_augmented(tmp_path: Path) -> None:
    folder(tmp_path)
    plain = augmented(tmp_path, "validation", augment="none", validation=0.5)
    drawn = augmented(tmp_path, "validation", validation=0.5)
    words = noise(1, np.arange(len(drawn)))
    assert np.array_equal(drawn.fetch_drawn(np.arange(6), words)[0], plain.fetch(np.arange(6))[0])  # type: ignore[index]


def test_an_unknown_augmentation_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data\.augment: found 'heavy'.*'none' or 'standard'"):
        augmented(folder(tmp_path), augment="heavy")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    source = augmented(folder(tmp_path), validation=0)
    (tmp_path / "ant" / "3.jpg").unlink()
    with pytest.raises(InputError, match=r"ant/3\.jpg cannot be read"):
        source.fetch(np.arange(len(source)))


def test_the_fallback_is_as_good_at_random_cuts(without_simplejpeg: Any) -> None:
    images = without_simplejpeg([JPEGS["eighth"]] * 8, 32, noise(9, np.arange(8)))
    assert len({image.tobytes() for image in images}) == 8
    assert math.isfinite(float(images.mean()))
