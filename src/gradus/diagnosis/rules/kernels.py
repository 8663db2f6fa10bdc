"""Kernels: too small ones, and matrix products that miss the tensor cores. Of GPUs; traces say most about them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.rules.memory import memory_headroom
from gradus.hardware.catalogue import Gpu, find_gpu, peak_flops

if TYPE_CHECKING:
    from gradus.diagnosis.timeline.analysis import TraceAnalysis

LAUNCH_SHARE = 0.2  # of the traced steps, that the device waits for launches or runs kernels of microseconds
SYNC_SHARE = 0.05  # of the traced steps, in which the host waits for the device
# A CPU has no launches to wait for; thousands of operators of a few microseconds in a step are mostly Python all the
# same. Ordinary small models stay far below.
CPU_OPERATORS, CPU_SHARE = 5000, 0.6
# Without a trace: a step as short as this, on a GPU that runs no kernel half of the time, is bound by its host.
SHORT_STEP_SECONDS, IDLE = 0.01, 0.5
OFF_TENSOR_CORES_SHARE = 0.1
LEAST_GAIN = 0.1
# What PyTorch's own tutorial on the layout reports for convolutional networks: 8 to 35 %.
CHANNELS_LAST_GAIN = 0.35
CONVOLUTIONAL = ("resnet", "simple-cnn", "mnist-cnn")
# Kernels with which cuDNN turns one layout into the other and back.
LAYOUT_KERNELS = ("nchwtonhwc", "nhwctonchw")
LAYOUT_SHARE = 0.03


def small_kernels(evidence: Evidence) -> Finding | None:
    if memory_headroom(evidence) is not None:  # micro-batches are too small, and kernels with them
        return None
    return _small_in_traces(evidence) or _small_by_timings(evidence)


def _small_in_traces(evidence: Evidence) -> Finding | None:
    traces = [trace for trace in evidence.traces if trace.span_seconds > 0 and trace.steps > 0]
    if not traces:
        return None
    # After a wait for the device, the host has to catch up: that is the wait's fault, and told as one.
    starved = mean(
        0.0 if trace.sync_blocked_seconds > SYNC_SHARE * trace.span_seconds else _starved(trace) for trace in traces
    )
    if evidence.training_seconds:
        # A profiler slows the host down, with stacks several times: in other steps the device idles less.
        busy = mean(trace.busy_seconds / trace.steps for trace in traces)
        starved = min(starved, max(0.0, 1 - busy / evidence.training_seconds))
    tiny = mean(trace.small_kernel_share * trace.busy_seconds / trace.span_seconds for trace in traces)
    a_step = mean(trace.kernels / trace.steps for trace in traces)
    on_cpu = all(trace.device == "cpu" for trace in traces)
    share = tiny if on_cpu else starved + tiny
    if (a_step < CPU_OPERATORS or share < CPU_SHARE) if on_cpu else share < LAUNCH_SHARE:
        return None
    small = mean(trace.small_kernels / trace.steps for trace in traces)
    facts = {
        "kernels_in_a_step": round(a_step),
        "below_10_microseconds": round(small),
        "small_kernel_share": tiny,
        "launch_starved_share": starved,
        "most_launched": [f"{one.name[:60]} ×{one.count}" for one in _most_launched(traces)],
    }
    what = "operators" if on_cpu else "kernels"
    return Finding(
        "small-kernels",
        f"{share:.0%} of the traced steps goes into launching {round(a_step)} {what} a step, "
        f"{round(small)} of them below 10 µs",
        facts,
        _fewer_launches(evidence),
        min(1.0, share),
        "medium" if on_cpu else "high",
    )


def _starved(trace: TraceAnalysis) -> float:
    return trace.launch_starved_seconds / trace.span_seconds


def _most_launched(traces: Sequence[TraceAnalysis]) -> list[Any]:
    return sorted((one for trace in traces for one in trace.top_kernels), key=lambda one: -one.count)[:3]


def _fewer_launches(evidence: Evidence) -> str:
    plan = evidence.plan
    if plan is None:
        return "torch.compile(model), with mode='reduce-overhead' for CUDA graphs; or a larger batch"
    remedies = [] if plan.compile else ["--set plan.compile=true"]
    if plan.accumulate > 1 and plan.mesh.pipeline == 1:
        micro = plan.micro_batch * plan.accumulate
        remedies.append(f"--set plan.micro_batch={micro} --set plan.accumulate=1")
    remedies.append("a larger batch, or wider and fewer layers")
    return "; or ".join(remedies)


def _small_by_timings(evidence: Evidence) -> Finding | None:
    busy = utilisation(evidence)
    if evidence.traces or not evidence.has_gpu or busy is None or not evidence.step_seconds:
        return None
    waits = evidence.share("data") + evidence.share("exposed_communication") + evidence.share("checkpoint")
    waits += evidence.share("evaluation")
    if evidence.step_seconds > SHORT_STEP_SECONDS or busy > IDLE or waits > 1 - busy:
        return None
    return Finding(
        "small-kernels",
        f"steps of {evidence.step_seconds * 1000:.2g} ms leave the GPU without a kernel for {1 - busy:.0%} of the time",
        {"step_seconds": evidence.step_seconds, "utilisation_share": busy},
        _fewer_launches(evidence),
        max(0.0, 1 - busy - waits),
        "low",
        not_measured=("which kernels, and whether the host waits in between: gradus train --profile steps=5",),
    )


def utilisation(evidence: Evidence) -> float | None:
    """Of the time, in which a kernel ran: over the GPUs that the run used and the time of its steps."""
    found = [
        gpu.utilisation
        for sample in evidence.device_samples
        for gpu in sample.gpus or ()
        if gpu.utilisation is not None and gpu.processes != 0
    ]
    return mean(found) if found else None


def fp32(evidence: Evidence) -> Finding | None:
    """On a GPU only: a CPU has no units for bf16 that one could count on."""
    plan, gpu = evidence.plan, _gpu(evidence)
    if plan is None or plan.precision != "fp32" or not evidence.has_gpu or gpu is None or not evidence.step_seconds:
        return None
    better = _better_format(gpu)
    if better is None:
        return None
    name, ratio = better
    busy = utilisation(evidence)
    computing = evidence.share("forward") + evidence.share("backward")
    gain = computing * (1 - ratio) * (busy if busy is not None else 1.0)
    if gain < LEAST_GAIN:
        return None
    return Finding(
        "fp32",
        f"matrix products run in fp32, for which {gpu.name} has no tensor cores; {name} is up to {1 / ratio:.0f} times "
        "as fast",
        {
            "forward_seconds": evidence.seconds["forward"],
            "backward_seconds": evidence.seconds["backward"],
            "step_seconds": evidence.step_seconds,
            "peak_fp32_tflops": gpu.peak_tflops["fp32"],
            f"peak_{name}_tflops": gpu.peak_tflops[name],
            "utilisation_share": busy,
        },
        f"--set plan.precision={name} (or tf32, which keeps all numbers in fp32)"
        if "tf32" in gpu.peak_tflops
        else f"--set plan.precision={name}",
        gain,
        "high" if evidence.confidence == "high" else "low",
        not_measured=() if evidence.traces else ("how much of it is matrix products: gradus train --profile steps=5",),
    )


def _better_format(gpu: Gpu) -> tuple[str, float] | None:
    """The 16-bit format that this GPU computes faster in, and its fp32 speed in parts of it."""
    plain = peak_flops(gpu, "fp32")
    for name in ("bf16", "fp16"):
        fast = peak_flops(gpu, name)
        if plain and fast and fast > plain and (name != "bf16" or (gpu.compute_capability or (8, 0)) >= (8, 0)):
            return name, plain / fast
    return None


def _gpu(evidence: Evidence) -> Gpu | None:
    names = [evidence.cluster.gpu_name if evidence.cluster else None]
    names += [str(gpu.get("name")) for gpu in evidence.environment.get("gpus", [])]
    names += [trace.device_name for trace in evidence.traces]
    return next((gpu for name in names if name and (gpu := find_gpu(name)) is not None), None)


def no_tensor_cores(evidence: Evidence) -> Finding | None:
    """From traces: kernels say by their names whether they use them."""
    plan = evidence.plan
    off = [
        (trace, trace.matmul_off_tensor_cores_seconds)
        for trace in evidence.traces
        if trace.matmul_off_tensor_cores_seconds is not None and trace.span_seconds > 0
    ]
    if not off or (plan is not None and plan.precision in ("fp32", "fp64")):  # that is told as what it is
        return None
    share = mean(seconds / trace.span_seconds for trace, seconds in off)
    if share < OFF_TENSOR_CORES_SHARE:
        return None
    odd = _odd_sizes(evidence)
    if odd:
        change = " ".join(f"--set model.{key}={-(-value // 16) * 16}" for key, value in odd.items())
        why = "sizes are no multiples of 8: " + ", ".join(f"model.{key} is {value}" for key, value in odd.items())
    elif plan is None:
        change = "torch.autocast('cuda', torch.bfloat16) around forward, or torch.set_float32_matmul_precision('high')"
        why = "their numbers are fp32, or their sizes no multiples of 8"
    else:
        change = "make the sizes of these layers multiples of 16, and keep their inputs in the plan's precision"
        why = "their inputs are in fp32, or their sizes no multiples of 8"
    return Finding(
        "no-tensor-cores",
        f"matrix products that miss the tensor cores take {share:.0%} of the traced steps: {why}",
        {
            "off_tensor_cores_share": share,
            "off_tensor_cores_seconds": sum(seconds for _, seconds in off),
            "matmul_seconds": sum(trace.matmul_seconds for trace, _ in off),
            "kernels": [
                one.name[:80] for trace, _ in off[:1] for one in trace.top_kernels if one.tensor_cores is False
            ][:3],
        },
        change,
        share,
        "high" if odd else "medium",
    )


def _odd_sizes(evidence: Evidence) -> dict[str, int]:
    options = evidence.recipe.model.options if evidence.recipe else {}
    widths = ("width", "hidden", "vocabulary", "vocab_size", "heads_width", "ff_width")
    return {key: value for key, value in options.items() if key in widths and isinstance(value, int) and value % 8}


def channels_last(evidence: Evidence) -> Finding | None:
    plan = evidence.plan
    if plan is None or plan.channels_last or plan.sharded or not evidence.has_gpu or not evidence.step_seconds:
        return None
    turning = [
        sum(one.seconds for one in trace.top_kernels if any(mark in one.name.lower() for mark in LAYOUT_KERNELS))
        / trace.span_seconds
        for trace in evidence.traces
        if trace.span_seconds > 0
    ]
    turned = mean(turning) if turning else None
    known = evidence.recipe is not None and evidence.recipe.model.use.startswith(CONVOLUTIONAL)
    if not (known and plan.precision in ("bf16", "fp16", "tf32")) and (turned is None or turned < LAYOUT_SHARE):
        return None
    computing = evidence.share("forward") + evidence.share("backward")
    gain = computing * CHANNELS_LAST_GAIN
    if gain < LEAST_GAIN:
        return None
    return Finding(
        "channels-last",
        "convolutions get their images in the layout that tensor cores have to turn round first",
        {
            "channels_last": False,
            "precision": plan.precision,
            "layout_kernels_share": turned,
            "forward_seconds": evidence.seconds["forward"],
            "backward_seconds": evidence.seconds["backward"],
        },
        "--set plan.channels_last=true",
        gain,
        "high" if turned is not None and turned >= LAYOUT_SHARE else "medium",
        not_measured=() if turned is not None else ("time in layout kernels: gradus train --profile steps=5",),
    )


RULES = (small_kernels, fp32, no_tensor_cores, channels_last)
