"""Image sources: official files, folders, and what the model sees of them."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from gradus.data.source import Source, open_source
from gradus.data.sources import cifar10
from gradus.schema.errors import InputError


def opened(use: str, split: Any = "train", **options: Any) -> Source:
    return open_source(use, options, split, seed=1)


def everything(source: Source) -> tuple[np.ndarray, ...]:
    batch = source.fetch(np.arange(len(source)))
    assert isinstance(batch, tuple)
    return batch


# --- what the model sees


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_finished_images_are_normalised_nchw_with_int64_labels(dtype: torch.dtype) -> None:
    source = opened("synthetic-images", size=8, channels=3, classes=4, samples=500)
    raw, raw_labels = everything(source)
    images, labels = source.finish((torch.from_numpy(raw), torch.from_numpy(raw_labels)), dtype)
    assert raw.dtype == np.uint8
    assert images.dtype == dtype
    assert labels.dtype == torch.int64
    assert images.shape == (len(source), *source.sample_shape) == (450, 3, 8, 8)
    assert images.double().mean().item() == pytest.approx(0, abs=0.15)
    assert images.double().std().item() == pytest.approx(1, abs=0.15)


def test_each_channel_is_normalised_by_its_own_mean_and_deviation(tmp_path: Path) -> None:
    source = opened("images", path=str(image_folder(tmp_path, {"a": 3})), size=2)
    raw = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    images, _ = source.finish((raw, torch.tensor([0])), torch.float32)
    expected = [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    assert images[0, :, 0, 0].tolist() == pytest.approx(expected, rel=1e-5)
    assert raw.max() == 255  # the raw batch may be a resident column: it stays as it is


# --- digits


def test_digits_are_split_into_all_1797_images() -> None:
    train, validation = opened("digits"), opened("digits", "validation")
    assert (len(train), len(validation)) == (1617, 180)
    assert (train.classes, train.sample_shape) == (10, (1, 8, 8))
    assert set(everything(validation)[1]) == set(range(10))
    images, labels = everything(train)
    columns = train.columns
    assert isinstance(columns, tuple)
    assert np.array_equal(columns[0], images)
    assert np.array_equal(columns[1], labels)


@pytest.mark.parametrize(("size", "factor", "frame"), [(8, 1, 0), (28, 3, 2), (32, 4, 0), (35, 4, 1)])
def test_digits_are_enlarged_by_repetition_in_a_black_frame(size: int, factor: int, frame: int) -> None:
    small = everything(opened("digits", limit=5))[0]
    large = everything(opened("digits", limit=5, size=size, channels=3))[0]
    assert large.shape == (5, 3, size, size)
    inside = large[:, :, frame : frame + 8 * factor, frame : frame + 8 * factor]
    assert np.array_equal(inside[:, :, ::factor, ::factor], small.repeat(3, axis=1))
    assert large.sum() == inside.sum() == 3 * factor**2 * small.sum(dtype=np.int64)


def test_missing_scikit_learn_comes_with_the_command_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match="scikit-learn") as caught:
        opened("digits")
    assert caught.value.hint == 'pip install "gradus[digits]"'


# --- mnist


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist_folder(folder: Path, zipped: bool = False) -> Path:
    random = np.random.default_rng(0)
    for prefix, count in (("train", 7), ("t10k", 3)):
        images = random.integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8)
        for name, array in ((f"{prefix}-images-idx3-ubyte", images), (f"{prefix}-labels-idx1-ubyte", labels)):
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))
    return folder


@pytest.mark.parametrize("zipped", [False, True])
def test_mnist_reads_the_official_files(tmp_path: Path, zipped: bool) -> None:
    path = str(mnist_folder(tmp_path, zipped))
    train, validation = opened("mnist", path=path), opened("mnist", "validation", path=path)
    images, labels = everything(train)
    assert (train.sample_shape, train.classes, len(train), len(validation)) == ((1, 28, 28), 10, 7, 3)
    assert labels.tolist() == list(range(7))
    assert np.array_equal(images[:, 0], np.random.default_rng(0).integers(0, 256, (7, 28, 28), np.uint8))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", None, "neither train-images-idx3-ubyte nor"),
        ("train-images-idx3-ubyte", b"", "train-images-idx3-ubyte begins with "),
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x01" + bytes(20), "begins with 00 00 08 01; .* 00 00 08 03"),
        (
            "train-images-idx3-ubyte",
            idx(np.zeros((7, 2, 2), np.uint8))[:-1],
            "has 43 bytes; its header .* announces 44",
        ),
        ("train-labels-idx1-ubyte", idx(np.zeros(6, np.uint8)), "7 train images but 6 labels"),
        ("train-labels-idx1-ubyte", idx(np.full(7, 10, np.uint8)), "label 10"),
        ("train-labels-idx1-ubyte.gz", gzip.compress(bytes(100), mtime=0)[:-9], "cannot be unzipped"),
        ("train-labels-idx1-ubyte.gz", b"not gzip", "cannot be unzipped"),
    ],
)
def test_damaged_mnist_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    mnist_folder(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        opened("mnist", path=str(tmp_path))
    assert caught.value.details["field"] == "data.path"


def test_an_mnist_set_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.zeros((0, 28, 28), np.uint8)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(0, np.uint8)))
    with pytest.raises(InputError, match="'mnist' has no train samples"):
        opened("mnist", path=str(tmp_path))


# --- cifar10


@pytest.fixture
def small_cifar_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar10, "RECORDS_PER_FILE", 4)


def cifar_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    names = [name for names in cifar10.FILES.values() for name in names]
    for number, name in enumerate(names):
        records = np.full((4, 3073), number, np.uint8)
        records[:, 1025:2049] = 100 + number  # the green plane
        records.tofile(folder / name)
    return folder


@pytest.mark.usefixtures("small_cifar_files")
@pytest.mark.parametrize("inside", [".", "cifar-10-batches-bin"])
def test_cifar10_reads_the_official_binary_files(tmp_path: Path, inside: str) -> None:
    cifar_folder(tmp_path / inside)
    train, validation = (opened("cifar10", split, path=str(tmp_path)) for split in ("train", "validation"))
    images, labels = everything(train)
    assert (train.sample_shape, train.classes, len(train), len(validation)) == ((3, 32, 32), 10, 20, 4)
    assert labels.tolist() == np.repeat(range(5), 4).tolist()
    assert (images[:, 1] == 100 + labels[:, None, None]).all()
    assert (images[:, [0, 2]] == labels[:, None, None, None]).all()
    assert set(everything(validation)[1]) == {5}


@pytest.mark.usefixtures("small_cifar_files")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(3073 * 4 - 1), "data_batch_3.bin has 12291 bytes, expected 12292"),
        (b"", "data_batch_3.bin has 0 bytes"),
        (b"\x0a" * 3073 * 4, "data_batch_3.bin has label 10"),
    ],
)
def test_damaged_cifar10_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (cifar_folder(tmp_path) / "data_batch_3.bin").write_bytes(content)
    with pytest.raises(InputError, match=message):
        opened("cifar10", path=str(tmp_path))


def test_pickled_cifar10_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"not even a pickle")
    with pytest.raises(InputError, match="refused because it is pickled") as caught:
        opened("cifar10", path=str(tmp_path))
    assert "binary version" in caught.value.details["allowed"]


def test_a_folder_without_cifar10_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data_batch_1\.bin is not in"):
        opened("cifar10", path=str(tmp_path))


# --- images


def image_folder(root: Path, counts: dict[str, int], shape: tuple[int, int] = (6, 4)) -> Path:
    for label, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", shape, (10 * label, number, 0)).save(root / name / f"{number}.png")
    return root


def test_classes_are_the_sorted_folder_names_of_both_sides(tmp_path: Path) -> None:
    path = str(image_folder(tmp_path, {"ant": 10, "bee": 10}))
    train, validation = (opened("images", split, path=path, size=4) for split in ("train", "validation"))
    assert (train.classes, train.sample_shape, len(train), len(validation)) == (2, (3, 4, 4), 18, 2)
    seen = set()
    for source in (train, validation):
        images, labels = everything(source)
        assert (images[:, 0, 0, 0] == 10 * labels).all()
        seen |= {(int(label), int(number)) for label, number in zip(labels, images[:, 1, 0, 0], strict=True)}
    assert len(seen) == 20
    assert set(everything(opened("images", path=path, size=4, limit=8))[1]) == {0, 1}


@pytest.mark.parametrize("name", ["val", "validation"])
def test_a_folder_may_bring_its_own_validation_images(tmp_path: Path, name: str) -> None:
    image_folder(tmp_path / "train", {"ant": 2, "bee": 3})
    image_folder(tmp_path / name, {"bee": 4})
    train, validation = (opened("images", split, path=str(tmp_path), size=4) for split in ("train", "validation"))
    assert (len(train), len(validation)) == (5, 4)
    assert set(everything(validation)[1]) == {1}


def test_the_shorter_side_is_resized_and_the_middle_kept(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, 8:16] = 200
    Image.fromarray(pixels).save(tmp_path / "a" / "wide.png")
    Image.fromarray(pixels.transpose(1, 0, 2)).save(tmp_path / "a" / "tall.png")
    Image.fromarray(pixels[..., 0]).save(tmp_path / "a" / "grey.png")
    images, _ = everything(opened("images", path=str(tmp_path), size=4, validation=0))
    assert images.shape == (3, 3, 4, 4)
    assert (images[:, :, 1:3, 1:3] == 200).all()
    assert images.min() > 150  # smoothing mixes a little of the cut-off sides into the edge


def test_a_corrupt_image_is_named(tmp_path: Path) -> None:
    image_folder(tmp_path, {"ant": 1})
    picture = (tmp_path / "ant" / "0.png").read_bytes()
    for content in (b"no image", picture[: len(picture) // 2]):
        (tmp_path / "ant" / "0.png").write_bytes(content)
        with pytest.raises(InputError, match=r"ant/0\.png cannot be decoded"):
            opened("images", path=str(tmp_path), size=4)[0]


def test_a_validation_class_that_training_lacks_is_refused(tmp_path: Path) -> None:
    image_folder(tmp_path / "train", {"ant": 1})
    image_folder(tmp_path / "val", {"wasp": 1})
    with pytest.raises(InputError, match=r"classes that .*train has not: wasp"):
        opened("images", "validation", path=str(tmp_path), size=4)


def test_a_folder_without_images_is_refused_with_numbers(tmp_path: Path) -> None:
    (tmp_path / "ant").mkdir()
    with pytest.raises(InputError, match=r"'images' has no train samples: .*1 class folders with 0 images"):
        opened("images", path=str(tmp_path))


def test_missing_pillow_comes_with_the_command_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match="Pillow") as caught:
        opened("images", path=str(tmp_path))
    assert caught.value.hint == 'pip install "gradus[images]"'
