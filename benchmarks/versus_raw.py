"""gradus's loop beside a loop written by hand, in one process, in turn: the same model, data, precision and optimizer.

    python benchmarks/versus_raw.py            # on a GPU; prints a table, writes it to benchmarks/versus_raw.md
    python benchmarks/versus_raw.py --small    # a quick check that it runs, on any machine; writes nothing

Throughput is over whole segments of steps, measured alternately and after a warm-up; the table shows medians of the
segments and their spread. gradus does all it does in a real run: global order, metrics, status, events.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gradus.data.source import Batch, Source
from gradus.hardware.cluster import detect_cluster
from gradus.models import catalogue
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEGMENTS = 5
Step = Callable[[], None]


@dataclass(frozen=True)
class Work:
    """One contest: a recipe, and how many steps a segment and the warm-up have."""

    title: str
    recipe: dict[str, Any]
    steps: int
    unit: str
    per_sample: int = 1


class RandomImages(Source):
    """uint8 images that live on the device, as a user with a small dataset would have them."""

    def __init__(self, samples: int, size: int, classes: int) -> None:
        super().__init__(samples)
        generator = np.random.default_rng(0)
        self.images = generator.integers(0, 256, (samples, 3, size, size), dtype=np.uint8)
        self.labels = generator.integers(0, classes, samples, dtype=np.int64)
        self.sample_shape = (3, size, size)
        self.classes = classes

    @property
    def columns(self) -> Batch:
        return (self.images, self.labels)

    def fetch(self, indices: np.ndarray) -> Batch:
        return (self.images[indices], self.labels[indices])

    def finish(self, batch: Any, dtype: torch.dtype) -> Any:
        images, labels = batch
        return images.to(dtype).sub(127.5).div(64.0), labels


def random_images(samples: int, size: int, classes: int, split: str) -> Source | None:
    return RandomImages(samples, size, classes) if split == "train" else None


def works(small: bool, folder: Path) -> list[Work]:
    tokens = folder / "tokens.bin"
    vocabulary = 512 if small else 50_257
    count = 200_000 if small else 20_000_000
    np.random.default_rng(0).integers(0, vocabulary, count, dtype=np.uint16).tofile(tokens)
    images = f"{__file__}:random_images"
    gpt = {"use": "gpt2-124m"}
    if small:
        gpt |= {"layers": 2, "width": 64, "heads": 2, "context": 64, "vocabulary": 512}
    adamw = {"use": "adamw", "lr": 6e-4, "warmup": 100, "decay": "cosine", "weight_decay": 0.1, "clip": 1.0}
    sgd = {"use": "sgd", "lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}
    return [
        Work(
            "GPT-2 124M, context 1024, batch 32, bf16, compile, AdamW, clip",
            {
                "model": gpt,
                "data": {"use": "tokens", "path": str(tokens), "context": 64 if small else 1024, "validation": 0.0},
                "batch": 4 if small else 32,
                "optimizer": adamw,
            },
            steps=4 if small else 100,
            unit="tokens/s",
            per_sample=64 if small else 1024,
        ),
        Work(
            "ResNet-50 224², batch 256, bf16, channels_last, compile, SGD",
            {
                "model": {"use": "resnet18" if small else "resnet50", "small_input": small},
                "data": {
                    "use": images,
                    "samples": 16 if small else 2048,
                    "size": 32 if small else 224,
                    "classes": 1000,
                },
                "batch": 4 if small else 256,
                "optimizer": sgd,
            },
            steps=4 if small else 100,
            unit="images/s",
        ),
        *(
            Work(
                f"simple-cnn 32², 50,000 images on the device, batch {batch}, {kind}, SGD",
                {
                    "model": {"use": "simple-cnn"},
                    "data": {"use": images, "samples": 64 if small else 50_000, "size": 32, "classes": 10},
                    "batch": 8 if small else batch,
                    "optimizer": sgd,
                    "plan": plan,
                },
                steps=4 if small else steps,
                unit="images/s",
            )
            for batch, steps, kind, plan in (
                (4096, 300, "bf16, compile", {}),
                (128, 600, "fp32, eager", {"precision": "fp32", "compile": False}),
            )
        ),
    ]


def gradus_segments(work: Work, folder: Path) -> Iterator[float]:
    """Samples per second of each segment of gradus's own loop, from the metrics that it writes."""
    log_every = max(1, work.steps // 10)
    document = {"name": "versus", "steps": 10**7, "log_every": log_every, "seed": 1, **work.recipe}
    recipe = resolved(Recipe.from_document(document))
    plan = default_plan(recipe, detect_cluster(), 1).plan
    run = RunDirectory.create(folder, "versus")
    live = LiveRun.from_recipe(recipe, plan, run, 1, alone(DEVICE))
    live.saves_by_clock = False  # a checkpoint in the middle of a segment would be no part of a raw loop
    live.save = lambda required: None  # type: ignore[method-assign]
    print(f"  {plan.precision}, compile {plan.compile}, channels_last {plan.channels_last}, workers {plan.workers}")
    while True:
        seen = live.state.step
        live.total_steps = seen + work.steps + 2 * log_every
        train(live)
        rows = [row for row in read_metrics(run) if row["step"] > seen + 2 * log_every]  # the loader had to start anew
        seconds = sum(row["step_seconds"] * log_every for row in rows)
        yield len(rows) * log_every * recipe.batch / seconds


def raw_segments(work: Work) -> Iterator[float]:
    """Samples per second of each segment of a plain PyTorch loop."""
    recipe = resolved(Recipe.from_document({"name": "versus", "steps": 10**7, **work.recipe}))
    plan = default_plan(recipe, detect_cluster(), 1).plan
    torch.manual_seed(1)
    with DEVICE:
        model = catalogue.build(recipe.model.use, recipe.model.options)
    if plan.channels_last:
        model = model.to(memory_format=torch.channels_last)
    step = raw_step(model, recipe, plan)
    for _ in range(work.steps):
        step()
    while True:
        for _ in range(2 * max(1, work.steps // 10)):
            step()
        synchronize()
        began = time.perf_counter()
        for _ in range(work.steps):
            step()
        synchronize()
        yield work.steps * recipe.batch / (time.perf_counter() - began)


def raw_step(model: nn.Module, recipe: Recipe, plan: Any) -> Step:
    """What somebody who knows PyTorch would write: fused optimizer, autocast, compile, no synchronisation."""
    block, options = recipe.optimizer, recipe.data.options
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": block.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if block.use == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=block.lr, fused=True)
    else:
        optimizer = torch.optim.SGD(groups, lr=block.lr, momentum=0.9, fused=True)
    compiled = torch.compile(model) if plan.compile else model
    next_batch = raw_tokens(options, recipe.batch) if "path" in options else raw_images(options, recipe.batch, plan)

    def step() -> None:
        inputs = next_batch()
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=plan.precision == "bf16"):
            output = compiled(*inputs)
        (output.loss_sum / output.count).backward()
        if block.clip:
            nn.utils.clip_grad_norm_(model.parameters(), block.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def raw_tokens(options: dict[str, Any], batch: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    data, context = np.memmap(options["path"], dtype=np.uint16, mode="r"), options["context"]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(DEVICE, non_blocking=True) if DEVICE.type == "cuda" else tensor

    def next_batch() -> tuple[torch.Tensor, ...]:
        starts = np.random.randint(0, len(data) - context - 1, batch)
        windows = torch.from_numpy(np.stack([data[s : s + context + 1].astype(np.int64) for s in starts]))
        windows = moved(windows)
        return windows[:, :-1], windows[:, 1:]

    return next_batch


def raw_images(options: dict[str, Any], batch: int, plan: Any) -> Callable[[], tuple[torch.Tensor, ...]]:
    source = RandomImages(options["samples"], options["size"], options["classes"])
    images, labels = (torch.from_numpy(column).to(DEVICE) for column in source.columns)
    state = {"order": torch.randperm(len(source), device=DEVICE), "at": 0}

    def next_batch() -> tuple[torch.Tensor, ...]:
        if state["at"] + batch > len(source):
            state["order"], state["at"] = torch.randperm(len(source), device=DEVICE), 0
        chosen = state["order"][state["at"] : state["at"] + batch]
        state["at"] += batch
        inputs = images[chosen].float().sub(127.5).div(64.0)
        if plan.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, labels[chosen]

    return next_batch


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def contest(work: Work, folder: Path, segments: int) -> tuple[list[float], list[float]]:
    """Segments of both in turn, after one of each that does not count."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = work.recipe.get("plan") in (None, {})
    raw, ours = raw_segments(work), gradus_segments(work, folder)
    next(raw), next(ours)
    results: tuple[list[float], list[float]] = ([], [])
    for number in range(segments):
        # Who goes first changes, so that neither always runs on the warmer device.
        for contestant in ((0, 1), (1, 0))[number % 2]:
            results[contestant].append(next((raw, ours)[contestant]) * work.per_sample)
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="contests whose title has this in it")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".md"))
    parsed = parser.parse_args()
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    lines = [
        f"Measured {date.today()} on {name}, torch {torch.__version__}, by `python benchmarks/versus_raw.py`: "
        f"medians of {SEGMENTS} segments, both in turn in one process.",
        "",
        "| work | raw loop | gradus | unit | gradus / raw | spread raw | spread gradus |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for work in (w for w in works(parsed.small, Path(folder)) if parsed.only in w.title):
            print(work.title, flush=True)
            raw, ours = contest(work, Path(folder), 2 if parsed.small else SEGMENTS)
            ratio = statistics.median(ours) / statistics.median(raw)
            spreads = [f"{(max(x) - min(x)) / statistics.median(x):.1%}" for x in (raw, ours)]
            lines.append(
                f"| {work.title} | {statistics.median(raw):,.0f} | {statistics.median(ours):,.0f} | {work.unit} | "
                f"{ratio:.3f} | {spreads[0]} | {spreads[1]} |"
            )
            print(lines[-1], flush=True)
            torch._dynamo.reset()
            if DEVICE.type == "cuda":
                torch.cuda.empty_cache()
    table = "\n".join(lines) + "\n"
    print(table)
    if not parsed.small:
        parsed.output.write_text(table)


if __name__ == "__main__":
    main()
