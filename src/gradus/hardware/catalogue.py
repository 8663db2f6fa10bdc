"""The catalogue of GPUs: what vendors quote, each number with its source."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import yaml

_GROUPS = ("memory", "peak_tflops", "power", "chip", "matmul_tflops")  # of numbers with one source each


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, as quoted. `sources` says for each group of numbers where they come from."""

    name: str
    driver_names: tuple[str, ...]
    compute_capability: tuple[int, int] | None
    memory_gb: float
    memory_bandwidth_gb_per_second: float
    peak_tflops: Mapping[str, float]
    power_watts: float | None
    sources: Mapping[str, str]
    multiprocessors: int | None = None  # streaming multiprocessors, or compute units
    l2_mib: float | None = None
    matmul_tflops: Mapping[str, float] = field(default_factory=dict)  # the most that large matrix products reached
    usable_gib: float | None = None  # of its memory, where that is known to be less than nearly all
    also_called: tuple[str, ...] = ()  # other names that mean exactly this device


@functools.cache
def all_gpus() -> tuple[Gpu, ...]:
    entries = yaml.safe_load(resources.files("gradus.hardware").joinpath("catalogue.yaml").read_text())
    return tuple(_gpu(entry) for entry in entries)


def find_gpu(name: str) -> Gpu | None:
    """The GPU with this catalogue name or driver name.

    Names match whole: an "H200 NVL" or a custom "A100-SXM-64GB" is another device, with another peak.
    """
    wanted = _comparable(name)
    for gpu in all_gpus():
        if wanted in {_comparable(known) for known in (gpu.name, *gpu.driver_names, *gpu.also_called)}:
            return gpu
    return None


def gpus_named_like(name: str) -> list[Gpu]:
    """The GPUs whose names begin with this one, as an "a100" that does not say which."""
    begin = _comparable(name) + "-"
    return [gpu for gpu in all_gpus() if (_comparable(gpu.name) + "-").startswith(begin)]


def peak_flops(gpu: Gpu, precision: str) -> float | None:
    """Dense FLOP/s in `precision` (fp64 fp32 tf32 fp16 bf16 fp8), or None where no certain number is known."""
    tflops = gpu.peak_tflops.get(precision)
    return None if tflops is None else tflops * 1e12


def _comparable(name: str) -> str:
    # Drivers of different age say "Tesla", "NVIDIA" or neither, and vary case and separators, as Slurm's types do.
    words = re.split(r"[^a-z0-9]+", name.lower())
    return "-".join(word for word in words if word not in ("", "nvidia", "amd", "tesla", "geforce", "instinct"))


def _gpu(entry: Mapping[str, Any]) -> Gpu:
    capability = entry.get("compute_capability")
    groups = {key: dict(entry[key]) for key in _GROUPS if key in entry}
    sources = {key: group.pop("source") for key, group in groups.items()}
    return Gpu(
        name=entry["name"],
        driver_names=tuple(entry["driver_names"]),
        compute_capability=None if capability is None else (capability[0], capability[1]),
        memory_gb=groups["memory"]["gb"],
        usable_gib=groups["memory"].get("usable_gib"),
        memory_bandwidth_gb_per_second=groups["memory"]["bandwidth_gb_per_second"],
        peak_tflops=groups["peak_tflops"],
        power_watts=groups["power"]["watts"] if "power" in groups else None,
        sources=sources,
        multiprocessors=groups.get("chip", {}).get("multiprocessors"),
        l2_mib=groups.get("chip", {}).get("l2_mib"),
        matmul_tflops=groups.get("matmul_tflops", {}),
        also_called=tuple(entry.get("also_called", ())),
    )
