"""gradus for images: a folder with gradus, what it depends on (without torch), and the program that starts it there.

It lies where all nodes see it and is bound into the container. Its name has a digest of what is in it, so that it is
made once; and a job that waits in the queue runs the gradus that it was submitted with.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path
from typing import Any

import gradus
from gradus.launcher.container_runtimes import CROSSING

_SOURCE = Path(gradus.__file__).parent
_NEVER_TAKEN = ("torch",)  # and so nothing that it depends on, which comes with it
_ENTRY = ("image_entry.sh", "image_entry.py")
_REQUIREMENT = re.compile(r"^([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?$")


@dataclass(frozen=True)
class Package:
    """A distribution that is copied, under the name that packages have among themselves."""

    name: str
    version: str
    tags: tuple[str, ...]
    requires: tuple[tuple[str, str], ...]
    distribution: Distribution = field(compare=False, repr=False)


@dataclass(frozen=True)
class ImageSoftware:
    """What goes into the folder, and where it is, written or not."""

    folder: Path
    packages: tuple[Package, ...]

    @property
    def entry(self) -> str:
        return str(self.folder / "image_entry.sh")

    @property
    def enroot_settings(self) -> str:
        return str(self.folder / "enroot.sh")

    def write(self) -> None:
        """Make the folder, whole or not at all."""
        if self.folder.exists():
            return
        building = self.folder.with_name(f".{self.folder.name}.{uuid.uuid4().hex[:8]}")
        building.mkdir(mode=0o700, parents=True)
        try:
            self._fill(building)
            building.rename(self.folder)
        except OSError:
            if not self.folder.exists():  # else somebody else was quicker
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)

    def _fill(self, folder: Path) -> None:
        (folder / "home").mkdir()
        for name in _ENTRY:
            shutil.copyfile(_SOURCE / "launcher" / name, folder / name)
        (folder / "software.json").write_text(json.dumps(self.manifest(), indent=1))
        names = "|".join(CROSSING)
        (folder / "enroot.sh").write_text(f"environ() {{ env | grep -E '^({names})[A-Za-z0-9_]*='; }}\n")
        for package in self.packages:
            place = folder / "packages" / package.name
            for relative, source in _files(package.distribution):
                (place / relative).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, place / relative)

    def manifest(self) -> dict[str, Any]:
        return {
            "python": ">=3.10",
            "packages": {
                package.name: {"version": package.version, "tags": package.tags, "requires": package.requires}
                for package in self.packages
            },
        }


@functools.cache
def image_software(place: Path) -> ImageSoftware:
    """The software of this very interpreter, for a folder in `place`. Nothing is written yet.

    Once in a process: a script that names the folder, and the folder itself, are of one moment.
    """
    packages = tuple(_packages())
    digest = hashlib.sha256()
    for package in packages:
        digest.update(f"{package.name}=={package.version} {package.tags}\n".encode())
    for relative, source in _gradus_files():
        digest.update(f"{relative}\n".encode() + source.read_bytes())
    return ImageSoftware(Path(os.path.abspath(place)) / f"gradus-{digest.hexdigest()[:16]}", packages)


def normalised(name: str) -> str:
    """The name as packages compare it: PyYAML and pyyaml are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _packages() -> list[Package]:
    """gradus and everything that it needs here, without torch."""
    found: dict[str, Package] = {}
    wanted = ["gradus"]
    while wanted:
        name = wanted.pop()
        if name in found or name in _NEVER_TAKEN:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # the image must have it
        requires = tuple(_requirements(distribution))
        tags = re.findall(r"^Tag: (\S+)$", distribution.read_text("WHEEL") or "", re.MULTILINE) or ["py3-none-any"]
        found[name] = Package(name, distribution.version, tuple(tags), requires, distribution)
        wanted += [required for required, _ in requires]
    return [found[name] for name in sorted(found)]


def _requirements(distribution: Distribution) -> Iterator[tuple[str, str]]:
    for line in distribution.requires or ():
        parts = _REQUIREMENT.match(line)
        if parts is None:
            continue
        name, specifier, marker = normalised(parts[1]), parts[2].strip(), parts[3]
        # Of what is needed under a condition (a version of Python, a system), that which is here is needed here.
        if marker and ("extra" in marker or not _is_installed(name)):
            continue
        yield name, specifier


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _files(distribution: Distribution) -> Iterator[tuple[Path, Path]]:
    """The files of a distribution, below the folder of packages and where they are."""
    own = normalised(distribution.name) == "gradus"
    if own:
        yield from _gradus_files()
    for file in distribution.files or ():
        source = Path(str(file.locate()))
        # Of numpy alone, tests are half of the files.
        useless = bool({"..", "__pycache__", "tests"} & set(file.parts)) or file.suffix in (".pyc", ".pth", ".pyi")
        if not useless and source.is_file() and not (own and file.parts[0] == "gradus"):
            yield Path(*file.parts), source


def _gradus_files() -> Iterator[tuple[Path, Path]]:
    for source in sorted(_SOURCE.rglob("*")):
        if source.is_file() and "__pycache__" not in source.parts:
            yield Path("gradus") / source.relative_to(_SOURCE), source
