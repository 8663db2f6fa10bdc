"""Device: how fast a GPU really is, from what its vendor quotes and what share of it kernels reach. No torch.

The shares belong to a kind of GPU and to a software era (hardware/speeds.yaml). A GPU that nobody measured has those of
the nearest generation that somebody did, and says so.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from typing import Any, Literal

import yaml

from gradus.hardware.catalogue import Gpu, find_gpu
from gradus.hardware.cluster import gpu_of
from gradus.hardware.links import find_link
from gradus.schema.cluster import Cluster

# modern: flash attention, fused optimizers, gradients that travel while backward goes on. 2021: attention from separate
# products and a fused softmax, kernels that were fused by hand, and gradients that travel after backward, as in
# Megatron-LM of that year.
Era = Literal["modern", "2021"]


@dataclass(frozen=True)
class Attention:
    """What a kernel of attention reaches."""

    forward: Mapping[int, float]  # of the peak in 16 bits, by width of a head: long sequences, not causal
    backward: Mapping[int, float]
    fp32: float  # of the peak in fp32
    moved_forward: float  # how often its bytes go through memory, beside what is computed
    moved_backward: float


@dataclass(frozen=True)
class Speeds:
    """What share of the quoted figures kernels reach, and what they cost besides. Seconds, unless it is a share."""

    source: str
    own_products: bool  # `matmul` is of this very GPU
    matmul: Mapping[str, float]  # of the peak, by precision: large products, for minutes
    sustained: float  # of what such products reach in a short run
    inner_lost: float  # elements of the inner dimension that the start of a tile is worth
    attention: Mapping[str, Attention]  # by back-end: flash, cudnn, efficient
    convolution: Mapping[str, float]  # of the peak, by precision
    convolution_backward: Mapping[str, float]
    depthwise: Mapping[str, float]  # of the peak in fp32, by precision, "bf16 channels_last" apart
    depthwise_backward: Mapping[str, float]
    recurrent: Mapping[str, float]  # of the peak, by precision
    bandwidth: Mapping[str, float]  # of the quoted bandwidth, by kind of operator, and by name where one differs
    kernel_seconds: float  # that the device needs for any kernel
    host_layer_seconds: float  # that the host needs in eager mode for an operator that is a layer, with all around it
    host_operator_seconds: float  # the same for other operators
    host_selective_seconds: float  # more for each operator of forward where selective recompute watches them
    host_compiled_seconds: float  # for a kernel of a compiled graph
    host_graph_seconds: float  # for a compiled graph
    host_step_seconds: float  # for a step, whatever is in it
    host_tensor_seconds: float  # for a tensor of the optimizer
    host_clip_seconds: float  # and more, where gradients are clipped
    host_copy_bytes_per_second: float  # between host and device, pinned
    overlaps_gradients: bool = True


@dataclass(frozen=True, eq=False)  # compared by identity: what was computed for a device is remembered
class Device:
    """One GPU as a plan uses it."""

    name: str
    peak: Mapping[str, float]  # FLOP/s by precision
    bytes_per_second: float
    multiprocessors: int
    speeds: Speeds
    era: Era = "modern"
    tf32: bool = False  # fp32 products run in it
    host_link: str = ""  # what connects it to the host, and where its speed comes from
    power_share: float = 1.0  # of what it is rated for, where the cluster gives it less
    notes: tuple[str, ...] = field(default=())

    @functools.lru_cache(maxsize=64)  # noqa: B019  (there are few devices, and they are small)
    def running(self, precision: str, ranks: int = 1) -> Device:
        """As it is set for a precision of the plan: 16-bit training lets the products that stay in fp32 run in TF32.

        Several `ranks` on one device take turns.
        """
        return replace(
            self,
            tf32=precision not in ("fp32", "fp64"),
            peak={name: peak / ranks for name, peak in self.peak.items()},
            bytes_per_second=self.bytes_per_second / ranks,
        )

    def precision_of(self, dtype: str) -> str:
        """What the device calls a dtype of torch."""
        if dtype.startswith("float8"):
            return "fp8"
        known = {"bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}.get(dtype)
        return known or ("tf32" if self.tf32 and "tf32" in self.peak else "fp32")

    def peak_of(self, precision: str) -> float:
        """FLOP/s; what a device lacks runs in what it has."""
        for name in (precision, *_INSTEAD.get(precision, ())):
            if name in self.peak:
                return self.peak[name]
        return min(self.peak.values())


_INSTEAD = {"bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32"), "tf32": ("fp32",), "fp8": ("bf16", "fp16")}
_INSTEAD |= {"fp64": ("fp32",)}
# Of the tensor cores' rate in TF32, what is left without them where nobody quotes fp32: 19.5 of 156 TFLOP/s on an
# A100, 67 of 494.5 on an H100 (their datasheets), the lower of the two.
WITHOUT_TENSOR_CORES = 19.5 / 156
_ASSUMED_MULTIPROCESSORS = 100
# By compute capability: what connects GPUs to the host that are older than the one whose copies were measured. V100
# datasheet: "PCIe Gen3: 32 GB/s", A100 datasheet: "PCIe Gen4: 64 GB/s", both directions.
_OLDER_HOST_LINKS = {7: "PCIe 3.0 x16", 8: "PCIe 4.0 x16"}
_MEASURED_HOST_LINK = "PCIe 5.0 x16"  # of the H200: NVIDIA H200 datasheet, "PCIe Gen5: 128 GB/s"


def device_of(cluster: Cluster, era: Era = "modern") -> Device | None:
    """The GPU of a cluster; None where its peak or its bandwidth is not known, as of CPUs."""
    gpu = gpu_of(cluster)
    if gpu is None or not gpu.peak_tflops or not gpu.memory_bandwidth_gb_per_second:
        return None
    speeds, note = speeds_for(gpu.name, gpu.compute_capability, era)
    speeds, host_link = _with_host_link(speeds, gpu.compute_capability)
    notes = [note]
    if gpu.matmul_tflops and not speeds.own_products:
        speeds = _with_reached(speeds, gpu)
        notes.append(f"matrix products of {gpu.name}: {gpu.sources.get('matmul_tflops', 'quoted')}")
    peak = {precision: tflops * 1e12 for precision, tflops in gpu.peak_tflops.items()}
    if "fp32" not in peak:
        peak["fp32"] = WITHOUT_TENSOR_CORES * (peak.get("tf32") or min(peak.values()) / 2)
        notes.append(f"nobody quotes the peak of {gpu.name} in fp32: {peak['fp32'] / 1e12:.0f} TFLOP/s assumed")
    power_share, said = _power_share(gpu)
    return Device(
        name=gpu.name,
        peak=peak,
        bytes_per_second=gpu.memory_bandwidth_gb_per_second * 1e9,
        multiprocessors=gpu.multiprocessors or _ASSUMED_MULTIPROCESSORS,
        speeds=speeds,
        era=era,
        host_link=host_link,
        power_share=power_share,
        notes=(*notes, *said),
    )


def _power_share(gpu: Gpu) -> tuple[float, list[str]]:
    """Of the power that its vendor rates a GPU for, what it may take here; and a sentence if that is not all of it."""
    known, given = find_gpu(gpu.name), gpu.power_watts
    rated = known.power_watts if known is not None else None
    if rated is None or given is None or given >= rated:
        return 1.0, []
    share = given / rated
    return share, [
        f"{gpu.name} may take {given:g} of the {rated:g} W that it is rated for: products may run"
        f" at as little as {share:.0%} of the speed that is assumed, which the stated error allows for; --measure on"
        " the GPU knows better"
    ]


def _with_host_link(speeds: Speeds, capability: tuple[int, ...] | None) -> tuple[Speeds, str]:
    """With copies to the host as fast as its link is, at the share of it that was measured."""
    older = find_link(_OLDER_HOST_LINKS.get(capability[0], "")) if capability else None
    if older is None:
        return speeds, f"as measured on an H200 over {_MEASURED_HOST_LINK}"
    measured = find_link(_MEASURED_HOST_LINK)
    assert measured is not None, "the catalogue has it"
    rate = speeds.host_copy_bytes_per_second * older.gb_per_second / measured.gb_per_second
    return replace(
        speeds, host_copy_bytes_per_second=rate
    ), f"{older.name}, at the share that an H200 reaches of its own"


def _with_reached(speeds: Speeds, gpu: Gpu) -> Speeds:
    """With what large products are known to reach on this GPU, for a short time, in place of another one's share."""
    peak = gpu.peak_tflops
    known = {name: tflops for name, tflops in gpu.matmul_tflops.items() if name in peak}
    reached = {name: speeds.sustained * tflops / peak[name] for name, tflops in known.items()}
    if "bf16" in reached:
        reached.setdefault("fp16", reached["bf16"])
    return replace(speeds, matmul={**speeds.matmul, **reached})


