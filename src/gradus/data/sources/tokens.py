"""`tokens`: text that was turned into token ids beforehand, as a flat binary file that is mapped, not read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradus.data.order import Indices
from gradus.data.source import Source
from gradus.data.sources.options import Count, ExistingPath, Options
from gradus.data.sources.text import Masking, Objective, TextWindows, Tokens
from gradus.data.split import Split, blocks, whole
from gradus.schema.errors import InputError

VALIDATION_NAMES = ("val.bin", "validation.bin")


class TokenFile(Options):
    use = "tokens"
    content = "text"

    path: ExistingPath  # a file, or a folder with train.bin and perhaps val.bin or validation.bin
    context: Count
    dtype: Literal["uint16", "uint32"] = "uint16"
    vocabulary: Count | None = None
    objective: Objective = "next"
    mask_token: int | None = None

    def open(self, split: Split, seed: int) -> Source:
        masking = self._masking(seed)
        file, published = self._file(split)
        width = np.dtype(self.dtype).itemsize
        size_bytes = file.stat().st_size
        if size_bytes % width:
            message = f"{file} has {size_bytes} bytes, which is no multiple of {width}, the bytes in one {self.dtype}"
            raise self.refuse("path", message, allowed=f"a multiple of {width} bytes")
        tokens = size_bytes // width
        length = TextWindows.count(tokens, self.context)
        origin = f"{file} has {tokens} tokens, a window is context + 1 = {self.context + 1}"
        part = whole(length) if published else blocks(length, self.validation, split)
        part = self.limited(part, length, split, origin)
        text = np.memmap(file, self.dtype, mode="r")
        return MappedWindows(text, part, self.context, self.vocabulary, masking)

    def _file(self, split: Split) -> tuple[Path, bool]:
        """The file with this split, and whether it holds this split only."""
        if self.path.is_file():
            return self.path, False
        train = self.path / "train.bin"
        validation = next((self.path / name for name in VALIDATION_NAMES if (self.path / name).is_file()), None)
        if not train.is_file():
            raise self.refuse("path", f"{train} does not exist", allowed="a file, or a folder with train.bin")
        return (validation if validation and split == "validation" else train), validation is not None

    def _masking(self, seed: int) -> Masking | None:
        if self.objective == "next":
            return None
        if self.vocabulary is None:
            raise self.refuse(
                "vocabulary", "the objective 'masked' draws random tokens: how many are there?", allowed=">= 1"
            )
        largest = int(np.iinfo(self.dtype).max)
        if self.vocabulary > largest + 1:
            message = f"'masked' draws tokens below {self.vocabulary}, but {self.dtype} ends at {largest}"
            raise self.refuse("vocabulary", message, allowed=f"1 to {largest + 1}")
        allowed = f"0 to {self.vocabulary - 1}"
        if self.mask_token is None or not 0 <= self.mask_token < self.vocabulary:
            message = f"the objective 'masked' needs the id of the mask token, {allowed}; found {self.mask_token}"
            raise self.refuse("mask_token", message, allowed=allowed)
        return Masking(seed, self.mask_token, self.vocabulary)


class MappedWindows(TextWindows):
    """Windows of a file that may be larger than memory."""

    text: np.memmap[Any, Any]

    @property
    def columns(self) -> None:
        return None

    def windows(self, indices: Indices) -> Tokens:
        windows = super().windows(indices)
        # Here it is one comparison; on a GPU, an id beyond the embedding is an assertion that names nobody.
        largest = int(windows.max(initial=0))
        if self.vocabulary is not None and largest >= self.vocabulary:
            raise InputError(
                f"data.vocabulary: {self.text.filename} has token {largest}, the vocabulary is {self.vocabulary}",
                field="data.vocabulary",
                found=self.vocabulary,
                allowed=f"more than {largest}",
            )
        return windows

    def __getstate__(self) -> dict[str, Any]:
        # numpy would pickle the whole content of the map; a loader's worker process maps the file for itself.
        return self.__dict__ | {"text": (self.text.filename, self.text.dtype)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        filename, dtype = state["text"]
        self.__dict__.update(state, text=np.memmap(filename, dtype, mode="r"))
