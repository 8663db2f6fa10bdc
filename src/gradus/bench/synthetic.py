"""The synthetic benchmark: how many samples of random data a model trains on in a second, in the lines of the lab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gradus.bench.lab_lines import LabResult, iteration_line
from gradus.bench.ranks import said_by_ranks
from gradus.bench.result import BenchResult, bench_environment
from gradus.hardware.catalogue import find_gpu, peak_flops
from gradus.models.catalogue import HUGGINGFACE, resolve
from gradus.record.chart import Chart, Series
from gradus.schema.errors import GradusError, InputError

TRAINING_RANK = "gradus.bench.training_rank"


@dataclass(frozen=True)
class Synthetic:
    """What is measured."""

    model: str
    options: Mapping[str, object] = field(default_factory=dict)
    batch_size: int = 32  # of each rank
    warm_up_batches: int = 10
    batches: int = 10  # in an iteration
    iterations: int = 10
    precision: str = "fp32"
    compile: bool = False
    channels_last: bool = False
    nproc: int | None = None

    def check(self) -> None:
        """Refuse, before ranks are started, what they would refuse."""
        if self.model == HUGGINGFACE.name:
            raise InputError(
                "--model: a Hugging Face model has no random data of its own",
                hint="gradus bench scaling RECIPE measures any recipe",
                field="--model",
                found=self.model,
            )
        resolve(self.model, self.options)

    def asked(self, **further: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "options": dict(self.options),
            "batch_size": self.batch_size,
            "warm_up": self.warm_up_batches,
            "batches": self.batches,
            "iterations": self.iterations,
            "precision": self.precision,
            "compile": self.compile,
            "channels_last": self.channels_last,
            **further,
        }


@dataclass(frozen=True)
class Trained:
    """What the ranks said: on what, and the seconds of every iteration."""

    place: dict[str, Any]
    seconds: tuple[tuple[float, ...], ...]  # of an iteration, by rank
    batches: int
    memory_peak_bytes: int | None

    @property
    def device(self) -> str:
        return device_word(self.place)

    @property
    def lab(self) -> LabResult:
        """As the lab counts: what rank 0 did, times the ranks."""
        samples = self.place["samples"] * self.batches
        rates = [samples / by_rank[0] for by_rank in self.seconds]
        return LabResult.of_iterations(rates, self.place["ranks"], self.device, self.place["unit"])

    @property
    def totals(self) -> tuple[float, ...]:
        """Samples in a second over all ranks, by iteration: all samples in the time of the slowest rank."""
        samples = self.place["samples"] * self.batches * self.place["ranks"]
        return tuple(samples / max(by_rank) for by_rank in self.seconds)


def device_word(place: Mapping[str, Any]) -> str:
    return "GPU" if place["device"] == "cuda" else "CPU"


def trained(
    asked: Mapping[str, Any],
    nproc: int | None,
    *,
    heard: Callable[[dict[str, Any]], None] = lambda said: None,
    variables: Mapping[str, str] | None = None,
) -> Trained | None:
    """Start the ranks and listen; None in a process that only takes part. `heard` gets every line as it comes."""
    place: dict[str, Any] | None = None
    seconds: list[tuple[float, ...]] = []
    peak = None
    for said in said_by_ranks(TRAINING_RANK, asked, nproc, variables=variables):
        if "ranks" in said:
            place = said
        elif "iteration" in said:
            seconds.append(tuple(said["all_seconds"]))
        elif "memory_peak_bytes" in said:
            peak = said["memory_peak_bytes"]
        heard(said)
    if place is None:
        return None
    if not seconds:
        raise GradusError("the ranks have ended without a measurement")
    return Trained(place, tuple(seconds), int(asked["batches"]), peak)


def synthetic(work: Synthetic, say: Callable[[str], None] = lambda line: None) -> BenchResult | None:
    """Measure, and say the lines of the lab as they come; None in a process that only takes part."""
    work.check()
    place: dict[str, Any] = {}

    def heard(said: dict[str, Any]) -> None:
        if "ranks" in said:
            place.update(said)
            say(f"Model: {work.model}")
            say(f"Batch size: {work.batch_size}")
            say(f"Number of {device_word(place)}s: {place['ranks']}")
            say("Running warmup...")
        elif said.get("stage") == "warm":
            say("Running benchmark...")
        elif "iteration" in said:
            rate = place["samples"] * work.batches / said["seconds"]
            say(iteration_line(said["iteration"], rate, device_word(place), place["unit"]))

    found = trained(work.asked(), work.nproc, heard=heard)
    if found is None:
        return None
    for line in found.lab.lines:
        say(line)
    if found.place["tokens"]:
        # Not of the lab, which has no language models; after its lines, so that these can be compared.
        lab, tokens = found.lab, found.place["tokens"]
        total, plus_minus = tokens * lab.total, tokens * lab.total_plus_minus
        say(f"Total tokens/sec on {lab.devices} {lab.device}(s): {total:.1f} +-{plus_minus:.1f}")
    return result_of(work, found)


def result_of(work: Synthetic, found: Trained) -> BenchResult:
    lab, unit = found.lab, found.place["unit"]
    rows: list[dict[str, Any]] = [
        {"iteration": number, "samples_per_second_each": rate, "seconds": seconds[0]}
        for number, (rate, seconds) in enumerate(zip(lab.iterations, found.seconds, strict=True))
    ]
    summary = {
        "samples_per_second_each": lab.each,
        "samples_per_second_each_plus_minus": lab.each_plus_minus,
        "samples_per_second": lab.total,
        "samples_per_second_plus_minus": lab.total_plus_minus,
        "tokens_per_second": lab.total * found.place["tokens"] if found.place["tokens"] else None,
        **_work_rate(found, work.precision),
        "memory_peak_bytes": found.memory_peak_bytes,
    }
    chart = Chart(
        f"{unit}/sec of each {found.device}, by iteration",
        "iteration",
        f"{unit}/sec",
        (Series(work.model, [float(row["iteration"]) for row in rows], list(lab.iterations)),),
        from_zero=True,
        points=True,
    )
    settings = {**work.asked(), "ranks": lab.devices, "device": found.place["device"], "unit": unit}
    return BenchResult(
        "synthetic",
        f"{work.model} on random data, {lab.devices} {lab.device}(s), {work.precision}",
        {**settings, "parameters": found.place["parameters"]},
        rows,
        summary,
        (chart,),
        bench_environment(),
    )


def _work_rate(found: Trained, precision: str) -> dict[str, float | None]:
    """TFLOP/s of each rank, and as a part of the quoted peak, where there is one."""
    flops = found.place["flops_per_sample"]
    if flops is None:
        return {"tflops_each": None, "mfu": None}
    per_second = flops * found.lab.each
    gpu = find_gpu(found.place["name"]) if found.place["name"] else None
    peak = peak_flops(gpu, precision) if gpu else None
    return {"tflops_each": per_second / 1e12, "mfu": per_second / peak if peak else None}
