"""`mnist`: the official idx files, as they are or gzipped. Their test set is used for validation."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from gradus.data.source import Source
from gradus.data.sources.image import ImageFormat, ImageOptions, MemoryImages, Pixels
from gradus.data.sources.options import ExistingPath
from gradus.data.split import Split, whole

PREFIXES: dict[Split, str] = {"train": "train", "validation": "t10k"}
UNSIGNED_BYTES = 8  # the third byte of an idx file: its element type; the fourth is the number of dimensions
CLASSES = 10


class Mnist(ImageOptions):
    use = "mnist"
    content = "images"

    path: ExistingPath

    def image_shape(self) -> tuple[int, int, int] | None:
        """From the header of the training images; None if there is none, which opening them explains."""
        header = self._header("train")
        return (1, *header[1:]) if header is not None else None

    def images_in_memory(self, split: Split) -> int | None:
        header = self._header(split)
        if header is None:
            return None
        return whole(header[0]).first(self.limit if split == "train" else None).length

    def _header(self, split: Split) -> tuple[int, int, int] | None:
        """How many images there are, their height and their width."""
        name = f"{PREFIXES[split]}-images-idx3-ubyte"
        for file, opened in ((self.path / name, Path.open), (self.path / f"{name}.gz", gzip.open)):
            try:
                with opened(file, "rb") as stream:
                    header = stream.read(16)
            except (OSError, EOFError, zlib.error):
                continue
            if len(header) == 16:
                count, height, width = np.frombuffer(header[4:], ">u4")
                return int(count), int(height), int(width)
        return None

    def open(self, split: Split, seed: int) -> Source:
        images = self._read(f"{PREFIXES[split]}-images-idx3-ubyte", dimensions=3)
        labels = self._read(f"{PREFIXES[split]}-labels-idx1-ubyte", dimensions=1)
        if len(images) != len(labels):
            raise self.refuse("path", f"{self.path} has {len(images)} {split} images but {len(labels)} labels")
        if labels.size and labels.max() >= CLASSES:
            raise self.refuse("path", f"{self.path} has {split} label {labels.max()}", allowed="labels 0 to 9")
        part = self.limited(whole(len(images)), len(images), split, str(self.path))
        form = ImageFormat((1, *images.shape[1:]), CLASSES, mean=(0.1307,), deviation=(0.3081,), mirrors=False)
        return MemoryImages(images[:, None], labels.astype(np.int64), part, form, self.augment_of(split))

    def _read(self, name: str, dimensions: int) -> Pixels:
        plain, zipped = self.path / name, self.path / f"{name}.gz"
        file = plain if plain.is_file() else zipped
        if not file.is_file():
            raise self.refuse(
                "path", f"neither {name} nor {name}.gz is in {self.path}", allowed="the official idx files"
            )
        data = self._content(file)
        header_bytes = 4 + 4 * dimensions
        magic, expected_magic = data[:4], bytes([0, 0, UNSIGNED_BYTES, dimensions])
        if magic != expected_magic or len(data) < header_bytes:
            message = (
                f"{file} begins with {magic.hex(' ')}; an idx file of this kind begins with {expected_magic.hex(' ')}"
            )
            raise self.refuse("path", message)
        shape = [int(size) for size in np.frombuffer(data[4:header_bytes], ">u4")]
        expected_bytes = header_bytes + math.prod(shape)
        if len(data) != expected_bytes:
            message = f"{file} has {len(data)} bytes; its header {shape} announces {expected_bytes}"
            raise self.refuse("path", message, allowed=f"{expected_bytes} bytes")
        return np.frombuffer(data, np.uint8, offset=header_bytes).reshape(shape)

    def _content(self, file: Path) -> bytes:
        if file.suffix != ".gz":
            return file.read_bytes()
        try:
            return gzip.decompress(file.read_bytes())
        except (OSError, EOFError, zlib.error) as error:
            raise self.refuse("path", f"{file} cannot be unzipped: {error}") from error
