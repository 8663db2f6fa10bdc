"""Containers: what a run needs inside an image, whether it can run there, and the words that put it there."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradus.data.token_cache import cache_folder
from gradus.launcher.container_runtimes import PROGRAMS, Bind, Inside, rendered, stored_folder
from gradus.launcher.image_names import Image, RegistryImage, check_image_is_there, image_from
from gradus.launcher.image_software import ImageSoftware, image_software
from gradus.launcher.software import environment_lines, interpreter_folders, python_of
from gradus.schema.cluster import Cluster
from gradus.schema.errors import EXIT_DO_NOT_RESTART, InputError
from gradus.schema.software import Container, Environment, parts_of_mount

_ASKING_SECONDS = 120  # patience with a runtime that starts an image on a slow file system
# Never bound by themselves: an image has its own.
_SYSTEM = re.compile(r"/(bin|dev|etc|lib|lib64|opt|proc|run|sbin|sys|tmp|usr|var)?")
_CACHES = {"HF_HOME": "~/.cache/huggingface", "TORCH_HOME": "~/.cache/torch"}


@dataclass(frozen=True)
class Contained:
    """How the command of each node gets into a container: further options of srun, words before the command."""

    srun_options: tuple[str, ...]
    prefix: tuple[str, ...]
    notes: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # for the batch shell: ends a job on a node that lacks the runtime


def contained(
    cluster: Cluster, *, folders: Sequence[Path], directory: Path, place: Path, dry_run: bool = False
) -> Contained | None:
    """The cluster's container with these folders and the current directory inside, or None if it has none.

    Where all is well, a folder with gradus for images is in `place` (which all nodes see) afterwards; a dry run only
    names it. What cannot work is refused here, before anything is submitted.
    """
    container = cluster.container
    if container is None:
        return None
    if cluster.environment.pack and container.python == "environment":
        raise InputError(
            "environment.pack: an environment on the nodes' own disks cannot be bound into an image",
            hint="leave out pack, or the container",
            field="environment.pack",
        )
    notes = list(check_runtime(container, cluster.environment))
    image = image_from(container.image)
    check_image_is_there(image, container.runtime)
    notes += _notes_on(container, image, _gpus(cluster))
    software = image_software(place)
    binds = _binds(container, cluster.environment, [*folders, directory], software)
    inside = _inside(cluster, container, image, binds, directory, software)
    result = rendered(container, image, inside)
    if not dry_run:
        software.write()
        notes += _make_mount_points(container, image, inside)
        notes += _check_inside(container, image, result.prefix, python_of(cluster.environment))
    return Contained(result.srun_options, result.prefix, tuple(notes), tuple(_lines(container, inside.gpus)))


def _inside(
    cluster: Cluster,
    container: Container,
    image: Image,
    binds: tuple[Bind, ...],
    directory: Path,
    software: ImageSoftware,
) -> Inside:
    folder = stored_folder(image)
    charliecloud = container.runtime == "charliecloud"
    variables = {**_cache_variables(binds), **container.env}
    entry = ["/bin/sh", software.entry, container.python]
    if variables:
        entry = ["env", *(f"{name}={value}" for name, value in variables.items()), *entry]
    return Inside(
        binds,
        workdir=container.workdir or os.path.abspath(directory),
        entry=tuple(entry),
        variables=tuple({**cluster.network.variables, **cluster.environment.variables}),
        gpus=_gpus(cluster),
        infiniband=_has_infiniband(cluster),
        user=getpass.getuser(),
        enroot_settings=software.enroot_settings,
        can_write_fake=charliecloud and "--write-fake" in _help_of(container),
        has_own_variables=charliecloud and folder is not None and (folder.path / "ch" / "environment").is_file(),
    )


# ---- what has to be inside ----


def folders_of(document: Any) -> Iterator[Path]:
    """The folders of all files that a recipe names: of data, of code, of weights."""
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        for value in document:
            yield from folders_of(value)
    elif isinstance(document, str) and document.startswith(("/", "~/")):
        # file.py:name, a folder, a file, or a pattern of files: the deepest folder that is there.
        path = Path(os.path.expanduser(document))
        while not path.is_dir() and path != path.parent:
            path = path.parent
        yield path


def _binds(
    container: Container, environment: Environment, folders: Sequence[Path], software: ImageSoftware
) -> tuple[Bind, ...]:
    own = [Bind(os.path.expanduser(s), t if t != s else os.path.expanduser(s), ro) for s, t, ro in _mounts(container)]
    for bind in own:
        if not Path(bind.source).exists():
            raise InputError(
                f"container.mounts: {bind.source}: no such file or folder on this machine",
                field="container.mounts",
                found=bind.source,
            )
    wanted = [*folders, software.folder, *_caches()]
    if container.python == "environment":
        wanted += interpreter_folders(environment)
    else:
        wanted += [folder for folder in _python_path() if not (folder / "torch").exists()]
    taken = {bind.target for bind in own}
    automatic = [Bind(path, path) for path in _outermost(wanted) if path not in taken]
    return (*automatic, *own)


def _mounts(container: Container) -> list[tuple[str, str, bool]]:
    return [parts_of_mount(mount) for mount in container.mounts]


def _outermost(folders: Sequence[Path]) -> list[str]:
    """Folders without those inside others. A link is bound as what it is and as where it leads to."""
    paths = {os.path.abspath(folder) for folder in folders} | {os.path.realpath(folder) for folder in folders}
    kept: list[str] = []
    for path in sorted(paths):
        if not _SYSTEM.fullmatch(path) and not any(path == outer or path.startswith(f"{outer}/") for outer in kept):
            kept.append(path)
    return kept


def _python_path() -> list[Path]:
    return [
        Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and os.path.isdir(entry)
    ]


def _caches() -> list[Path]:
    """Folders outside of the home folder's mount that libraries look for at home."""
    return [Path(folder) for folder in _known_caches().values() if os.path.isdir(folder)]


