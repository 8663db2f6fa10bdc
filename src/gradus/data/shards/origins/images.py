"""Pictures in a folder for each class."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gradus.data.shards.origins.origin import SPLITS, Sample, Sent, Unit, grouped
from gradus.data.shards.parts import kind_of
from gradus.data.shards.tar import BLOCK, Member
from gradus.data.split import Split, scattered
from gradus.schema.errors import InputError


class Picture(NamedTuple):
    file: str  # below the folder
    key: str
    label: int
    size: int
    modified: int


@dataclass(frozen=True)
class ImageFolders(Sent):
    """A folder for each class, as the source `images` reads them."""

    path: Path
    validation: float = 0.0

    @cached_property
    def _layout(self) -> Any:
        from gradus.data.sources.folder import subfolders

        train = self.path / "train" if (self.path / "train").is_dir() else self.path
        held = next((self.path / name for name in ("val", "validation") if (self.path / name).is_dir()), None)
        roots = {"train": train}
        if train != self.path and held is not None:
            roots["validation"] = held
        classes = subfolders(train)
        unknown = sorted(set(subfolders(roots.get("validation", train))) - set(classes))
        if unknown:
            message = f"{held} has classes that {train} has not: {', '.join(unknown)}"
            raise InputError(f"SOURCE: {message}", field="SOURCE", found=unknown, allowed=classes)
        return roots, tuple(classes)

    @property
    def classes(self) -> tuple[str, ...]:
        return self._layout[1]  # type: ignore[no-any-return]

    @cached_property
    def pictures(self) -> dict[Split, list[Picture]]:
        from gradus.data.sources.folder import SUFFIXES

        roots, classes = self._layout
        found: dict[Split, list[Picture]] = {"train": [], "validation": []}
        for split, root in roots.items():
            for label, name in enumerate(classes):
                if not (root / name).is_dir():
                    continue
                prefix = (root / name).relative_to(self.path)
                keys: set[str] = set()
                entries = sorted(os.scandir(root / name), key=lambda entry: entry.name)
                for entry in entries:
                    if os.path.splitext(entry.name)[1].lower() in SUFFIXES and entry.is_file():
                        key, stat = _unique(entry.name, keys), entry.stat()
                        names = f"{prefix}/{entry.name}", f"{prefix}/{key}"
                        found[split].append(Picture(*names, label, stat.st_size, stat.st_mtime_ns))
        if not found["validation"] and self.validation:
            whole = found["train"]
            for each in SPLITS:
                part = scattered(len(whole), self.validation, each)
                found[each] = [whole[i] for i in part.locate(np.arange(part.length)).tolist()]
        return found

    @property
    def identity(self) -> Any:
        digest = hashlib.sha256()
        for pictures in self.pictures.values():
            for picture in pictures:
                digest.update(f"{picture.file}\0{picture.size}\0{picture.modified}\n".encode())
        return {"path": str(self.path.resolve()), "validation": self.validation, "files": digest.hexdigest()}

    def units(self, shard_bytes: int) -> list[Unit]:
        units: list[Unit] = []
        for split, pictures in self.pictures.items():
            # Two headers, the picture in whole blocks, and a block with the class.
            sizes = [3 * BLOCK + p.size + -p.size % BLOCK for p in pictures]
            for chosen in grouped(sizes, shard_bytes - 2 * BLOCK):
                units.append(Unit(split, sum(p.size for p in pictures[chosen]), tuple(pictures[chosen])))
        return units

    def samples(self, number: int, unit: Unit) -> Iterator[Sample]:
        for picture in unit.what:
            data = (self.path / picture.file).read_bytes()
            members = {
                "image": Member(kind_of(picture.file), data),
                "label": Member("cls", str(picture.label).encode()),
            }
            yield Sample(picture.key, members, picture.label, None, picture.size)


def holds_images(folder: Path) -> bool:
    """Whether a folder has class folders with pictures in them, perhaps below train."""
    from gradus.data.sources.folder import SUFFIXES, subfolders

    root = folder / "train" if (folder / "train").is_dir() else folder
    return any(
        os.path.splitext(entry.name)[1].lower() in SUFFIXES
        for name in subfolders(root)
        for entry in os.scandir(root / name)
    )


def _unique(name: str, keys: set[str]) -> str:
    """The name up to its suffix, without dots: WebDataset takes a key to end at the first one."""
    stem, suffix = os.path.splitext(name)
    key = plain = stem.replace(".", "_")
    count = 1
    while key in keys:
        count += 1
        key = f"{plain}-{suffix[1:]}" if count == 2 else f"{plain}-{suffix[1:]}-{count}"
    keys.add(key)
    return key
