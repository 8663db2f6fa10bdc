"""Whether the installed torch can use the GPUs here, and if not, which build to install. Never a silent CPU run."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gradus.hardware.detect import Machine
from gradus.schema.errors import InputError


@dataclass(frozen=True)
class TorchBuild:
    """An installed torch. `architectures` as `torch.cuda.get_arch_list()` gives them, once torch is imported."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    architectures: tuple[str, ...] | None = None


@dataclass(frozen=True)
class _Wheel:
    tag: str
    cuda: tuple[int, int]
    oldest_gpu: tuple[int, int]
    newest_gpu: tuple[int, int]


# Compute capabilities as the builds of torch 2.9 and later have them: only the oldest one still runs on Volta.
_WHEELS = (
    _Wheel("cu126", (12, 6), (5, 0), (9, 0)),
    _Wheel("cu128", (12, 8), (7, 5), (12, 1)),
    _Wheel("cu129", (12, 9), (7, 5), (12, 1)),
    _Wheel("cu130", (13, 0), (7, 5), (12, 1)),
)
# The oldest Linux driver that runs programs built for any CUDA 12.
_OLDEST_DRIVER = "525.60.13"
_CPU_ON_PURPOSE = 'to train on the CPU on purpose, set CUDA_VISIBLE_DEVICES=""'


def installed_torch() -> TorchBuild | None:
    """The torch that `import torch` would find, read from its files: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    return read_build(Path(spec.submodule_search_locations[0]) / "version.py")


def read_build(version_file: Path) -> TorchBuild:
    """The build that torch's `version.py` describes."""
    values: dict[str, str | None] = {}
    for node in ast.parse(version_file.read_text()).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            value = getattr(node, "value", None)
            if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
                values[target.id] = value.value if isinstance(value.value, str) else None
    return TorchBuild(version=values["__version__"] or "unknown", cuda=values.get("cuda"), hip=values.get("hip"))


def check_torch_can_use(machine: Machine, build: TorchBuild) -> None:
    """Raise InputError if there are GPUs that this torch would leave idle."""
    if not machine.gpus:
        if machine.problems:
            raise InputError("; ".join(machine.problems), hint=f"see what nvidia-smi says; {_CPU_ON_PURPOSE}")
        return
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    gpus = f"{len(machine.gpus)} × {names} on {machine.hostname}"
    if build.cuda is None:
        kind = f"built for ROCm {build.hip}" if build.hip else "a CPU-only build"
        _refuse(f"torch {build.version} is {kind} and cannot use the GPUs ({gpus})", machine, build)
    if machine.driver_cuda is not None and _version(build.cuda)[0] > machine.driver_cuda[0]:
        _refuse(
            f"torch {build.version} is built for CUDA {build.cuda}, but driver {machine.driver_version} supports CUDA "
            f"{_dotted(machine.driver_cuda)} at most ({gpus})",
            machine,
            build,
        )
    if build.architectures is not None:
        for gpu in machine.gpus:
            if not has_kernels(gpu.compute_capability, build.architectures):
                _refuse(
                    f"torch {build.version} has no kernels for {gpu.name} (compute capability "
                    f"{_dotted(gpu.compute_capability)}), only for {' '.join(build.architectures)}",
                    machine,
                    build,
                )


def has_kernels(capability: tuple[int, int], architectures: tuple[str, ...]) -> bool:
    """Whether code for one of `architectures` (`sm_80`, `compute_90`, `sm_90a`) runs on a GPU of this capability.

    Machine code runs on the same major version from its minor version on; PTX (`compute_`) on anything newer, as the
    driver compiles it; code with the suffix `a` only on exactly its own version.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", architecture)
        if match is None:
            continue
        kind, suffix = match[1], match[4]
        target = (int(match[2]), int(match[3]))
        if capability == target:
            return True
        if suffix == "a" or capability < target:
            continue
        if capability[0] == target[0] or (kind == "compute" and not suffix):
            return True
    return False


def _refuse(message: str, machine: Machine, build: TorchBuild) -> NoReturn:
    raise InputError(message, hint=f"{_advice(machine, build)}; {_CPU_ON_PURPOSE}", found=build.version)


def _advice(machine: Machine, build: TorchBuild) -> str:
    capabilities = [gpu.compute_capability for gpu in machine.gpus]
    for_gpus = [w for w in _WHEELS if all(w.oldest_gpu <= capability <= w.newest_gpu for capability in capabilities)]
    if not for_gpus:
        return "no known torch build has kernels for these GPUs; build torch from source for them"
    wheel = _fitting(for_gpus, machine.driver_cuda)
    if wheel is None:
        return (
            f"driver {machine.driver_version} is too old for any torch build: update it to {_OLDEST_DRIVER} or newer, "
            f"then install the {_named(for_gpus[0], build)}"
        )
    return f"install the {_named(wheel, build)}"


def _fitting(wheels: list[_Wheel], driver_cuda: tuple[int, int] | None) -> _Wheel | None:
    """The newest build within the driver's CUDA; else the oldest of the same major version, which still runs."""
    if driver_cuda is None:
        return wheels[0]
    within = [wheel for wheel in wheels if wheel.cuda <= driver_cuda]
    same_major = [wheel for wheel in wheels if wheel.cuda[0] == driver_cuda[0]]
    return within[-1] if within else same_major[0] if same_major else None


def _named(wheel: _Wheel, build: TorchBuild) -> str:
    release = build.version.partition("+")[0]
    return f"torch {release} wheel built for CUDA {_dotted(wheel.cuda)} (the `{wheel.tag}` build)"


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
