"""The catalogue of GPUs: what vendors quote, each number with its source."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU, as quoted. `sources` says for memory, peak and power where the numbers come from."""

    name: str
    driver_names: tuple[str, ...]
    compute_capability: tuple[int, int] | None
    memory_gb: float
    memory_bandwidth_gb_per_second: float
    peak_tflops: Mapping[str, float]
    power_watts: float | None
    sources: Mapping[str, str]


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
        if wanted in {_comparable(known) for known in (gpu.name, *gpu.driver_names)}:
            return gpu
    return None


def peak_flops(gpu: Gpu, precision: str) -> float | None:
    """Dense FLOP/s in `precision` (fp64 fp32 tf32 fp16 bf16 fp8), or None where no certain number is known."""
    tflops = gpu.peak_tflops.get(precision)
    return None if tflops is None else tflops * 1e12


def _comparable(name: str) -> str:
    # Drivers of different age say "Tesla", "NVIDIA" or neither, and vary case and separators.
    brand_free = re.sub(r"\b(nvidia|amd|tesla|geforce|instinct)\b", "", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", brand_free).strip("-")


def _gpu(entry: Mapping[str, Any]) -> Gpu:
    capability = entry.get("compute_capability")
    groups = {key: dict(entry[key]) for key in ("memory", "peak_tflops", "power") if key in entry}
    sources = {key: group.pop("source") for key, group in groups.items()}
    return Gpu(
        name=entry["name"],
        driver_names=tuple(entry["driver_names"]),
        compute_capability=None if capability is None else (capability[0], capability[1]),
        memory_gb=groups["memory"]["gb"],
        memory_bandwidth_gb_per_second=groups["memory"]["bandwidth_gb_per_second"],
        peak_tflops=groups["peak_tflops"],
        power_watts=groups["power"]["watts"] if "power" in groups else None,
        sources=sources,
    )
