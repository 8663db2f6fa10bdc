"""One description of a container, in the words of each runtime. All of it pure: what is there is found elsewhere.

What all have in common: the host's network (torchrun's ports and NCCL's devices are the host's), the host's /dev/shm
and limits of locked memory, no home folder (packages of the user there would shadow the image's), and variables of the
job.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradus.launcher.image_names import Image, RegistryImage, StoredImage
from gradus.schema.errors import InputError
from gradus.schema.software import Container

# Beginnings of the names of variables that a job has to have inside: who and where a node is, what libraries were told.
CROSSING = (
    *("SLURM", "MASTER_", "GRADUS_", "PMI", "OMPI_", "CUDA_", "ROCR_", "HIP_", "NVIDIA_", "CUBLAS_"),
    *("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "HF_", "PYTHON"),
)
# pyxis lets everything in, but where the image has a value of its own, that one wins, unless it is named.
_SET_BY_THE_JOB = (
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
)
PROGRAMS = {"enroot": "enroot", "apptainer": "apptainer", "charliecloud": "ch-run", "podman": "podman"}


@dataclass(frozen=True)
class Bind:
    """A folder of the host in the container."""

    source: str
    target: str
    read_only: bool = False


@dataclass(frozen=True)
class Inside:
    """What goes into a container, and what the runtime at hand is able to."""

    binds: tuple[Bind, ...]
    workdir: str
    entry: tuple[str, ...]  # runs what follows it, inside
    variables: tuple[str, ...] = ()  # names that the cluster file sets
    gpus: Literal["nvidia", "amd"] | None = None
    infiniband: bool = False
    user: str = ""
    enroot_settings: str = ""  # a file that names the variables to let in
    can_write_fake: bool = False  # charliecloud from 0.33 on: a layer in memory, in which mount points can be made
    has_own_variables: bool = False  # charliecloud: the image has a file of them


@dataclass(frozen=True)
class Rendered:
    """srun's further options, and the words that go before a command."""

    srun_options: tuple[str, ...]
    prefix: tuple[str, ...]


def rendered(container: Container, image: Image, inside: Inside) -> Rendered:
    """The container in the words of its runtime."""
    _check_binds(container.runtime, inside.binds)
    if container.runtime == "pyxis":
        return Rendered(tuple(_pyxis(container, image, inside)), inside.entry)
    render = {"enroot": _enroot, "apptainer": _apptainer, "charliecloud": _charliecloud, "podman": _podman}
    return Rendered((), (*render[container.runtime](container, image, inside), *inside.entry))


def _pyxis(container: Container, image: Image, inside: Inside) -> list[str]:
    # On srun's line and never in the script's header: there, pyxis would put the batch shell itself into the image.
    mounts = ",".join(f"{bind.source}:{bind.target}{':ro' if bind.read_only else ''}" for bind in inside.binds)
    names = dict.fromkeys([*_SET_BY_THE_JOB, *inside.variables])
    return [
        f"--container-image={image.enroot if isinstance(image, RegistryImage) else image.path}",
        f"--container-mounts={mounts}",
        f"--container-workdir={inside.workdir}",
        "--no-container-mount-home",
        f"--container-env={','.join(names)}",
        *(["--container-writable"] if container.writable else []),
        *container.options,
    ]


def _enroot(container: Container, image: Image, inside: Inside) -> list[str]:
    if isinstance(image, RegistryImage):
        file = f"{image.name.rpartition('/')[2]}.sqsh"
        raise InputError(
            f"container.image: enroot starts a file, and {image.docker} is in a registry",
            hint=f"enroot import -o {file} 'docker://{image.enroot}', and image: the path of that file",
            field="container.image",
            found=image.docker,
        )
    how = "none:x-create=auto,rbind"
    mounts = [f"{bind.source}:{bind.target}:{how}{',ro' if bind.read_only else ''}" for bind in inside.binds]
    return [
        *(container.command or PROGRAMS["enroot"], "start"),
        *(["--rw"] if container.writable else []),
        *("--conf", inside.enroot_settings),
        *(word for mount in mounts for word in ("--mount", mount)),
        *container.options,
        str(image.path),
        # enroot has no option for it.
        *("/bin/sh", "-c", 'cd "$0" && exec "$@"', inside.workdir),
    ]


