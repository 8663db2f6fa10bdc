"""`stdlib-text`: the Python sources of this very interpreter. Real text, nothing to download."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gradus.data.source import Source
from gradus.data.sources.options import Count, Options
from gradus.data.sources.text import Masking, Objective, TextWindows
from gradus.data.split import Split, blocks

# Not the standard library, or not everywhere: many distributions ship Python without its tests.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
SEPARATOR = b"\0"
MASK_BYTE = 1  # a control character that no source file contains


class StdlibText(Options):
    use = "stdlib-text"
    content = "text"

    context: Count
    objective: Objective = "next"
    max_bytes: Count = 16 * 2**20  # all of it (about 12 MB in 700 files), read in well under a second

    def open(self, split: Split, seed: int) -> Source:
        root = Path(sysconfig.get_path("stdlib"))
        text = np.frombuffer(read_sources(root, self.max_bytes), np.uint8)
        length = TextWindows.count(len(text), self.context)
        origin = (
            f"{root} has {len(text)} bytes (max_bytes {self.max_bytes}), a window is context + 1 = {self.context + 1}"
        )
        part = self.limited(blocks(length, self.validation, split), length, split, origin)
        masking = Masking(seed, MASK_BYTE, vocabulary=256) if self.objective == "masked" else None
        return TextWindows(text, part, self.context, vocabulary=256, masking=masking)


def read_sources(root: Path, max_bytes: int) -> bytes:
    """The files in the order of their paths, separated by zero bytes, up to `max_bytes`."""
    text = bytearray()
    for path in sorted(source_files(root), key=lambda path: path.relative_to(root).as_posix()):
        text += path.read_bytes() + SEPARATOR
        if len(text) >= max_bytes:
            break
    return bytes(text[:max_bytes])


def source_files(root: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))
