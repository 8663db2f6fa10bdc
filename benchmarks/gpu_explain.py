"""Faults that only a GPU shows, planted in real runs: is the planted one the first finding, and is its twin clean?

python benchmarks/gpu_explain.py --out DIR            # needs a CUDA GPU; about ten minutes
python benchmarks/gpu_explain.py --out DIR --small    # tiny models on the CPU: only shows that it runs
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# What a user would write. The sleeping dataset and the model that reads a number back at every step.
USER_FILE = """
import time

import torch
from torch import nn


class Samples:
    def __init__(self, length=65536, width=64, seconds=0.0):
        self.length, self.width, self.seconds = length, width, seconds

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(self.seconds)
        x = torch.full((self.width,), index / self.length)
        return x, x[:1]


class Layers(nn.Module):
    def __init__(self, width=64, hidden=4096, layers=16, reads=False):
        super().__init__()
        self.first, self.last = nn.Linear(width, hidden), nn.Linear(hidden, 1)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.reads, self.seen = reads, 0.0

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
            if self.reads:
                self.seen += x.abs().max().item()
        return self.last(x)
"""


@dataclass(frozen=True)
class Case:
    """What is wrong, what must come first for it, and what mends it."""

    name: str
    finding: str
    recipe: dict[str, Any]
    wrong: dict[str, Any]
    mended: dict[str, Any] = field(default_factory=dict)


def cases(small: bool) -> tuple[Case, ...]:
    size = {"layers": 2, "width": 64, "heads": 4, "context": 64} if small else {}
    gpt = {
        "model": {"use": "gpt", **({"layers": 12, "width": 1024, "heads": 16, "context": 512} | size)},
        "data": {"use": "synthetic-tokens", "context": 64 if small else 512},
        "batch": 4 if small else 32,
        "optimizer": {"use": "adamw", "lr": 1e-4},
        "plan": {"precision": "bf16", "compile": False},
    }
    images = {
        "model": {"use": "resnet18" if small else "resnet50", "classes": 10},
        "data": {"use": "synthetic-images", "size": 32 if small else 224, "samples": 512},
        "batch": 4 if small else 128,
        "optimizer": {"use": "sgd", "lr": 1e-3, "momentum": 0.9},
        "plan": {"precision": "fp32" if small else "bf16", "compile": False},
    }
    own = {
        "model": {"use": "own.py:Layers", "hidden": 64 if small else 4096},
        "data": {"use": "own.py:Samples"},
        "loss": "mse",
        "batch": 16 if small else 1024,
        "optimizer": {"use": "sgd", "lr": 1e-4},
        "plan": {"precision": "fp32" if small else "bf16", "compile": False, "workers": 0 if small else 8},
    }
    if small:
        gpt["plan"] = {"precision": "fp32", "compile": False}
    tiny = {"model.layers": 24, "model.width": 64, "model.heads": 4, "batch": 8}
    return (
        Case("slow-loader", "data-bound", own, {"data.seconds": 0.0001, "plan.workers": 0}),
        Case("item-at-each-step", "host-sync", own, {"model.reads": True}),
        Case("fp32-without-tf32", "fp32", gpt, {"plan.precision": "fp32"}),
        Case("contiguous-images", "channels-last", images, {}, {"plan.channels_last": True}),
        Case("tiny-kernels", "small-kernels", gpt, tiny),
        Case(
            "unused-memory",
            "memory-headroom",
            gpt,
            {"plan.micro_batch": 1 if small else 4, "plan.accumulate": 4 if small else 8},
        ),
        Case("recompute-without-need", "needless-recompute", gpt, {"plan.recompute": "full"}),
    )


def recipe_of(case: Case, *, clean: bool, steps: int) -> dict[str, Any]:
    document: dict[str, Any] = {"name": case.name, "steps": steps, "seed": 1, **json.loads(json.dumps(case.recipe))}
    document["plan"] |= {} if clean or case.finding != "channels-last" else {"channels_last": False}
    for key, value in (case.mended if clean else case.wrong).items():
        place = document
        *blocks, last = key.split(".")
        for block in blocks:
            place = place.setdefault(block, {})
        place[last] = value
    return document


def found_in(case: Case, out: Path, *, clean: bool, steps: int) -> dict[str, Any]:
    """Train it with a trace of a few steps, and ask what is wrong."""
    folder = out / f"{case.name}-{'clean' if clean else 'wrong'}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(USER_FILE)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe_of(case, clean=clean, steps=steps)))
    began = time.monotonic()
    profile = f"steps=3,from={steps - 6},stacks"
    train = ["train", "recipe.yaml", "--nproc", "1", "--here", "--profile", profile, "--json"]
    done = subprocess.run([sys.executable, "-m", "gradus", *train], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-2000:], "findings": [], "seconds": time.monotonic() - began}
    run = json.loads(done.stdout)["run"]
    asked = subprocess.run(
        [sys.executable, "-m", "gradus", "explain", run, "--json"], cwd=folder, capture_output=True, text=True
    )
    if asked.returncode:
        return {"error": (asked.stdout + asked.stderr)[-2000:], "findings": [], "seconds": time.monotonic() - began}
    return {**json.loads(asked.stdout), "seconds": time.monotonic() - began}


def said_of(found: dict[str, Any]) -> str:
    if "error" in found:
        return "error: " + found["error"].strip().splitlines()[-1][:70]
    return ", ".join(f"{one['id']} ({_gain(one)})" for one in found["findings"]) or "none"


def _gain(one: dict[str, Any]) -> str:
    return "-" if one["gain_at_most"] is None else f"{one['gain_at_most']:.0%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="a folder for the runs and the results")
    parser.add_argument("--small", action="store_true", help="tiny models, on the CPU if need be")
    parser.add_argument("--only", nargs="*", default=None, help="names of cases")
    options = parser.parse_args()
    out = options.out.absolute()
    rows = []
    for case in cases(options.small):
        if options.only and case.name not in options.only:
            continue
        steps = 14 if options.small else 40
        wrong, clean = (found_in(case, out, clean=clean, steps=steps) for clean in (False, True))
        first = wrong["findings"][0]["id"] if wrong["findings"] else None
        good = first == case.finding and not clean["findings"] and "error" not in clean
        rows.append({"case": case.name, "expected": case.finding, "good": good, "wrong": wrong, "clean": clean})
        (out / "gpu_explain.json").write_text(json.dumps(rows, indent=1))
        print(f"{case.name}: {said_of(wrong)}; mended: {said_of(clean)}", file=sys.stderr, flush=True)
    print("| planted | first finding should be | found, with gain at most | found in the clean twin | |")
    print("|---|---|---|---|---|")
    for row in rows:
        ends = f"{said_of(row['wrong'])} | {said_of(row['clean'])} | {'ok' if row['good'] else 'NOT OK'} |"
        print(f"| {row['case']} | {row['expected']} | {ends}")
    return 0 if options.small or all(row["good"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