def _apptainer(container: Container, image: Image, inside: Inside) -> list[str]:
    mounts = [f"--bind={bind.source}:{bind.target}{':ro' if bind.read_only else ''}" for bind in inside.binds]
    return [
        *(container.command or PROGRAMS["apptainer"], "exec"),
        *{"nvidia": ["--nv"], "amd": ["--rocm"], None: []}[inside.gpus],
        "--no-home",
        *mounts,
        f"--pwd={inside.workdir}",  # newer ones call it --cwd, too
        *(["--writable-tmpfs"] if container.writable else []),
        *container.options,
        f"docker://{image.docker}" if isinstance(image, RegistryImage) else str(image.path),
    ]


def _charliecloud(container: Container, image: Image, inside: Inside) -> list[str]:
    write = "--write-fake" if inside.can_write_fake else "--write" if container.writable else None
    return [
        # It refuses to start without USER, and would put TMPDIR's folder at /tmp, where paths are to mean the same.
        *("env", f"USER={inside.user}", "TMPDIR=/tmp"),
        container.command or PROGRAMS["charliecloud"],
        # Libraries that modules outside brought along are not the image's.
        *("--unset-env=LD_LIBRARY_PATH", "--unset-env=LD_PRELOAD"),
        *(["--set-env"] if inside.has_own_variables else []),
        # /tmp and /dev are the host's anyway.
        *[f"--bind={b.source}:{b.target}" for b in inside.binds if not (b.source == b.target and _shared(b.source))],
        f"--cd={inside.workdir}",
        *([write] if write else []),
        *container.options,
        image.docker if isinstance(image, RegistryImage) else str(image.path),
        "--",
    ]


def _podman(container: Container, image: Image, inside: Inside) -> list[str]:
    devices = {
        "nvidia": ["--device=nvidia.com/gpu=all"],  # all that the job has: CUDA_VISIBLE_DEVICES crosses
        "amd": ["--device=/dev/kfd", "--device=/dev/dri", "--group-add=keep-groups"],
        None: [],
    }[inside.gpus]
    names = [f"--env={beginning}*" for beginning in CROSSING]
    names += [f"--env={name}" for name in inside.variables if not name.startswith(CROSSING)]
    return [
        *(container.command or PROGRAMS["podman"], "run", "--rm"),
        *("--network=host", "--ipc=host", "--pid=host"),
        # Files belong to the user, as outside; groups of processes and limits are Slurm's.
        *("--userns=keep-id", "--cgroups=disabled", "--ulimit=host", "--security-opt=label=disable"),
        "--log-driver=none",  # the output goes to Slurm
        *devices,
        *(["--device=/dev/infiniband"] if inside.infiniband else []),
        *[f"--volume={b.source}:{b.target}{':ro' if b.read_only else ''}" for b in inside.binds],
        f"--workdir={inside.workdir}",
        *names,
        "--entrypoint=",  # what follows is the command, and no argument of the image's own
        *([] if container.writable else ["--read-only", "--read-only-tmpfs"]),
        *container.options,
        *_podman_image(image),
    ]


def _podman_image(image: Image) -> list[str]:
    if isinstance(image, RegistryImage):
        return [image.qualified]
    return ["--rootfs", str(image.path)] if image.kind == "a folder" else [f"docker-archive:{image.path}"]


def _shared(path: str) -> bool:
    return path.startswith(("/tmp/", "/dev/", "/proc/", "/sys/"))


def _check_binds(runtime: str, binds: tuple[Bind, ...]) -> None:
    """Refuse folders whose names the runtime would take for something else."""
    marks = {"pyxis": ":, \t$", "enroot": ":, \t$", "apptainer": ":,", "charliecloud": ":", "podman": ":,"}[runtime]
    for bind in binds:
        for path in (bind.source, bind.target):
            wrong = [mark for mark in marks if mark in path]
            if wrong:
                raise InputError(
                    f"container: {runtime} cannot be given the folder {path!r}: it takes {wrong[0]!r} for a mark",
                    hint="rename the folder, or name it through a link without such a character",
                    field="container.mounts",
                    found=path,
                )
        if bind.read_only and runtime == "charliecloud":
            raise InputError(
                f"container.mounts: charliecloud binds no folder read-only: {bind.source}",
                hint=f"{bind.source}:{bind.target}, without :ro",
                field="container.mounts",
                found=f"{bind.source}:{bind.target}:ro",
            )


def stored_folder(image: Image) -> StoredImage | None:
    """The image, if it is a folder."""
    return image if isinstance(image, StoredImage) and image.kind == "a folder" else None
