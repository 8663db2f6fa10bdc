"""`images`: a folder of pictures for each class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradus.data.images import Augment, Decoder, check_decoder, pictures
from gradus.data.order import Indices, Words
from gradus.data.source import Batch, Source
from gradus.data.sources.image import Augmented, ImageFormat, ImageOptions, ImageSource
from gradus.data.sources.options import Count, ExistingPath
from gradus.data.split import Part, Split, scattered, whole
from gradus.schema.errors import GradusError, InputError

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# ImageNet's, which most pretrained vision models expect.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolder(ImageOptions):
    use = "images"
    content = "images"

    path: ExistingPath  # has the class folders, or train/ and perhaps val/ or validation/ that have them
    size: Count = 224
    decoder: Decoder = "auto"  # another library in the place of simplejpeg and Pillow

    def check(self) -> None:
        check_decoder(self.decoder)

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
        augment = self.augment_of(split)
        return FolderImages(root, names, np.array(labels, np.int64), part, form, augment, self.decoder)

    def _pillow(self) -> None:
        try:
            import PIL  # noqa: F401
        except ImportError:
            message = "source 'images' needs Pillow, which is not installed"
            raise self.refuse("use", message, hint='pip install "gradus[images]"') from None


def subfolders(root: Path) -> list[str]:
    return sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []


class FolderImages(Augmented, ImageSource):
    """Pictures that are decoded when they are asked for."""

    def __init__(
        self,
        root: Path,
        names: list[str],
        labels: Indices,
        part: Part,
        form: ImageFormat,
        augment: Augment = "none",
        decoder: Decoder = "auto",
    ) -> None:
        super().__init__(part.length, form)
        self.root = root
        self.names = names
        self.labels = labels
        self.part = part
        self.augment = augment
        self.decoder = decoder

    def _fetched(self, indices: Indices, draws: Words | None) -> Batch:
        chosen = self.part.locate(indices)
        files = [f"{self.root}/{self.names[index]}" for index in chosen]
        size, name = self.form.shape[1], files.__getitem__
        images = pictures(map(_content, files), len(files), size, draws, name, self.decoder)
        return images, self.labels[chosen]


def _content(file: str) -> bytes:
    try:
        with open(file, "rb", buffering=0) as stream:
            return stream.read()
    except OSError as error:
        kind = InputError if isinstance(error, FileNotFoundError) else GradusError  # a disk may work the next time
        raise kind(f"data.path: {file} cannot be read: {error}", field="data.path", found=file) from error
