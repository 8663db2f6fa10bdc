"""Devices: GPUs whose clocks are held down, and GPUs that were given to the job and do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import mean, median

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.hardware.catalogue import find_gpu
from gradus.record.format import count_text
from gradus.schema.device_sample import GpuSample

OFTEN = 0.1  # of the samples: one look at a GPU that brakes for a moment is nothing
LEAST_SAMPLES = 5
# Reaching the power limit at full load is what a GPU is built for. A limit that was set lower is another thing.
LOWERED_LIMIT = 0.95
SLOWER_CLOCK = 0.9
DRIVER_BYTES = 1 << 30  # of a GPU that nobody uses; a process with CUDA in it takes half of that besides
IDLE = 0.02


def throttling(evidence: Evidence) -> Finding | None:
    worst: tuple[float, str, list[GpuSample]] | None = None
    for name, samples in _by_gpu(evidence):
        braked = [gpu for gpu in samples if _brakes(gpu)]
        if len(samples) < LEAST_SAMPLES or len(braked) < OFTEN * len(samples):
            continue
        lost = _lost_clock(samples, braked)
        if worst is None or lost > worst[0]:
            worst = (lost, name, samples)
    if worst is None:
        return None
    lost, name, samples = worst
    braked = [gpu for gpu in samples if _brakes(gpu)]
    reasons = sorted({reason for gpu in braked for reason in _brakes(gpu)})
    hot = any("thermal" in reason or "slowdown" in reason for reason in reasons)
    clocks = [gpu.clock_mhz for gpu in braked if gpu.clock_mhz is not None]
    temperatures = [gpu.temperature_celsius for gpu in braked if gpu.temperature_celsius is not None]
    power = [gpu.power_watts for gpu in braked if gpu.power_watts is not None]
    node = name.partition(":")[0]
    return Finding(
        "throttling",
        f"GPU {name} has its clock held down in {len(braked) / len(samples):.0%} of the samples: {', '.join(reasons)}",
        {
            "reasons": reasons,
            "braked_share": len(braked) / len(samples),
            "clock_mhz": median(clocks) if clocks else None,
            "clock_max_mhz": braked[-1].clock_max_mhz,
            "temperature_celsius": max(temperatures) if temperatures else None,
            "power_watts": mean(power) if power else None,
            "power_limit_watts": braked[-1].power_limit_watts,
        },
        f"tell the people who run {node} (its cooling), and leave it out meanwhile: gradus submit --exclude {node}"
        if hot
        else "raise the power limit (nvidia-smi -pl, which an administrator may do), or expect this speed",
        lost,
        "high" if clocks else "medium",
    )


def _by_gpu(evidence: Evidence) -> Iterator[tuple[str, list[GpuSample]]]:
    found: dict[str, list[GpuSample]] = {}
    for sample in evidence.device_samples:
        for gpu in sample.gpus or ():
            found.setdefault(f"{sample.node}:{gpu.index}", []).append(gpu)
    yield from found.items()


def _brakes(gpu: GpuSample) -> tuple[str, ...]:
    """Why its clock is held down, as far as that is no ordinary thing."""
    return tuple(
        reason
        for reason in gpu.throttle or ()
        if any(word in reason.lower() for word in ("thermal", "brake", "slowdown"))
        or ("power" in reason.lower() and _limit_was_lowered(gpu))
    )


def _limit_was_lowered(gpu: GpuSample) -> bool:
    known = find_gpu(gpu.name) if gpu.name else None
    if known is None or known.power_watts is None or gpu.power_limit_watts is None:
        return False
    slow = gpu.clock_mhz is not None and gpu.clock_max_mhz and gpu.clock_mhz < SLOWER_CLOCK * gpu.clock_max_mhz
    return bool(slow) and gpu.power_limit_watts < LOWERED_LIMIT * known.power_watts


def _lost_clock(samples: list[GpuSample], braked: list[GpuSample]) -> float:
    """Of the step time at most: computing cannot be faster than the clock, and the rest does not depend on it."""
    shares = [gpu.clock_mhz / gpu.clock_max_mhz for gpu in braked if gpu.clock_mhz is not None and gpu.clock_max_mhz]
    if not shares:
        return 0.0
    return max(0.0, 1 - mean(shares)) * len(braked) / len(samples)


def idle_gpu(evidence: Evidence) -> Finding | None:
    """GPUs of the job on which nothing ran, be it that there are more than ranks, or that it trains on the CPU."""
    idle = [
        name
        for name, samples in _by_gpu(evidence)
        if len(samples) >= LEAST_SAMPLES
        and all(gpu.utilisation is not None and gpu.utilisation <= IDLE and not gpu.processes for gpu in samples)
    ]
    if not idle:
        return None
    everything = len(list(_by_gpu(evidence)))
    change = f"ask for {everything - len(idle)} GPUs, or use them all: --nproc {everything}"
    verdict = f"{len(idle)} of {everything} GPUs of this job did nothing: {', '.join(idle)}"
    if len(idle) == everything:
        if evidence.has_gpu and not _nothing_is_on_them(evidence):
            return None  # it waits for something else, and that is told as what it is
        verdict = f"the job has {count_text(everything, 'GPU')}, and trains on the CPU"
        change = "a torch with CUDA: gradus preflight says what is wrong with this one"
        if evidence.script is not None:
            change = "model.to('cuda'), and the batches too; where there is no CUDA, gradus preflight says why"
    return Finding(
        "idle-gpu",
        verdict,
        {"idle": idle, "gpus": everything, "ranks": evidence.ranks},
        change,
        None,
        "high",
        "waste",
    )


def _nothing_is_on_them(evidence: Evidence) -> bool:
    """Of a script, which does not tell what it trains on: whether its GPUs hold no more than their driver does."""
    if evidence.start or evidence.timings or any(trace.device == "cuda" for trace in evidence.traces):
        return False
    used = [gpu.memory_used_bytes for _, samples in _by_gpu(evidence) for gpu in samples]
    return bool(used) and all(each is not None and each < DRIVER_BYTES for each in used)


RULES = (throttling, idle_gpu)
