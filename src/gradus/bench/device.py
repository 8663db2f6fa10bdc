"""What one device does: matrix products by type, memory, copies to and from the host and other GPUs, kernel launches.

Each rate is beside the number that the vendor quotes, where there is one for this very device, with the share reached.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradus.bench.interleaved import Spread, interleaved
from gradus.bench.result import BenchResult, bench_environment
from gradus.hardware.catalogue import Gpu, find_gpu
from gradus.hardware.host import cpu_name
from gradus.record.chart import Bars
from gradus.record.format import first_line

MIB = 2**20
_TYPES = {"fp64": torch.float64, "fp32": torch.float32, "tf32": torch.float32}
_TYPES |= {"bf16": torch.bfloat16, "fp16": torch.float16}
_SMALL = 256  # elements: a kernel that does next to nothing
_LAUNCHES = 200
# GB/s in one direction for each lane, after encoding; PCI-SIG, by generation.
_PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True)
class Measure:
    """Something that can be done again and again, and how much one time is of what."""

    group: str
    name: str
    unit: str  # TFLOP/s, GB/s or µs
    amount: float  # of the unit in one call and a second; of µs, calls
    call: Callable[[], object]
    quoted: float | None = None
    source: str | None = None
    on_host: bool = False  # timed by the host's clock, without waiting for the device in between


@dataclass(frozen=True)
class Row:
    group: str
    name: str
    unit: str
    value: float | None  # None: not measured
    spread: float | None
    quoted: float | None
    share: float | None  # of the quoted
    source: str | None
    note: str | None = None


def bench_device(
    device: torch.device,
    *,
    size: int | None = None,
    memory_mib: int | None = None,
    seconds: float = 0.3,
    rounds: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """`size` is the side of the matrices, `memory_mib` the size of the arrays that are copied."""
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    size = size or (8192 if device.type == "cuda" else 1024)
    memory_mib = memory_mib or (1024 if device.type == "cuda" else 128)
    rows: list[Row] = []
    # One group at a time: what it holds is freed before the next one needs memory.
    for group in _groups(device, gpu, size, memory_mib):
        say(f"measuring {group.title}")
        rows += [*_measured(list(group.measures), device, seconds / rounds, rounds), *group.missing]
        del group
        if device.type == "cuda":
            torch.cuda.empty_cache()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name() or "CPU"
    summary = {f"{row.group}: {row.name} ({row.unit})": row.value for row in rows if row.value is not None}
    settings = {"device": str(device), "name": name, "matrix_side": size, "array_mib": memory_mib, "rounds": rounds}
    settings["threads"] = torch.get_num_threads() if device.type == "cpu" else None
    notes = tuple(f"{row.name}: not measured: {row.note}" for row in rows if row.value is None)
    if device.type == "cuda" and gpu is None:
        notes += (f"{name} is not in the catalogue: nothing is quoted.",)
    return BenchResult(
        "device",
        f"What {name} does",
        settings,
        [asdict(row) for row in rows],
        summary,
        _charts(rows),
        bench_environment(),
        notes=notes,
    )


# --- what is measured


@dataclass
class Group:
    title: str
    measures: list[Measure]
    missing: list[Row]

    def add(self, make: Callable[[], Measure], group: str, name: str, unit: str) -> None:
        """Try it once: what this device or this build of torch lacks is said so, and costs nothing else."""
        try:
            measure = make()
            measure.call()
        except (RuntimeError, NotImplementedError, ValueError) as error:  # torch's own out of memory is one, too
            why = first_line(error) or type(error).__name__
            self.missing.append(Row(group, name, unit, None, None, None, None, None, why[:160]))
        else:
            self.measures.append(measure)


def _groups(device: torch.device, gpu: Gpu | None, size: int, memory_mib: int) -> Iterator[Group]:
    yield _matrix_products(device, gpu, size)
    yield _memory(device, gpu, memory_mib)
    if device.type == "cuda":
        yield _host_copies(device, min(memory_mib, 256))
        if torch.cuda.device_count() > 1:
            yield _peer_copies(device, min(memory_mib, 256))
    yield _launches(device)


def _matrix_products(device: torch.device, gpu: Gpu | None, size: int) -> Group:
    group = Group(f"matrix products of {size} × {size}", [], [])
    tflop = 2.0 * size**3 / 1e12
    for name in ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8"):
        if name == "tf32" and device.type != "cuda":
            continue  # a mode of NVIDIA's tensor cores
        quoted = gpu.peak_tflops.get(name) if gpu else None
        source = gpu.sources.get("peak_tflops") if gpu and quoted else None
        unit = "TOP/s" if name == "int8" else "TFLOP/s"

        def make(
            name: str = name, unit: str = unit, quoted: float | None = quoted, source: str | None = source
        ) -> Measure:
            return Measure("matmul", name, unit, tflop, product(name, size, device), quoted, source)

        group.add(make, "matmul", name, unit)
    return group


def product(name: str, size: int, device: torch.device) -> Callable[[], object]:
    """A matrix product in a type, ready to be called. Numbers are drawn: zeros would need less power and run faster."""
    drawn = functools.partial(torch.randn, size, size, device=device)
    if name == "fp8":
        if device.type != "cuda":
            raise NotImplementedError("FP8 matrix multiplication needs a GPU")
        a, b = drawn().to(torch.float8_e4m3fn), drawn().to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
    if name == "int8":
        left, right = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
        columns = right.t()
        return lambda: torch._int_mm(left, columns)
    x, y = drawn().to(_TYPES[name]), drawn().to(_TYPES[name])
    out = torch.empty_like(x)

    def multiply() -> Tensor:
        return torch.mm(x, y, out=out)

    if device.type != "cuda" or name not in ("fp32", "tf32"):
        return multiply

    def with_tf32() -> Tensor:
        with _tf32(name == "tf32"):
            return multiply()

    return with_tf32


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _memory(device: torch.device, gpu: Gpu | None, memory_mib: int) -> Group:
    group = Group(f"memory, arrays of {memory_mib} MiB", [], [])
    elements = memory_mib * MIB // 4
    gigabytes = elements * 4 / 1e9
    quoted = gpu.memory_bandwidth_gb_per_second if gpu else None
    source = gpu.sources.get("memory") if gpu else None
    a, b, c = (torch.ones(elements, device=device) for _ in range(3))
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "copy (1 read, 1 write)": (2, lambda: a.copy_(b)),
        "triad (2 reads, 1 write)": (3, lambda: torch.add(b, c, alpha=2.0, out=a)),
    }
    for name, (passes, call) in calls.items():
        group.measures.append(Measure("memory", name, "GB/s", passes * gigabytes, call, quoted, source))
    return group


def _host_copies(device: torch.device, memory_mib: int) -> Group:
    group = Group("copies between host and device", [], [])
    gigabytes = memory_mib * MIB / 1e9
    there = torch.empty(memory_mib * MIB, dtype=torch.uint8, device=device)
    quoted, source = pcie_quoted(device.index or 0)
    for kind in ("pinned", "pageable"):
        here = torch.empty(memory_mib * MIB, dtype=torch.uint8, pin_memory=kind == "pinned")
        here.fill_(1)  # or its pages do not exist yet
        ways: dict[str, Callable[[], object]] = {
            f"host to device, {kind}": functools.partial(there.copy_, here, non_blocking=True),
            f"device to host, {kind}": functools.partial(here.copy_, there, non_blocking=True),
        }
        for name, call in ways.items():
            group.measures.append(Measure("host", name, "GB/s", gigabytes, call, quoted, source))
    return group


def pcie_quoted(index: int, nvml: Any = None) -> tuple[float | None, str | None]:
    """What the PCIe link that the driver reports carries in one direction at most. Not every GPU is on such a link."""
    try:
        if nvml is None:
            import pynvml

            nvml = pynvml
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            generation = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
            lanes = nvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
        finally:
            nvml.nvmlShutdown()
    except Exception:  # a library that is not there, or a driver that does not say: then nothing is quoted
        return None, None
    lane = _PCIE_LANE.get(generation)
    if lane is None or not lanes:
        return None, None
    return lane * lanes, f"PCIe {generation}.0 x{lanes} as the driver reports it"


def _peer_copies(device: torch.device, memory_mib: int) -> Group:
    group = Group("copies between GPUs", [], [])
    gigabytes = memory_mib * MIB / 1e9
    mine = torch.empty(memory_mib * MIB, dtype=torch.uint8, device=device)
    first = device.index or 0
    for other in range(torch.cuda.device_count()):
        if other == first:
            continue
        theirs = torch.empty(memory_mib * MIB, dtype=torch.uint8, device=torch.device("cuda", other))
        direct = torch.cuda.can_device_access_peer(first, other)
        how = "directly" if direct else "through the host"
        call = functools.partial(theirs.copy_, mine, non_blocking=True)
        group.measures.append(Measure("peer", f"GPU {first} to {other}, {how}", "GB/s", gigabytes, call))
    return group


def _launches(device: torch.device) -> Group:
    """How long the host takes to ask for a kernel, and how soon tiny kernels follow each other."""
    group = Group("kernel launches", [], [])
    x = torch.ones(_SMALL, device=device)

    def many() -> None:
        for _ in range(_LAUNCHES):
            x.add_(1.0)

    name = "launch, on the host" if device.type == "cuda" else "call of an operator"
    group.measures.append(Measure("launch", name, "µs", _LAUNCHES, many, on_host=True))
    if device.type == "cuda":
        group.measures.append(Measure("launch", "kernel after kernel, on the device", "µs", _LAUNCHES, many))
        group.add(lambda: _graph(x), "launch", "kernel after kernel, CUDA graph", "µs")
    return group


def _graph(x: Tensor) -> Measure:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        x.add_(1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            x.add_(1.0)
    return Measure("launch", "kernel after kernel, CUDA graph", "µs", _LAUNCHES, graph.replay)


# --- measuring


def _measured(measures: list[Measure], device: torch.device, seconds: float, rounds: int) -> list[Row]:
    calls = {measure.name: _calls_in(measure, device, seconds) for measure in measures}
    variants = {
        measure.name: functools.partial(seconds_of, measure, device, calls[measure.name]) for measure in measures
    }
    return [
        _row(measure, spread) for measure, spread in zip(measures, interleaved(variants, rounds).values(), strict=True)
    ]


def _row(measure: Measure, spread: Spread) -> Row:
    if measure.unit == "µs":
        found = Spread(tuple(1e6 * value / measure.amount for value in spread.values))
    else:
        found = Spread(tuple(measure.amount / value for value in spread.values))
    share = found.median / measure.quoted if measure.quoted else None
    return Row(
        *(measure.group, measure.name, measure.unit, found.median, found.relative),
        *(measure.quoted, share, measure.source),
    )


def _calls_in(measure: Measure, device: torch.device, seconds: float) -> int:
    """How often it can be called in about so many seconds; the calls that find this out also warm up."""
    seconds_of(measure, device, 2)
    return max(1, min(10_000, int(seconds / max(seconds_of(measure, device, 1), 1e-7))))


def seconds_of(measure: Measure, device: torch.device, calls: int) -> float:
    """Of one call, on average over so many."""
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(calls):
            measure.call()
        return (time.perf_counter() - begun) / calls
    torch.cuda.synchronize(device)
    if measure.on_host:
        begun = time.perf_counter()
        for _ in range(min(calls, 4)):  # a queue that is full would make the host wait
            measure.call()
        elapsed = time.perf_counter() - begun
        torch.cuda.synchronize(device)
        return elapsed / min(calls, 4)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        measure.call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / calls


def _charts(rows: list[Row]) -> tuple[Bars, ...]:
    titles = {
        "matmul": "Matrix products",
        "memory": "Memory",
        "host": "Between host and device",
        "peer": "Between GPUs",
    }
    charts = []
    for group, title in titles.items():
        found = [row for row in rows if row.group == group and row.value is not None]
        if not found:
            continue
        bars = tuple(
            bar
            for row in found
            for bar in (
                (row.name, (("measured", float(row.value or 0)),)),
                *(((f"{row.name}, quoted", (("quoted", row.quoted),)),) if row.quoted else ()),
            )
        )
        charts.append(Bars(title, "TFLOP/s" if group == "matmul" else "GB/s", bars))
    return tuple(charts)
