"""Environment and Container: the software that jobs find. Every value ends up, quoted, in a batch script."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from gradus.schema.scheduler import one_line
from gradus.schema.secrets import names_a_secret

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
_MOUNT = re.compile(r"(?P<source>[/~][^:]*)(?::(?P<target>/[^:]*))?(?::(?P<mode>ro|rw))?")


def _text(text: str) -> str:
    if not one_line(text).strip():
        raise ValueError("text that is not empty")
    return text


def _module(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][\w.+/:~-]*", name):
        raise ValueError("the name of a module with its version, such as cuda/12.4")
    return name


def _folder(path: str) -> str:
    if not _text(path).startswith(("/", "~")):
        raise ValueError("an absolute path: a job does not begin in this folder")
    return path


def _mount(text: str) -> str:
    if not _MOUNT.fullmatch(one_line(text)):
        raise ValueError("SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, with absolute paths")
    return text


def _variables(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(f"names of variables, which {name!r} is not")
        if names_a_secret(name):
            raise ValueError(
                f"no secrets, and {name} looks like one: this file is copied into every run. "
                f"Export {name} in the shell that submits: jobs get it from there"
            )
        one_line(value)
    return variables


Text = Annotated[str, AfterValidator(_text)]
Folder = Annotated[str, AfterValidator(_folder)]
Module = Annotated[str, AfterValidator(_module)]
Mount = Annotated[str, AfterValidator(_mount)]
Variables = Annotated[dict[str, str], AfterValidator(_variables)]


class Environment(BaseModel):
    """What a job loads before Python starts. With nothing here, the interpreter that submits is the one that runs."""

    model_config = _STRICT

    module_use: list[Folder] = []  # further folders of modules
    modules: list[Module] = []  # loaded in this order, after a purge
    conda: Text | None = None  # an environment's name, or its folder
    venv: Folder | None = None
    pack: bool | Literal["tar"] = False  # one archive that each node unpacks to its own disk; `tar`: uncompressed
    variables: Variables = {}

    @model_validator(mode="after")
    def _one_interpreter(self) -> Environment:
        if self.conda and self.venv:
            raise ValueError("conda or venv, and not both: one of them has the interpreter")
        return self


class Container(BaseModel):
    """An image, and how to run in it. What a run needs (its folder, data, code, GPUs, network) gets in by itself."""

    model_config = _STRICT

    runtime: Literal["pyxis", "enroot", "apptainer", "charliecloud", "podman"]
    image: Text  # nvcr.io/nvidia/pytorch:TAG, nvcr.io#nvidia/pytorch:TAG, or a .sqsh, .sif or folder
    mounts: list[Mount] = []  # further ones
    workdir: Folder | None = None  # in the image; the folder that `gradus submit` was called in
    env: Variables = {}
    writable: bool = False  # the image's own folders; changes are gone afterwards, but for an image that is a folder
    options: list[Text] = []  # further ones of the runtime (pyxis: of srun)
    python: Literal["image", "environment"] = "image"  # whose Python and torch: the image's, or those outside of it
    command: Folder | None = None  # the runtime's program, where it is on the nodes only, or has no usual name


def parts_of_mount(mount: str) -> tuple[str, str, bool]:
    """Source, target, and whether nothing may be written there.

    >>> parts_of_mount("/data:/mnt/data:ro"), parts_of_mount("/scratch")
    (('/data', '/mnt/data', True), ('/scratch', '/scratch', False))
    """
    found = _MOUNT.fullmatch(mount)
    assert found, mount
    return found["source"], found["target"] or found["source"], found["mode"] == "ro"
