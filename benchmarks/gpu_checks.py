"""What only a GPU can show: no step waits for the device, every precision trains, and a resumed run is the same run.

python benchmarks/gpu_checks.py     # needs a CUDA GPU; prints one line for each claim, fails on the first false one
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from gradus.hardware.cluster import detect_cluster
from gradus.parallel.world import alone
from gradus.planner.defaults import default_plan
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.record.stop import request_stop
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

DEVICE = torch.device("cuda", 0)
GPT = {"model": {"use": "gpt", "layers": 4, "width": 256, "heads": 4, "context": 256, "dropout": 0.1}}
TEXT = {"data": {"use": "stdlib-text"}}
ADAMW = {"optimizer": {"use": "adamw", "lr": 1e-3, "warmup": 10, "decay": "cosine", "clip": 1.0}}
CNN = {
    "model": {"use": "simple-cnn"},
    "data": {"use": "synthetic-images", "size": 32, "samples": 2000},
    "optimizer": {"use": "sgd", "lr": 0.02, "momentum": 0.9},
}


def live_run(folder: Path, attempt: int = 1, run: RunDirectory | None = None, **document: Any) -> LiveRun:
    recipe = resolved(Recipe.from_document({"name": "check", "batch": 32, "steps": 30, "seed": 1, **document}))
    plan = default_plan(recipe, detect_cluster(), 1).plan
    return LiveRun.from_recipe(recipe, plan, run or RunDirectory.create(folder, "check"), attempt, alone(DEVICE))


def finished(live: LiveRun) -> list[dict[str, Any]]:
    ending = train(live)
    live.recorder.close(state=ending.state)
    return read_metrics(live.run)


def check_no_step_waits(folder: Path, name: str, **document: Any) -> None:
    """CUDA's own detector of implicit synchronisation raises if any operation of a step makes the host wait."""
    live = live_run(folder, **document)
    batches = live.loader.micro_batches(0, 20)
    for step in range(20):
        torch.cuda.set_sync_debug_mode("error" if step >= 5 else "default")  # the first steps compile
        live.step.run(batches, step, 1e-3, measure_norm=True)
    torch.cuda.set_sync_debug_mode("default")
    live.recorder.close(state="finished")
    print(f"no step waits for the device: {name} ({live.plan.precision}, compile {live.plan.compile})", flush=True)


def check_precision(folder: Path, precision: str, compile: bool) -> None:
    rows = finished(live_run(folder, **GPT, **TEXT, **ADAMW, plan={"precision": precision, "compile": compile}))
    first, last = rows[0]["loss"], rows[-1]["loss"]
    assert last < first - 0.5, (first, last)
    speed = rows[-2]["tokens_per_second"]
    figures = f"loss {first:.3f} -> {last:.3f}, {speed:,.0f} tokens/s, MFU {rows[-2]['mfu']}"
    print(f"{precision}, compile {compile}: {figures}", flush=True)


def check_resume(folder: Path, optimizer: str, precision: str) -> None:
    plan = {"compile": False, "precision": precision}
    changes = {**GPT, **TEXT, "optimizer": {"use": optimizer, "lr": 1e-3}, "deterministic": True, "plan": plan}
    undisturbed = finished(live_run(folder, **changes))
    first = live_run(folder, **changes)
    first.stop.look_every_seconds = 0.0
    schedule = first.schedule

    def watched(position: int) -> float:
        if first.state.step == 9:
            request_stop(first.run, "check")
        return schedule(position)

    first.schedule = watched
    finished(first)
    first.run.stop_file.unlink()
    assert first.state.step < 30, first.state.step
    rows = finished(live_run(folder, attempt=2, run=first.run, **changes))
    assert [row["loss"] for row in rows] == [row["loss"] for row in undisturbed]
    print(f"{optimizer}, {precision}: stopped at step {first.state.step} and resumed: {len(rows)} losses bit for bit")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this needs a CUDA GPU")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_no_step_waits(folder, "gpt", **GPT, **TEXT, **ADAMW)
        check_no_step_waits(folder, "gpt fp16", **GPT, **TEXT, **ADAMW, plan={"precision": "fp16", "compile": False})
        accumulating = {"micro_batch": 8, "compile": False}
        check_no_step_waits(folder, "gpt accumulating", **GPT, **TEXT, **ADAMW, plan=accumulating)
        check_no_step_waits(folder, "simple-cnn with loader workers", **CNN, plan={"compile": False})
        for precision, compile in (("fp32", False), ("tf32", False), ("bf16", True), ("fp16", False)):
            check_precision(folder, precision, compile)
        for optimizer, precision in (("adamw", "bf16"), ("lamb", "fp16"), ("lars", "fp16"), ("adadelta", "fp32")):
            check_resume(folder, optimizer, precision)
    print("all checks passed")


if __name__ == "__main__":
    main()