def _cache_variables(binds: Sequence[Bind]) -> dict[str, str]:
    """Where those caches are, for a home folder that is not mounted."""
    sources = [bind.source for bind in binds]
    return {
        name: folder
        for name, folder in _known_caches().items()
        if any(folder == source or folder.startswith(f"{source}/") for source in sources)
    }


def _known_caches() -> dict[str, str]:
    """By the variables that name them."""
    found = {name: os.environ.get(name) or usual for name, usual in _CACHES.items()}
    found["GRADUS_CACHE"] = str(cache_folder(None).parent)
    return {name: os.path.abspath(os.path.expanduser(folder)) for name, folder in found.items()}


def _gpus(cluster: Cluster) -> Literal["nvidia", "amd"] | None:
    if not cluster.gpus_per_node:
        return None
    name = (cluster.gpu_name or "").lower()
    return "amd" if "amd" in name or name.startswith("mi") else "nvidia"


def _has_infiniband(cluster: Cluster) -> bool:
    link = cluster.links.inter
    name = link if isinstance(link, str) else link.name if link else ""
    return name.lower().startswith(("infiniband", "roce"))


# ---- whether it can be ----


def check_runtime(container: Container, environment: Environment) -> list[str]:
    """Refuse a runtime that is not there, as far as this machine can tell; a note where only a job can."""
    if container.runtime == "pyxis":
        if "--container-image" not in _output("srun", "--help"):
            raise InputError(
                "container.runtime: srun has no --container-image here: this Slurm has no pyxis plugin",
                hint="ask the site what it has; allowed here: enroot, apptainer, charliecloud, podman",
                field="container.runtime",
                found="pyxis",
            )
        return []
    program = container.command or PROGRAMS[container.runtime]
    if shutil.which(program) or (environment.modules and _found_with_modules(program, environment)):
        return []
    if container.command:
        return [f"{program} is not on this machine: the job will say whether it is on the nodes"]
    raise InputError(
        f"container.runtime: {container.runtime} is not installed: there is no {program} on this machine",
        hint=f"name the module that brings it (environment.modules) or, if it is on the nodes only, its path there: "
        f"container.command: /usr/bin/{program}",
        field="container.runtime",
        found=container.runtime,
    )


def _found_with_modules(program: str, environment: Environment) -> bool:
    modules = environment.model_copy(update={"conda": None, "venv": None, "pack": False})
    script = "\n".join([*environment_lines(modules), f"command -v {shlex.quote(program)}"])
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=_ASKING_SECONDS)
    return done.returncode == 0


def _help_of(container: Container) -> str:
    return _output(container.command or PROGRAMS[container.runtime], "--help")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_ASKING_SECONDS,
            env={"USER": getpass.getuser(), **os.environ},  # ch-run says nothing without
        )
    except OSError:
        return ""
    return done.stdout + done.stderr


