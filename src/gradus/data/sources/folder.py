"""`images`: a folder of pictures for each class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from gradus.data.order import Indices
from gradus.data.source import Batch, Source
from gradus.data.sources.image import ImageFormat, ImageSource, Pixels
from gradus.data.sources.options import Count, ExistingPath, Options
from gradus.data.split import Part, Split, scattered, whole
from gradus.schema.errors import InputError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# ImageNet's, which most pretrained vision models expect.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolder(Options):
    use = "images"
    content = "images"

    path: ExistingPath  # has the class folders, or train/ and perhaps val/ or validation/ that have them
    size: Count = 224

    def image_shape(self) -> tuple[int, int, int]:
        return 3, self.size, self.size

    def open(self, split: Split, seed: int) -> Source:
        self._pillow()
        train = self.path / "train"
        train = train if train.is_dir() else self.path
        validation = next((self.path / name for name in ("val", "validation") if (self.path / name).is_dir()), None)
        published = train != self.path and validation is not None
        root = validation if published and validation and split == "validation" else train

        classes = subfolders(train)
        unknown = sorted(set(subfolders(root)) - set(classes))
        if unknown:
            raise self.refuse("path", f"{root} has classes that {train} has not: {', '.join(unknown)}", allowed=classes)
        names, labels = [], []
        for label, name in enumerate(classes):
            files = sorted(file.name for file in (root / name).glob("*") if file.suffix.lower() in SUFFIXES)
            names += [f"{name}/{file}" for file in files]
            labels += [label] * len(files)

        length = len(names)
        part = whole(length) if published else scattered(length, self.validation, split)
        part = self.limited(part, length, split, f"{root} has {len(classes)} class folders with {length} images")
        form = ImageFormat((3, self.size, self.size), len(classes), MEAN, DEVIATION)
        return FolderImages(root, names, np.array(labels, np.int64), part, form)

    def _pillow(self) -> None:
        try:
            import PIL  # noqa: F401
        except ImportError:
            message = "source 'images' needs Pillow, which is not installed"
            raise self.refuse("use", message, hint='pip install "gradus[images]"') from None


def subfolders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


class FolderImages(ImageSource):
    """Pictures that are decoded when they are asked for."""

    def __init__(self, root: Path, names: list[str], labels: Indices, part: Part, form: ImageFormat) -> None:
        super().__init__(part.length, form)
        self.root = root
        self.names = names
        self.labels = labels
        self.part = part

    def fetch(self, indices: Indices) -> Batch:
        chosen = self.part.locate(indices)
        images = np.empty((len(chosen), *self.form.shape), np.uint8)
        for row, index in enumerate(chosen):
            images[row] = decoded(self.root / self.names[index], self.form.shape[1]).transpose(2, 0, 1)
        return images, self.labels[chosen]


def decoded(file: Path, size: int) -> Pixels:
    """[size, size, 3]: the shorter side resized to `size`, and the middle of the longer one."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            picture.draft("RGB", (size, size))  # a large JPEG is decoded at a fraction of its size
            square = centred(picture.convert("RGB"), size)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError(f"data.path: {file} cannot be decoded: {error}", field="data.path", found=str(file)) from error
    return np.asarray(square)


def centred(picture: Any, size: int) -> Any:
    from PIL import Image

    side = min(picture.size)
    left, top = ((extent - side) / 2 for extent in picture.size)
    box = (left, top, left + side, top + side)
    return picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
