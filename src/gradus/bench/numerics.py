"""Numerics: what each number format would do to a model's own weights, activations and gradients.

The model is trained for a few steps in fp32 on one rank. In the last one, all that goes into the matrix products of
its layers is looked at as it passes: weights, inputs, gradients of outputs; and the gradients of weights. Formats are
emulated (`number_formats`), so that it needs no device that has them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from gradus.bench.number_formats import FORMATS, Damage, NumberFormat, Shared, damage, format_rows
from gradus.bench.result import BenchResult, bench_environment, finite
from gradus.parallel.world import alone
from gradus.record.chart import Bars, Chart, Series
from gradus.record.directory import RunDirectory
from gradus.record.format import count_text
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe
from gradus.training.calibration import on_one_rank
from gradus.training.device import rank_device
from gradus.training.live_run import LiveRun

KINDS = ("weight", "activation", "output gradient", "weight gradient")
MOST_ELEMENTS = 1 << 18  # of a tensor that are looked at: whole rows, evenly spaced
LOSS_SCALE = 2.0**16  # where fp16 training begins
_BINS = range(-64, 33)  # powers of two that the picture of the ranges shows


@dataclass(frozen=True)
class Range:
    """Where the magnitudes of a tensor lie, as powers of two, zeros left out."""

    lowest: float
    highest: float
    zeros: float  # share
    counts: tuple[int, ...]  # how many in each power of two of _BINS


@dataclass(frozen=True)
class Seen:
    """One tensor, and what each format makes of it."""

    layer: str
    kind: str
    elements: int  # that were looked at
    range: Range
    damages: dict[tuple[str, str], Damage]  # by format and what shares a scale


def numerics(
    recipe: Recipe, plan: Plan, *, steps: int = 2, formats: tuple[str, ...] = tuple(FORMATS), say: Callable[[str], None]
) -> BenchResult:
    """Train a few steps, and look at the last one."""
    here, alone_plan = on_one_rank(recipe, plan)
    plain = {"precision": "fp32", "compile": False, "recompute": "none", "workers": 0, "activation_offload": False}
    alone_plan = alone_plan.model_copy(update=plain)
    here = here.model_copy(update={"steps": steps, "plan": alone_plan})
    device = rank_device(0)
    say(f"{count_text(steps, 'step')} of {recipe.name} in fp32 on {device.type}")
    chosen = [FORMATS[name] for name in formats]
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory.create(Path(folder), "numerics")
        live = LiveRun.from_recipe(here, alone_plan, run, 1, alone(device), watched=False)
        try:
            seen = _last_step(live, steps, chosen)
        finally:
            live.watch.close()
            live.recorder.close(state="finished")
    return _result(recipe, steps, device, chosen, seen)


def _last_step(live: LiveRun, steps: int, formats: list[NumberFormat]) -> list[Seen]:
    batches = live.loader.micro_batches(0, steps)
    for number in range(steps - 1):
        live.step.run(batches, number, live.schedule(number), measure_norm=False).wait()
    seen: list[Seen] = []
    with watched(live.model, lambda layer, kind, rows: seen.append(looked_at(layer, kind, rows, formats))):
        live.step.run(batches, steps - 1, live.schedule(steps - 1), measure_norm=False).wait()
    return seen


@contextmanager
def watched(model: nn.Module, look: Callable[[str, str, Tensor], None]) -> Iterator[None]:
    """Inside, `look` gets (layer, kind, rows) of the first pass through each Linear layer and convolution."""
    met: set[tuple[str, str]] = set()
    handles: list[Any] = []

    def once(layer: str, kind: str, values: Tensor, convolution: bool) -> None:
        if (layer, kind) not in met and values.is_floating_point() and values.numel():
            met.add((layer, kind))
            look(layer, kind, some_rows(values.detach(), convolution))

    def forward(layer: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        convolution = isinstance(module, _ConvNd)
        if inputs and isinstance(inputs[0], Tensor):
            once(layer, "activation", inputs[0], convolution)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: once(layer, "output gradient", gradient, convolution)
            )

    def gradient(layer: str, convolution: bool, parameter: Tensor) -> None:
        if parameter.grad is not None:
            once(layer, "weight gradient", parameter.grad, convolution)

    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, _ConvNd)):
            convolution = isinstance(module, _ConvNd)
            once(name, "weight", module.weight, convolution)
            handles.append(module.register_forward_hook(partial(forward, name)))
            if module.weight.requires_grad:
                hook = partial(gradient, name, convolution)
                handles.append(module.weight.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def some_rows(values: Tensor, convolution: bool) -> Tensor:
    """As a matrix product has them: for a convolution a row is a sample or a filter, else it is the last dimension."""
    rows = values.flatten(1) if convolution and values.dim() > 1 else values.reshape(-1, values.shape[-1])
    most = max(1, MOST_ELEMENTS // rows.shape[1])
    return rows[:: -(-rows.shape[0] // most)]


def looked_at(layer: str, kind: str, rows: Tensor, formats: list[NumberFormat]) -> Seen:
    damages: dict[tuple[str, str], Damage] = {
        (each.name, shared): damage(rows, each, shared) for each in formats for shared in each.scalings
    }
    if kind.endswith("gradient") and any(each.name == "fp16" for each in formats):
        damages["fp16", "loss"] = damage(rows, FORMATS["fp16"], factor=LOSS_SCALE)
    return Seen(layer, kind, rows.numel(), range_of(rows), damages)


def range_of(rows: Tensor) -> Range:
    magnitudes = rows.double().abs()
    powers = magnitudes[magnitudes > 0].log2()
    zeros = 1 - powers.numel() / max(1, rows.numel())
    if not powers.numel():
        return Range(math.nan, math.nan, zeros, (0,) * len(_BINS))
    bins = powers.floor().clamp(_BINS[0], _BINS[-1]).long() - _BINS[0]
    counts = torch.bincount(bins.flatten(), minlength=len(_BINS))
    return Range(float(powers.min()), float(powers.max()), zeros, tuple(counts.tolist()))


def _result(
    recipe: Recipe, steps: int, device: torch.device, formats: list[NumberFormat], seen: list[Seen]
) -> BenchResult:
    rows = [
        _row(kind, name, shared, [one for one in seen if one.kind == kind and (name, shared) in one.damages])
        for name, shared in _columns(formats)
        for kind in KINDS
    ]
    rows = [row for row in rows if row["tensors"]]
    ranges = {
        kind: {
            "tensors": len(of_kind),
            "lowest_power_of_two": min(one.range.lowest for one in of_kind),
            "highest_power_of_two": max(one.range.highest for one in of_kind),
            "zeros": statistics.fmean(one.range.zeros for one in of_kind),
        }
        for kind in KINDS
        if (of_kind := [one for one in seen if one.kind == kind and not math.isnan(one.range.lowest)])
    }
    return BenchResult(
        kind="numerics",
        title=f"Number formats on {recipe.name}",
        settings={"recipe": recipe.name, "steps": steps, "device": device.type, "formats": format_rows()},
        rows=rows,
        summary={"ranges": ranges, "layers": len({one.layer for one in seen})},
        charts=_charts(rows, seen, formats),
        environment=bench_environment(),
        notes=(
            f"formats are emulated on fp32 numbers of step {steps}; at most {MOST_ELEMENTS} numbers of each tensor",
            "sums inside matrix products are not rounded: devices add up in fp32",
        ),
    )


def _columns(formats: list[NumberFormat]) -> list[tuple[str, Shared | str]]:
    found: list[tuple[str, Shared | str]] = []
    for each in formats:
        found += [(each.name, shared) for shared in each.scalings]
        found += [("fp16", "loss")] if each.name == "fp16" else []
    return found


def _row(kind: str, name: str, shared: str, seen: list[Seen]) -> dict[str, Any]:
    """Of all layers the median, and the layer that suffers most."""
    row: dict[str, Any] = {"kind": kind, "format": name, "scale": shared, "tensors": len(seen)}
    if not seen:
        return row
    damages = {one.layer: one.damages[name, shared] for one in seen}
    elements = sum(found.elements for found in damages.values())
    worst = max(damages, key=lambda layer: damages[layer].relative_error)
    ratios = [found.snr_db for found in damages.values()]
    return {
        **row,
        "snr_db": finite(statistics.median(ratios)),
        "relative_error": statistics.median(found.relative_error for found in damages.values()),
        "underflow": sum(found.underflow * found.elements for found in damages.values()) / elements,
        "overflow": sum(found.overflow * found.elements for found in damages.values()) / elements,
        "worst_layer": worst,
        "worst_snr_db": finite(damages[worst].snr_db),
        "worst": asdict(damages[worst]) | {"snr_db": finite(damages[worst].snr_db)},
    }


def _charts(rows: list[dict[str, Any]], seen: list[Seen], formats: list[NumberFormat]) -> tuple[Chart | Bars, ...]:
    labels = dict.fromkeys(f"{row['format']} · {row['scale']}" for row in rows)
    ratios = tuple(
        Bars(
            f"Signal to noise, {kind}s",
            "dB",
            tuple(
                (label, (("median over layers", max(0.0, row["snr_db"])),))
                for label in labels
                for row in rows
                if row["kind"] == kind and f"{row['format']} · {row['scale']}" == label and row["snr_db"] is not None
            ),
            note="about 6 dB for each bit of the mantissa; less where numbers fall below the format's range",
        )
        for kind in KINDS
        if any(row["kind"] == kind for row in rows)
    )
    series = []
    for kind in KINDS:
        counts = [one.range.counts for one in seen if one.kind == kind]
        if counts:
            sums = [sum(column) for column in zip(*counts, strict=True)]
            series.append(Series(kind, list(_BINS), [count / max(1, sum(sums)) for count in sums]))
    shown = ", ".join(
        f"{each.name} 2^{math.floor(math.log2(each.smallest))} to 2^{math.floor(math.log2(each.largest))}"
        for each in formats
    )
    ranges = Chart(
        "Where magnitudes lie",
        "power of two",
        "share of the numbers",
        tuple(series),
        note=f"ranges without a scale: {shown}",
    )
    return (ranges, *ratios)