def speeds_for(name: str, capability: tuple[int, ...] | None, era: Era) -> tuple[Speeds, str]:
    """The shares of a GPU, or of what it is most like, and a sentence about where they come from."""
    entries = _entries()
    chosen = next((e for e in entries if name in e["gpus"] and e["era"] == era), None)
    if chosen is None:
        of_era = [e for e in entries if e["era"] == era]
        major = capability[0] if capability else None
        alike = [e for e in of_era if e.get("capability") == major] or [e for e in of_era if e.get("default")]
        chosen = (alike or [e for e in entries if e.get("default")])[0]
        about = f"speeds of {name} were not measured: shares of its peak as of {chosen['gpus'][0]}"
    else:
        about = f"speeds of {name} ({era} software)"
    speeds = replace(_speeds(chosen, entries), own_products=name in chosen["gpus"] and "matmul" in chosen)
    return speeds, f"{about}: {speeds.source}"


@functools.cache
def _entries() -> tuple[Mapping[str, Any], ...]:
    return tuple(yaml.safe_load(resources.files("gradus.hardware").joinpath("speeds.yaml").read_text()))


def _speeds(entry: Mapping[str, Any], entries: tuple[Mapping[str, Any], ...]) -> Speeds:
    """An entry, with what it leaves out taken from the one that it says it is like."""
    values: dict[str, Any] = {}
    chain = [entry]
    while "like" in chain[-1]:
        gpu, _, era = str(chain[-1]["like"]).partition(", ")
        chain.append(next(e for e in entries if gpu in e["gpus"] and e["era"] == era))
    for known in reversed(chain):
        for key, value in known.items():
            merged = isinstance(value, Mapping) and isinstance(values.get(key), Mapping)
            values[key] = {**values[key], **value} if merged else value
    host = {f"host_{key}": value for key, value in values["host"].items()}
    values["attention"] = {name: Attention(**shares) for name, shares in values["attention"].items()}
    names = {field.name for field in fields(Speeds)} - {"source", "own_products"}
    return Speeds(
        source=values["source"],
        own_products=False,
        **host,
        **{name: values[name] for name in names if name in values},
    )
