"""What checkpoints cost a training run on a GPU: the stall of each, and whether steps are slower while one is written.

A GPT of 1.3 billion parameters (24 × 2048, context 2048, batch 8, bf16, compiled) with its AdamW state, 15.8 GB, trains
once without checkpoints and once with one every few steps, written in the background.

    python benchmarks/gpu_checkpoint.py --folder FOLDER [--layers 24 --width 2048 --steps 60]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import torch

from gradus.parallel.world import alone
from gradus.planner.resolve import resolved
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.record.metrics import read_metrics
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train


def recipe_of(given: argparse.Namespace, every: int) -> Recipe:
    plan = {"precision": "bf16", "compile": True} if given.device == "cuda" else {}
    document = {
        "name": "checkpoints",
        "model": {
            "use": "gpt",
            "layers": given.layers,
            "width": given.width,
            "heads": max(1, given.width // 128),
            "context": given.context,
            "vocabulary": given.vocabulary,
        },
        "data": {"use": "synthetic-tokens", "samples": 4096},
        "batch": given.batch,
        "steps": given.steps,
        "optimizer": {"use": "adamw", "lr": 1e-4, "clip": 1.0},
        "checkpoint": {"every": every, "keep": 1},
        "evaluate": {"batches": 1},
        "plan": {**plan, "micro_batch": given.batch, "checkpoint_every": every},
    }
    return resolved(Recipe.from_document(document))


def trained(given: argparse.Namespace, every: int) -> dict[str, Any]:
    recipe = recipe_of(given, every)
    run = RunDirectory.create(given.folder, f"every-{every}")
    live = LiveRun.from_recipe(recipe, recipe.plan, run, 1, alone(torch.device(given.device)))
    ending = train(live)
    live.recorder.close(state=ending.state)
    rows, events = read_metrics(run), read_events(run)
    shutil.rmtree(run.path)
    saved = [event for event in events if event["event"] == "checkpoint"]
    return {
        "steps": [row["step_seconds"] for row in rows][10:],  # the first ones compile
        "stalls": [row["checkpoint_stall_seconds"] for row in rows if "checkpoint_stall_seconds" in row],
        "seconds": [event["seconds"] for event in saved],
        "bytes": saved[-1]["bytes"],
        "parameters": live.parameter_counts[0],
        "problems": [event["message"] for event in events if event["event"] == "fault"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=60)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    without, with_saves = trained(given, 10**9), trained(given, given.every)
    print(f"{with_saves['parameters']:,} parameters, {with_saves['bytes'] / 1e9:.1f} GB of state")
    print(f"a step without checkpoints   {statistics.median(without['steps']):.4f} s (median)")
    print(f"a step with them             {statistics.median(with_saves['steps']):.4f} s (median)")
    print(f"stalls                       {', '.join(f'{s:.3f}' for s in with_saves['stalls'])} s (the last: the end)")
    print(f"until committed              {', '.join(f'{s:.1f}' for s in with_saves['seconds'])} s")
    print("problems:", with_saves["problems"] or "none")
    if given.json:
        given.json.write_text(json.dumps({"without": without, "with": with_saves}, indent=1))


if __name__ == "__main__":
    main()
