"""fp8 beside bf16 on one GPU: speed, memory and the loss over 200 steps, through gradus's own training step.

    python benchmarks/gpu_fp8.py                                  # all of it; prints tables, writes gpu_fp8.json
    python benchmarks/gpu_fp8.py --models gpt-1.3b --steps 200    # a part of it
    python benchmarks/gpu_fp8.py --small                          # a quick check that it runs, on any machine

Every way of scaling sees the same weights and the same samples in the same order. Throughput is over the steps after
the first tenth, compilation left out; the loss gap is over the last tenth. The result goes to --out.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gradus.hardware.cluster import detect_cluster
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.float8 import Float8Linear
from gradus.training.live_run import LiveRun

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
# The proportions of Llama 3.2 3B, with the vocabulary of the other one so that both have the same output layer.
LLAMA_3B = {
    "use": "gpt",
    "layers": 28,
    "width": 3072,
    "heads": 24,
    "kv_heads": 8,
    "inner": 8192,
    "context": 2048,
    "vocabulary": 50_304,
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "swiglu",
    "bias": False,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {  # and samples of 2,048 tokens in a batch
    "gpt-1.3b": ({"use": "gpt-1.3b"}, 8),
    "llama-3b": (LLAMA_3B, 6),
}
SMALL: dict[str, tuple[dict[str, Any], int]] = {
    "gpt small": ({"use": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 32}, 4),
}
WAYS = ("bf16", "tensor", "row", "block")


def live_run(
    model: dict[str, Any], batch: int, steps: int, way: str, compile: bool, folder: Path, changes: Sequence[str] = ()
) -> LiveRun:
    """A run with that kind of products; `changes` are keys of the recipe, as --set takes them."""
    plan: dict[str, Any] = {"compile": compile, "precision": "bf16", "checkpoint_every": 10**9}
    if way != "bf16":
        plan |= {"precision": "fp8", "fp8_scaling": way}
    document = {
        "name": "fp8",
        "model": model,
        "data": {"use": "stdlib-text"},
        "batch": batch,
        "steps": steps,
        "seed": 1,
        "optimizer": {"use": "adamw", "lr": 3e-4, "warmup": steps // 10, "decay": "cosine", "clip": 1.0},
        "plan": plan,
    }
    recipe = resolved(Recipe.from_document(document, overrides=changes))
    chosen = default_plan(recipe, detect_cluster(), 1).plan
    return LiveRun.from_recipe(recipe, chosen, RunDirectory.create(folder, "fp8"), 1, alone(DEVICE))


def measured(live: LiveRun, steps: int) -> dict[str, Any]:
    """All steps of the run, without a checkpoint at the end; numbers are read one step late, as in the real loop."""
    batches = live.loader.micro_batches(0, steps)
    losses, done_at, pending = [], [], None
    began = time.monotonic()
    for step in range(steps):
        late, pending = pending, live.step.run(batches, step, live.schedule(step), measure_norm=False)
        if late is not None:
            numbers = late.wait()
            losses.append(numbers.loss)
            done_at.append(numbers.done_at)
    assert pending is not None
    numbers = pending.wait()
    losses.append(numbers.loss)
    done_at.append(numbers.done_at)
    seconds = [b - a for a, b in itertools.pairwise(done_at)][max(1, steps // 10) :]
    tokens = live.recipe.batch * (live.tokens_per_sample or 1)
    return {
        "tokens_per_second": tokens / statistics.median(seconds),
        "step_seconds": statistics.median(seconds),
        "first_step_seconds": done_at[0] - began,
        "memory_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else None,
        "parameters": sum(p.numel() for p in live.model.parameters()),
        "fp8_layers": sum(isinstance(module, Float8Linear) for module in live.model.modules()),
        "losses": losses,
    }


def compare(name: str, model: dict[str, Any], batch: int, steps: int, way: str, compile: bool) -> dict[str, Any]:
    """The row of one way; one that cannot run here says why."""
    row: dict[str, Any] = {"model": name, "way": way}
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        torch._dynamo.reset()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            live = live_run(model, batch, steps, way, compile, Path(folder))
        except InputError as error:
            print(f"{name} {way}: {error}", flush=True)
            return {**row, "refused": str(error)}
        try:
            row |= {"batch": batch, **measured(live, steps)}
        except (torch.OutOfMemoryError, RuntimeError) as error:
            row["refused"] = str(error).splitlines()[0]
        live.recorder.close(state="finished")
    said = row.get("refused") or (
        f"{row['tokens_per_second']:,.0f} tokens/s, loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.4f}"
    )
    print(f"{name} {way}: {said}", flush=True)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | products in | fp8 layers | tokens/s | of bf16 | peak GiB | last loss | gap to bf16 | largest gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base: dict[str, dict[str, Any]] = {row["model"]: row for row in rows if row["way"] == "bf16" and "losses" in row}
    for row in rows:
        way = row["way"] if row["way"] == "bf16" else f"fp8, {row['way']}"
        if "losses" not in row:
            lines.append(f"| {row['model']} | {way} | {row['refused']} |||||||")
            continue
        reference = base.get(row["model"])
        last = max(1, len(row["losses"]) // 10)
        loss = statistics.mean(row["losses"][-last:])
        speed = gap = largest = ""
        if reference is not None:
            speed = f"{row['tokens_per_second'] / reference['tokens_per_second']:.3f}"
            gap = f"{loss / statistics.mean(reference['losses'][-last:]) - 1:+.2%}"
            differences = (a - b for a, b in zip(row["losses"], reference["losses"], strict=True))
            largest = f"{max(map(abs, differences)):.4f}"
        memory = f"{row['memory_peak_gib']:.1f}" if row["memory_peak_gib"] is not None else ""
        lines.append(
            f"| {row['model']} | {way} | {row['fp8_layers']} | {row['tokens_per_second']:,.0f} | {speed} | {memory} | "
            f"{loss:.4f} | {gap} | {largest} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="tiny models, few steps; on a CPU, bf16 only")
    parser.add_argument("--models", default="", help="names, with commas")
    parser.add_argument("--ways", default=",".join(WAYS), help="of bf16, tensor, row, block, mx, with commas")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--eager", action="store_true", help="without compilation")
    parser.add_argument("--out", type=Path, default=Path("."))
    parsed = parser.parse_args()
    models = SMALL if parsed.small else MODELS
    chosen = parsed.models.split(",") if parsed.models else list(models)
    ways = tuple(parsed.ways.split(",")) if DEVICE.type == "cuda" else ("bf16",)
    steps = 10 if parsed.small else parsed.steps
    compile = DEVICE.type == "cuda" and not parsed.eager
    rows: list[dict[str, Any]] = []
    output = parsed.out / "gpu_fp8.json"
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    for model, way in itertools.product(chosen, ways):
        settings, batch = models[model]
        rows.append(compare(model, settings, batch, steps, way, compile))
        if not parsed.small:  # after each one: an interrupt loses nothing
            output.write_text(json.dumps({"device": name, "torch": torch.__version__, "steps": steps, "rows": rows}))
    print(f"\n{name}, torch {torch.__version__}, {steps} steps, compile {compile}\n")
    print(table(rows))


if __name__ == "__main__":
    main()