def _notes_on(container: Container, image: Image, gpus: str | None) -> list[str]:
    notes = []
    if container.runtime == "charliecloud" and gpus == "nvidia":
        notes.append("charliecloud needs the driver's libraries in the image, once: ch-fromhost --nvidia FOLDER")
    if isinstance(image, RegistryImage):
        once = {
            "apptainer": f"apptainer pull IMAGE.sif docker://{image.docker}",
            "charliecloud": f"ch-image pull {image.docker} && ch-convert {image.docker} FOLDER",
            "pyxis": f"enroot import -o IMAGE.sqsh 'docker://{image.enroot}'",
            "podman": None,
        }.get(container.runtime)
        if once:
            notes.append(f"each node fetches {image.docker} by itself; once, where all see it, is quicker: {once}")
    return notes


def _make_mount_points(container: Container, image: Image, inside: Inside) -> list[str]:
    """Charliecloud before 0.33 makes no mount points: they must be in the image's folder, where they can be made."""
    folder = stored_folder(image)
    if container.runtime != "charliecloud" or folder is None or inside.can_write_fake:
        return []
    targets = [bind.target for bind in inside.binds if not bind.target.startswith(("/tmp/", "/dev/"))]
    missing = [target for target in targets if not (folder.path / target.lstrip("/")).exists()]
    points = [folder.path / target.lstrip("/") for target in missing]
    try:
        for point, target in zip(points, missing, strict=True):
            source = next(bind.source for bind in inside.binds if bind.target == target)
            if os.path.isdir(source):
                point.mkdir(parents=True, exist_ok=True)
            else:
                point.parent.mkdir(parents=True, exist_ok=True)
                point.touch()
    except OSError as error:
        raise InputError(
            f"container.image: {folder.path}: this charliecloud binds folders only where the image has one, "
            f"and none can be made: {error}",
            hint=f"have them made: mkdir -p {shlex.join(str(point) for point in points)}",
            field="container.image",
            found=str(folder.path),
        ) from None
    made = ", ".join(missing)
    return [f"made mount points in {folder.path}, which this charliecloud needs: {made}"] if missing else []


def _check_inside(container: Container, image: Image, prefix: Sequence[str], python: str) -> list[str]:
    """Start the image here and ask it for Python, torch and the rest. A job asks again, on each of its nodes."""
    program = container.command or PROGRAMS.get(container.runtime)
    if program is None or shutil.which(program) is None or isinstance(image, RegistryImage):
        return ["the image's Python and torch are looked at when the job starts"]
    # With the Python outside, its --version will do: that it starts is what counts.
    argument = "--check" if container.python == "image" else "--version"
    words = ["bash", "-c", 'exec "$@" ' + f"{python} {argument}", "check", *prefix]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_ASKING_SECONDS)
    except subprocess.TimeoutExpired:
        return [f"the image did not start within {_ASKING_SECONDS} s here; the job will try again"]
    if done.returncode == 0:
        found = json.loads(done.stdout.splitlines()[-1]) if container.python == "image" else None
        return [f"in the image: Python {found['python']}, torch {found['torch']}"] if found else []
    told = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    lines = [line.removeprefix("gradus: ") for line in told.splitlines()]
    hint = next((line.removeprefix("hint: ") for line in lines if line.startswith("hint: ")), None)
    said = "; ".join(line for line in lines if not line.startswith("hint: "))
    refused = done.returncode == EXIT_DO_NOT_RESTART
    raise InputError(
        f"container.image: {container.image}: {said if refused else f'it does not start here: {said}'}",
        hint=hint or (None if refused else f"try it: {shlex.join(prefix)} {python} -V"),
        field="container.image",
        found=container.image,
    )


def _lines(container: Container, gpus: str | None) -> list[str]:
    """That the first node has the runtime (the others' tasks say so themselves), and that it is to mount GPUs."""
    lines = []
    if gpus == "nvidia" and container.runtime in ("pyxis", "enroot"):
        # Images of CUDA say so themselves; to others the runtime would give no GPUs.
        names = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        lines += [f"export {name}=${{{name}:-{usual}}}" for name, usual in names.items()]
    if container.runtime == "pyxis":
        return lines
    program = shlex.quote(container.command or PROGRAMS[container.runtime])
    said = shlex.quote(f"gradus: {container.runtime} is not installed: there is no {program} on")
    return [
        *lines,
        f'command -v {program} >/dev/null || {{ echo {said} "${{SLURMD_NODENAME:-$HOSTNAME}}" >&2; '
        f"exit {EXIT_DO_NOT_RESTART}; }}",
    ]
