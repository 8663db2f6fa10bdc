"""Where the time of steps goes on a GPU: what knowing it costs, whether it is true, and the energy of a sample.

    python benchmarks/gpu_breakdown.py --out FOLDER            # on a GPU
    python benchmarks/gpu_breakdown.py --out FOLDER --small    # a quick check that it runs, on any machine
    python benchmarks/gpu_breakdown.py --out FOLDER --only energy sums

1. cost: GPT-2 124M compiled and eager, the measuring taken out and put back in turn, as in `step_breakdown.py`;
2. sums: of steps measured in detail, the distance of the events beside the wall-clock time of the step;
3. planted: a loader that sleeps shows as data; a loss that is read in every forward pass shows in forward, and where
   the loader sleeps less than the device computes, nothing shows: the device did not wait;
4. energy: of a run that `gradus.train` launches, from the driver's counter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from step_breakdown import Work, gpt, measured, table

import gradus
from gradus.parallel.world import alone
from gradus.planner.resolve import resolved
from gradus.record.costs import costs_of
from gradus.record.directory import RunDirectory
from gradus.record.timings import mean_seconds, read_timings
from gradus.schema.recipe import Recipe
from gradus.training.live_run import LiveRun
from gradus.training.loop import train

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLANTED = '''\
import time

import torch
from torch import nn


class Net(nn.Module):
    """Large matrices, so that a step keeps a GPU busy for a while."""

    def __init__(self, width=8192, layers=8, reads=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.reads = reads

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
            if self.reads:
                x.float().mean().item()  # waits for the device
        return (x.float() - y).square().mean()


class Data:
    def __init__(self, width=8192, milliseconds=0.0):
        self.width, self.milliseconds = width, milliseconds

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(self.milliseconds / 1e3)
        return torch.full((self.width,), index / 4096), torch.zeros(self.width)
'''


def costs(small: bool, folder: Path) -> list[Any]:
    """GPT-2 124M, batch 32 of 1024 tokens."""
    segment, pairs, warm_up = (3, 2, 3) if small else (20, 12, 25)
    large = gpt(2, 64, 64, 4) if small else gpt(12, 768, 1024, 32, precision="bf16")
    if not small:
        large["model"] |= {"heads": 12, "vocabulary": 50304}
    found = []
    for title, compiled in (("compiled", True), ("eager", False)):
        document = {**large, "plan": {**large["plan"], "compile": compiled and not small}}
        found.append(
            measured(
                Work(f"{'tiny GPT' if small else 'GPT-2 124M'}, {title}", document, segment, pairs, warm_up),
                DEVICE,
                folder,
            )
        )
        print(table(found[-1:]).splitlines()[-1], flush=True)
    return found


def run_of(document: dict[str, Any], folder: Path) -> tuple[RunDirectory, list[float], list[float]]:
    """Train; with the seconds of steps as their events have it, and as their numbers came."""
    recipe = resolved(Recipe.from_document({"name": "planted", "evaluate": {"batches": 1}, **document}))
    run = RunDirectory.create(folder, "planted")
    live = LiveRun.from_recipe(recipe, recipe.plan, run, run.new_attempt(), alone(DEVICE), watched=False)
    by_events: list[float] = []
    walls: list[float] = []
    own, recorder = live.watch.own, live.recorder
    taken, stepped = own.measured, recorder.step

    def noted() -> list[dict[str, float]]:
        found = taken()
        by_events.extend(sum(one.values()) for one in found)
        return found

    def timed(*given: Any, **named: Any) -> float:
        walls.append(stepped(*given, **named))
        return walls[-1]

    own.measured, recorder.step = noted, timed  # type: ignore[method-assign]
    ending = train(live)
    recorder.close(state=ending.state)
    return run, by_events, walls


def sums(small: bool, folder: Path) -> dict[str, float]:
    document = gpt(2, 64, 64, 4) if small else gpt(12, 768, 1024, 8, precision="bf16", compile=False)
    _, by_events, walls = run_of({**document, "steps": 12 if small else 120, "log_every": 10}, folder)
    usual = walls[10:] or walls
    found = {"wall_ms": statistics.median(usual) * 1e3}
    if by_events:  # on a GPU only: the first are of the warm-up
        found["events_ms"] = statistics.median(by_events[3:] or by_events) * 1e3
        found["events_over_wall"] = found["events_ms"] / found["wall_ms"]
    return found


def planted(small: bool, folder: Path) -> list[dict[str, Any]]:
    file = folder / "planted.py"
    file.write_text(PLANTED)
    width, batch, steps = (64, 4, 12) if small else (8192, 64, 60)
    cases = {"clean": {}, "a loss read eight times": {"reads": True}}
    cases |= {f"a loader that sleeps {ms} ms a batch": {"ms": ms} for ms in (1, 20, 100)}
    found = []
    for title, case in cases.items():
        document = {
            "model": {"use": f"{file}:Net", "width": width, "reads": case.get("reads", False)},
            "data": {"use": f"{file}:Data", "width": width, "milliseconds": case.get("ms", 0.0) / batch},
            "optimizer": {"use": "sgd", "lr": 1e-6},
            "batch": batch,
            "steps": steps,
            "log_every": 10,
            "plan": {"micro_batch": batch, "workers": 0, "compile": False},
        }
        run, _, _ = run_of(document, folder)
        lines = [line for line in read_timings(run) if line.step > 10] or read_timings(run)
        mean = mean_seconds(lines)
        total = sum(mean.values())
        row = {"case": title, "step_ms": total * 1e3, **{k: v * 1e3 for k, v in mean.items()}}
        row["planted_ms"] = case.get("ms")
        found.append(row)
    return found


def energy(small: bool, folder: Path) -> dict[str, Any]:
    document = gpt(2, 64, 64, 4) if small else gpt(12, 768, 1024, 32, precision="bf16", compile=True)
    began = time.time()
    steps = 12 if small else 200
    recipe = Recipe.from_document({"name": "energy", "steps": steps, "evaluate": {"batches": 1}, **document})
    result = gradus.train(recipe, nproc=1, runs=folder / "runs")
    costs = costs_of(result.run)
    return {"state": result.state, "seconds": time.time() - began, "lines": costs.lines(), **costs.document()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parts = ("costs", "sums", "planted", "energy")
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    document: dict[str, Any] = {"device": name, "torch": torch.__version__}

    def keep(key: str, value: Any) -> Any:
        document[key] = value
        (given.out / "gpu_breakdown.json").write_text(json.dumps(document, indent=1))
        return value

    print(f"{name}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if "costs" in given.only:
            found = costs(given.small, folder)
            keep("costs", [asdict(one) for one in found])
            print(f"\n{table(found)}\n", flush=True)
        if "sums" in given.only:
            added = keep("sums", sums(given.small, folder))
            print("events beside the wall clock: " + ", ".join(f"{key} {value:.4g}" for key, value in added.items()))
        if "planted" in given.only:
            show_planted(keep("planted", planted(given.small, folder)))
        if "energy" in given.only:
            print("\n" + "\n".join(keep("energy", energy(given.small, folder))["lines"]))


def show_planted(rows: list[dict[str, Any]]) -> None:
    """Without saving and evaluating, which in runs of a few steps are most of the time."""
    kinds = ("data", "host_to_device", "forward", "backward", "optimizer", "other")
    print(f"\n| planted | training, ms | {' | '.join(kinds)} |\n|---|---|{'---|' * len(kinds)}")
    for row in rows:
        trained = row["step_ms"] - row["checkpoint"] - row["evaluation"]
        print(f"| {row['case']} | {trained:.2f} | {' | '.join(f'{row[kind]:.2f}' for kind in kinds)} |", flush=True)


if __name__ == "__main__":
    main()
