"""Told at the start: what a run says of itself when data and model are there, before its first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gradus.data.orders import note_of
from gradus.hardware.catalogue import find_gpu, peak_flops
from gradus.planner.choice.levers import more_parts_than_tokens
from gradus.training.compilation import why_not_compiled
from gradus.training.recorder import Rates

if TYPE_CHECKING:
    from gradus.training.live_run import LiveRun


def tell_start(live: LiveRun) -> None:
    """Of what it consists, where it runs, and what should be known of the ways that its plan took."""
    recorder, rates = live.recorder, _rates(live)
    recorder.rates = rates
    recorder.status(step=live.state.step, steps_total=live.total_steps)
    start = {"step": live.state.step, "steps_total": live.total_steps, "ranks": live.world.size, **rates.mfu()}
    start |= {"device": live.world.device.type, "threads": torch.get_num_threads()}
    start |= {"parameters": live.parameter_counts[0]}
    recorder.event("start", **start)
    if live.world.device.type == "cpu" and live.cluster is not None and live.cluster.gpus_per_node:
        promised = f"{live.cluster.gpus_per_node} × {live.cluster.gpu_name}" if live.cluster.gpu else "GPUs"
        live.warn(f"trains on the CPU: {live.cluster.name} promises {promised} on each node, but there is none here")
    total, trained = live.parameter_counts
    if trained < total:
        recorder.event("model", message=f"trains {trained:,} of {total:,} parameters")
    if live.recompute_note:
        recorder.event("recompute", message=live.recompute_note)
    if live.plan.compile and live.plan.mesh.pipeline == 1 and (nothing := why_not_compiled(live.model)) is not None:
        recorder.event("compilation", message=nothing)
    tokens = _rows_at_once(live)
    if (needless := more_parts_than_tokens(live.plan, tokens)) is not None:
        live.warn(needless)
    if live.float8_layers is not None:
        recorder.event("precision", message=live.float8_layers.summary())
        for doubt in live.float8_layers.doubts(tokens, live.plan.compile):
            live.warn(doubt)
    note = getattr(live.train_data, "note", None)
    if note:
        recorder.event("data", message=note)
    if live.world.leads and (note := note_of(live.order, live.total_samples)):
        recorder.event("data", message=note)


def _rows_at_once(live: LiveRun) -> int | None:
    """How many tokens a layer of this rank sees in one micro-batch."""
    if live.tokens_per_sample is None:
        return None
    return live.plan.micro_batch * live.tokens_per_sample // live.plan.mesh.context


def _rates(live: LiveRun) -> Rates:
    device, precision = live.world.device, live.plan.precision
    gpu = find_gpu(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    peak = peak_flops(gpu, precision) if gpu else None
    return Rates(
        tokens_per_sample=live.tokens_per_sample,
        flops_per_sample=live.flops_per_sample,
        peak_flops=peak * live.world.size if peak else None,
        peak_source=f"{precision} dense, {gpu.sources['peak_tflops']}" if gpu and peak else None,
    )
