"""Speed and memory knob by knob, precisions, loader and batch sweeps, and a tuning, on one GPU.

    python benchmarks/gpu_tune.py --out DIR            # about six minutes on an H200
    python benchmarks/gpu_tune.py --out DIR --parts knobs,gpt-tuned
    python benchmarks/gpu_tune.py --out DIR --small    # a quick check, on any machine

Writes DIR/<part>.json as it goes, and DIR/gpu_tune.md with all tables, which are printed last. A part that would begin
after `--minutes` is left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradus.bench.knobs import knobs
from gradus.bench.precision import precision
from gradus.bench.result import BenchResult, bench_environment
from gradus.bench.tried import Ranks, Trial, host_memory_for, interleaved, repeated
from gradus.bench.tried_recipe import given, plan_here
from gradus.bench.tune import Tuner, step_text
from gradus.hardware.cluster import detect_cluster
from gradus.planner.defaults import Choice
from gradus.planner.resolve import resolved
from gradus.record.format import bytes_text
from gradus.schema.plan import Plan, Precision
from gradus.schema.recipe import Recipe

CLUSTER = detect_cluster()
HAS_GPU = bool(CLUSTER.gpus_per_node)


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    gpt: list[str]
    gpt_batch: int
    resnet: list[str]
    resnet_batch: int
    cnn_batch: int
    workers: tuple[int, ...]
    batches: tuple[int, ...]
    repeats: int
    seconds: float
    steps: int
    minutes: float  # of each tuning


LARGE = Sizes(
    gpt=[],
    gpt_batch=8,
    resnet=["model.classes=1000"],
    resnet_batch=256,
    cnn_batch=512,
    workers=(0, 2, 4, 8),
    batches=(64, 128, 256, 512, 1024, 2048, 4096),
    repeats=2,
    seconds=1.5,
    steps=20,
    minutes=2.5,
)
SMALL = Sizes(
    gpt=["model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "model.vocabulary=256"],
    gpt_batch=4,
    resnet=["model.small_input=true", "model.image=32", "model.classes=10"],
    resnet_batch=4,
    cnn_batch=16,
    workers=(0, 2),
    batches=(8, 16),
    repeats=1,
    seconds=0.1,
    steps=4,
    minutes=2.0,
)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def gpt_recipe(sizes: Sizes) -> Recipe:
    return given(None, "gpt2-124m", sizes.gpt, batch=sizes.gpt_batch)


def cnn_recipe(sizes: Sizes, folder: Path, batch: int) -> Recipe:
    document = {
        "name": "simple-cnn",
        "model": {"use": "simple-cnn"},
        "data": {"use": "cifar10", "path": str(folder)},
        "batch": batch,
        "steps": 1000,
        "optimizer": {"use": "sgd", "lr": 0.01, "momentum": 0.9},
    }
    return resolved(Recipe.from_document(document))


def pretended_cifar10(folder: Path) -> None:
    """As large as the real one, in its format: what is in the pictures does not matter to speed."""
    drawn = np.random.default_rng(1)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        records = drawn.integers(0, 256, (10_000, 1 + 3 * 32 * 32), dtype=np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())


def trial(recipe: Recipe, plan: Plan, sizes: Sizes) -> Trial:
    memory = None if HAS_GPU else host_memory_for(1)
    return Trial(recipe, plan, seconds=sizes.seconds, host_memory_bytes=memory)


def sweep(kind: str, title: str, trials: dict[str, Trial], sizes: Sizes) -> tuple[BenchResult, list[str]]:
    with Ranks(1) as ranks:
        tries = []
        for name, tried in interleaved(ranks, trials, sizes.repeats):
            say(f"  {name}: {tried.samples_per_second or tried.why}")
            tries.append((name, tried))
    found = repeated(tries)
    rows = [
        {
            "setting": name,
            "samples_per_second": each.samples_per_second,
            "spread": each.spread,
            "memory_bytes": each.memory_bytes,
            "data_share": each.tries[-1].data_share,
            "why": each.failure.why if each.failure else "",
        }
        for name, each in found.items()
    ]
    lines = ["| setting | samples/s | ± | over the first | waits for samples | memory |", "|---|---|---|---|---|---|"]
    first = rows[0]["samples_per_second"]
    for row in rows:
        rate = row["samples_per_second"]
        if rate is None:
            lines.append(f"| {row['setting']} | {row['why']} | | | | |")
            continue
        over = f"{rate / first:.2f}×" if first else "–"
        share, memory = f"{row['data_share']:.0%}", bytes_text(row["memory_bytes"])
        lines.append(f"| {row['setting']} | {rate:,.0f} | {row['spread']:.1%} | {over} | {share} | {memory} |")
    return BenchResult(kind, title, {}, rows, environment=bench_environment()), lines


def of_knobs(sizes: Sizes, folder: Path) -> tuple[BenchResult, list[str]]:
    result = knobs(gpt_recipe(sizes), CLUSTER, repeats=sizes.repeats, seconds=sizes.seconds, say=say)
    lines = ["| knob | speed | noise | memory | faster/smaller | claimed |", "|---|---|---|---|---|---|"]
    for row in result.rows:
        if row["speed_ratio"] is None:
            lines.append(f"| {row['knob']} | {row['why']} | | | | {row['claim']} |")
            continue
        found = f"{'Y' if row['faster'] else 'N'}/{'Y' if row['smaller'] else 'N'}"
        memory = f"{row['memory_ratio']:.2f}×" if row["memory_ratio"] is not None else "–"
        lines.append(
            f"| {row['knob']} | {row['speed_ratio']:.2f}× | {row['noise']:.1%} | {memory} | {found} | {row['claim']} |"
        )
    return result, lines


def of_precision(recipe: Recipe, names: list[Precision], sizes: Sizes) -> tuple[BenchResult, list[str]]:
    plan = plan_here(recipe, 1)[0].plan.model_copy(update={"compile": False})
    result = precision(recipe, plan, CLUSTER, names, steps=sizes.steps, repeats=sizes.repeats, say=say)
    lines = ["| precision | samples/s | over fp32 | memory | over fp32 | loss | gap |", "|---|---|---|---|---|---|---|"]
    for row in result.rows:
        if row["samples_per_second"] is None:
            lines.append(f"| {row['precision']} | {row['why']} | | | | | |")
            continue
        loss = f"{row['loss']:.4f}" if row["loss"] is not None else "no number"
        gap = f"{row['loss_gap']:+.2%}" if row["loss_gap"] is not None else "–"
        lines.append(
            f"| {row['precision']} | {row['samples_per_second']:,.0f} | {row['speed_up']:.2f}× | "
            f"{bytes_text(row['memory_bytes'])} | {row['memory_ratio']:.2f}× | {loss} | {gap} |"
        )
    return result, lines


def of_resnet(sizes: Sizes, folder: Path) -> tuple[BenchResult, list[str]]:
    recipe = given(None, "resnet18", sizes.resnet, batch=sizes.resnet_batch)
    return of_precision(recipe, ["fp32", "tf32", "fp16", "bf16"] if HAS_GPU else ["fp32", "bf16"], sizes)


def of_gpt(sizes: Sizes, folder: Path) -> tuple[BenchResult, list[str]]:
    return of_precision(gpt_recipe(sizes), ["fp32", "tf32", "fp16", "bf16", "fp8"], sizes)


def of_workers(sizes: Sizes, folder: Path) -> tuple[BenchResult, list[str]]:
    recipe = cnn_recipe(sizes, folder, sizes.cnn_batch)
    plan = Plan(micro_batch=recipe.batch, data_on_device=False)
    trials = {f"workers {n}": trial(recipe, plan.model_copy(update={"workers": n}), sizes) for n in sizes.workers} | {
        "data on the device": trial(recipe, plan.model_copy(update={"data_on_device": True}), sizes)
    }
    return sweep("workers", f"simple-cnn, batch {recipe.batch}, fp32: loader workers", trials, sizes)


def of_batches(sizes: Sizes, folder: Path) -> tuple[BenchResult, list[str]]:
    trials = {
        f"batch {batch}": trial(cnn_recipe(sizes, folder, batch), Plan(micro_batch=batch), sizes)
        for batch in sizes.batches
    }
    return sweep("batches", "simple-cnn, fp32, data on the device: batch", trials, sizes)


def of_cnn_tuned(sizes: Sizes, folder: Path) -> tuple[BenchResult, list[str]]:
    plain = Plan(micro_batch=sizes.cnn_batch, data_on_device=False)
    return tuned_from(cnn_recipe(sizes, folder, sizes.cnn_batch), plain, sizes)


def of_gpt_tuned(sizes: Sizes, folder: Path) -> tuple[BenchResult, list[str]]:
    plain = Plan(micro_batch=max(1, sizes.gpt_batch // 4), accumulate=min(4, sizes.gpt_batch))
    return tuned_from(gpt_recipe(sizes), plain, sizes)


def tuned_from(recipe: Recipe, plain: Plan, sizes: Sizes) -> tuple[BenchResult, list[str]]:
    """From a plain loop's settings, not from the planner's, which has most of it already: the chain of factors."""
    with Ranks(1) as ranks:
        tuner = Tuner(
            recipe,
            Choice(plain, {}),
            CLUSTER,
            ranks,
            say=say,
            minutes=sizes.minutes,
            repeats=max(2, sizes.repeats),
            seconds=sizes.seconds,
        )
        tuned = tuner.tuned(look=False)
    lines = [f"**{recipe.name}**, batch {recipe.batch}, from fp32, eager, no workers:", ""]
    lines += [f"- {step.knob}: {step_text(step)}" for step in tuned.steps]
    end = f"{tuned.measured:.2f}×" if tuned.measured is not None else "not measured"
    lines += [f"- **factors multiply to {tuned.composed:.2f}×, measured end to end {end}**", ""]
    rows = [{"recipe": recipe.name, **tuned.document()}]
    return BenchResult("tune", "Tuning from a plain start", {}, rows, environment=bench_environment()), lines


PARTS: dict[str, tuple[str, Callable[[Sizes, Path], tuple[BenchResult, list[str]]]]] = {
    "knobs": ("Speed and memory, knob by knob (gpt2-124m)", of_knobs),
    "resnet18": ("ResNet-18: fp32 against mixed precision", of_resnet),
    "workers": ("simple-cnn: loader workers", of_workers),
    "batches": ("simple-cnn: batch", of_batches),
    "cnn-tuned": ("simple-cnn: tuning from a plain start", of_cnn_tuned),
    "gpt-tuned": ("gpt2-124m: tuning from a plain start", of_gpt_tuned),
    "gpt": ("gpt2-124m: precisions", of_gpt),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    sizes, began = SMALL if asked.small else LARGE, time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    written: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        pretended_cifar10(Path(folder))
        for part in asked.parts.split(","):
            title, measure = PARTS[part]
            written += [f"## {title}", ""]
            if time.monotonic() - began > asked.minutes * 60:
                written += ["left out: the time was over", ""]
                continue
            say(f"{title} …")
            start = time.monotonic()
            try:
                result, lines = measure(sizes, Path(folder))
            except Exception as error:  # one part that fails must not cost the others
                written += [f"failed: {type(error).__name__}: {error}", ""]
                continue
            (asked.out / f"tune-{part}.json").write_text(json.dumps(result.document(), indent=1, default=str))
            notes = [f"- {note}" for note in result.notes]
            written += [*lines, "", *notes, f"({time.monotonic() - start:.0f} s)", ""]
            text = "\n".join([f"# Measured on {_device()}", "", *written])
            (asked.out / "gpu_tune.md").write_text(text + "\n")  # as far as it is: an interrupt loses nothing
    print("\n".join(written))


def _device() -> Any:
    machine = bench_environment()
    gpus = [gpu.get("name") for gpu in machine.get("gpus", ())]
    return gpus[0] if gpus else machine.get("cpu")


if __name__ == "__main__":
    main()
