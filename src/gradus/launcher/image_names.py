"""Names of images: one, however it was written, in the form that each container runtime wants."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from gradus.schema.errors import InputError

_FIELD = "container.image"
_SQUASHED = (".sqsh", ".sqfs", ".squashfs")
_FILES = (*_SQUASHED, ".sif", ".tar")
_REFERENCE = re.compile(
    r"(?:(?P<user>\$?[\w.+-]+)@(?=[^@]*#))?"
    r"(?:(?P<registry>[A-Za-z0-9][A-Za-z0-9.-]*(?::\d+)?)(?P<mark>[#/]))?"
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)

_OTHER_KINDS = {
    "pyxis": "make a squashfs file of it: enroot import -o IMAGE.sqsh docker://REGISTRY#NAME:TAG",
    "enroot": "make a squashfs file of it: enroot import -o IMAGE.sqsh docker://REGISTRY#NAME:TAG",
    "apptainer": "make a SIF file of it: apptainer pull IMAGE.sif docker://REGISTRY/NAME:TAG",
    "charliecloud": "make a folder of it: ch-image pull REGISTRY/NAME:TAG && ch-convert REGISTRY/NAME:TAG FOLDER",
    "podman": "give the image's name, REGISTRY/NAME:TAG, or what `podman save -o IMAGE.tar NAME` wrote",
}


@dataclass(frozen=True)
class RegistryImage:
    """An image in a registry; no registry means Docker Hub."""

    name: str
    registry: str | None = None
    tag: str | None = None
    digest: str | None = None
    user: str | None = None

    @property
    def _version(self) -> str:
        return (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")

    @property
    def docker(self) -> str:
        """As docker, podman and charliecloud have it: nvcr.io/nvidia/pytorch:25.01-py3."""
        return (f"{self.registry}/" if self.registry else "") + self.name + self._version

    @property
    def enroot(self) -> str:
        """As enroot and pyxis have it, which end the registry with a `#`: nvcr.io#nvidia/pytorch:25.01-py3."""
        user = f"{self.user}@" if self.user else ""
        return user + (f"{self.registry}#" if self.registry else "") + self.name + self._version

    @property
    def qualified(self) -> str:
        """With Docker Hub by its name: podman does not guess where a short name is from."""
        if self.registry:
            return self.docker
        return f"docker.io/{'' if '/' in self.name else 'library/'}{self.docker}"


@dataclass(frozen=True)
class StoredImage:
    """An image in a file or a folder."""

    path: Path

    @property
    def squashed(self) -> bool:
        return self.path.suffix in _SQUASHED

    @property
    def kind(self) -> str:
        return "a folder" if self.path.suffix not in _FILES else f"a {self.path.suffix} file"


Image = RegistryImage | StoredImage


def image_from(text: str) -> Image:
    """The image that a name stands for: a path, or a reference to a registry in docker's or in enroot's form.

    >>> image_from("nvcr.io#nvidia/pytorch:25.01-py3") == image_from("docker://nvcr.io/nvidia/pytorch:25.01-py3")
    True
    """
    if _is_path(text):
        return StoredImage(Path(os.path.abspath(os.path.expanduser(text))))
    found = _REFERENCE.fullmatch(text.removeprefix("docker://").removeprefix("dockerd://"))
    if found is None:
        raise InputError(
            f"{_FIELD}: {text!r} is neither a path nor the name of an image",
            hint="nvcr.io/nvidia/pytorch:TAG, or the path of a .sqsh or .sif file or of an image's folder",
            field=_FIELD,
            found=text,
        )
    registry, name = found["registry"], found["name"]
    # As docker tells them apart: `nvidia/pytorch` is a name on Docker Hub, and `nvcr.io/nvidia` has a registry.
    if registry and found["mark"] == "/" and not (re.search(r"[.:]", registry) or registry == "localhost"):
        registry, name = None, f"{registry}/{name}"
    return RegistryImage(name, registry, found["tag"], found["digest"], found["user"])


def _is_path(text: str) -> bool:
    return text.startswith(("/", ".", "~")) or text.endswith(_FILES) or ("://" not in text and Path(text).is_dir())


def check_image_is_there(image: Image, runtime: str) -> None:
    """Refuse a path at which there is nothing, and a kind of file that the runtime cannot run."""
    if not isinstance(image, StoredImage):
        return
    able = {
        "pyxis": image.squashed,
        "enroot": image.squashed,
        "apptainer": image.squashed or image.path.suffix == ".sif" or image.kind == "a folder",
        "charliecloud": image.squashed or image.kind == "a folder",
        "podman": image.path.suffix == ".tar" or image.kind == "a folder",
    }
    if not able[runtime]:
        raise InputError(
            f"{_FIELD}: {runtime} does not run {image.kind}: {image.path}",
            hint=_OTHER_KINDS[runtime],
            field=_FIELD,
            found=str(image.path),
        )
    if not image.path.exists():
        raise InputError(
            f"{_FIELD}: {image.path}: no such file or folder on this machine",
            hint="the path must be one that all nodes see",
            field=_FIELD,
            found=str(image.path),
        )
