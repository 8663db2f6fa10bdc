"""`cifar10`: the official binary version. Its test batch is used for validation."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradus.data.source import Source
from gradus.data.sources.image import ImageFormat, ImageOptions, MemoryImages, Pixels
from gradus.data.sources.options import ExistingPath
from gradus.data.split import Split, whole

FILES: dict[Split, tuple[str, ...]] = {
    "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    "validation": ("test_batch.bin",),
}
RECORDS_PER_FILE = 10_000
SHAPE = (3, 32, 32)
RECORD_BYTES = 1 + 3 * 32 * 32  # the label, then the red, green and blue planes
FORM = ImageFormat(SHAPE, 10, mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))


class Cifar10(ImageOptions):
    use = "cifar10"
    content = "images"

    path: ExistingPath

    def image_shape(self) -> tuple[int, int, int]:
        return SHAPE

    def images_in_memory(self, split: Split) -> int:
        return whole(len(FILES[split]) * RECORDS_PER_FILE).first(self.limit if split == "train" else None).length

    def open(self, split: Split, seed: int) -> Source:
        folder = self._folder()
        records = np.concatenate([self._read(folder / name) for name in FILES[split]])
        part = self.limited(whole(len(records)), len(records), split, str(folder))
        images, labels = records[:, 1:].reshape(-1, *SHAPE), records[:, 0].astype(np.int64)
        return MemoryImages(images, labels, part, FORM, self.augment_of(split))

    def _folder(self) -> Path:
        for folder in (self.path, self.path / "cifar-10-batches-bin"):
            if (folder / FILES["train"][0]).is_file():
                return folder
        wanted = f"the binary version: {', '.join(FILES['train'] + FILES['validation'])}"
        for folder in (self.path, self.path / "cifar-10-batches-py"):
            if (folder / "data_batch_1").is_file():
                message = (
                    f"{folder} is the Python version, refused because it is pickled: reading it could run any code"
                )
                raise self.refuse("path", message, allowed=wanted, hint="download cifar-10-binary.tar.gz instead")
        raise self.refuse("path", f"{FILES['train'][0]} is not in {self.path}", allowed=wanted)

    def _read(self, file: Path) -> Pixels:
        expected = RECORDS_PER_FILE * RECORD_BYTES
        found = file.stat().st_size if file.is_file() else 0
        if found != expected:
            message = f"{file} has {found} bytes, expected {expected} ({RECORDS_PER_FILE} x {RECORD_BYTES})"
            raise self.refuse("path", message, allowed=f"{expected} bytes")
        records = np.fromfile(file, np.uint8).reshape(RECORDS_PER_FILE, RECORD_BYTES)
        if records[:, 0].max() >= FORM.classes:
            raise self.refuse("path", f"{file} has label {records[:, 0].max()}", allowed="labels 0 to 9")
        return records
