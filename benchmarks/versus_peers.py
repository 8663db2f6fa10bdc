"""gradus beside a loop written by hand, Lightning Fabric and Accelerate, all compiled, on one GPU and in turn.

    python benchmarks/versus_peers.py --out FOLDER [--only WORD ...] [--contestants NAME ...] [--seconds LIMIT]
    python benchmarks/versus_peers.py --losses 500 --only gpt2 --out FOLDER    # loss curves on real text
    python benchmarks/versus_peers.py --small          # a quick check that it runs, on any machine
    python benchmarks/versus_peers.py --table FILE ... # one table of what several calls have written

Every contestant has the same model code, first weights, samples in the same order, optimizer and clipping. Where
memory permits, all of them stay alive and run segments in turn; else each runs alone, and the first again at the end,
which shows by how much the machine has moved. Segments come after a warm-up, so that nobody compiles in one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from kernel_times import KernelTimes, kernel_times
from peer_contestants import CONTESTANTS, Segment
from peer_samples import CUDA
from peer_table import MEANS_OVER, roofline, running_mean_gap, table
from peer_works import Work, make_data, works

from gradus.hardware.gpu_counters import GpuCounters
from gradus.models import catalogue

AGAIN = " again"  # the first contestant, measured a second time
SPARE = 1.15  # of a contestant's peak: memory is in pieces, and contestants differ


@dataclass
class Found:
    """What was measured of one contestant."""

    figures: list[float] = field(default_factory=list)  # of each segment
    peak_gib: float | None = None
    warm_after_seconds: float | None = None  # building, compiling and the warm-up together
    losses: dict[int, float] = field(default_factory=dict)
    loss_gap: float | None = None  # to the raw loop
    clocks: list[dict[str, Any]] = field(default_factory=list)  # of the GPU, right after each segment
    kernels: KernelTimes | None = None
    note: str = ""
    problem: str | None = None

    def take(self, segment: Segment) -> None:
        self.losses |= segment.losses


class Entrant:
    """A contestant in a contest: alive, with what it holds on the device."""

    def __init__(self, name: str, work: Work, folder: Path) -> None:
        self.name, self.work, self.folder, self.found = name, work, folder, Found()
        self.contestant = CONTESTANTS[name.removesuffix(AGAIN)]()
        self.resident = self.peak = 0

    def enter(self) -> None:
        """Build it and warm it up."""
        before, began, every = _allocated(), time.perf_counter(), self.work.log_every
        self.contestant.prepare(self.work, self.folder)
        _forget_peak()
        self.found.take(self.contestant.segment(3 * every, lead=2 * every))
        self.found.warm_after_seconds = time.perf_counter() - began
        self.found.note = self.contestant.note
        self.resident, self.peak = _allocated() - before, _peak() - before

    def measure(self) -> None:
        others = _allocated() - self.resident
        _forget_peak()
        segment = self.contestant.segment(self.work.steps, lead=2 * self.work.log_every)
        self.found.clocks += clocks()
        self.found.take(segment)
        self.found.figures.append(self.work.figure(segment.seconds, self.work.steps))
        if CUDA:
            peak = _peak() - others
            self.found.peak_gib = (peak if self.contestant.shows_peak else max(peak, self.peak)) / 2**30

    def look_into(self) -> None:
        """Where a step's time goes, after all that is measured: who watches makes it longer."""
        steps = 5 * self.work.log_every  # so that what comes once a segment counts little
        self.found.kernels = kernel_times(lambda: self.contestant.segment(steps), steps)

    def train_through(self) -> None:
        """All steps at once, for their losses."""
        self.contestant.prepare(self.work, self.folder)
        self.found.note = self.contestant.note
        self.found.take(self.contestant.segment(self.work.steps))

    def attempt(self, action: Callable[[], None]) -> None:
        """One contestant that cannot do a work is a result too, and must not keep the others from theirs."""
        if self.found.problem is not None:
            return
        try:
            action()
        except Exception as error:
            told = str(error).strip().splitlines() or [""]
            self.found.problem = f"{type(error).__name__}: {told[0][:300]}"
            self.leave()

    def leave(self) -> None:
        self.contestant.close()
        _free()

    @property
    def lets_stay(self) -> int:
        """How many contestants like this one the device holds at once."""
        if not CUDA:
            return len(CONTESTANTS)
        total = torch.cuda.get_device_properties(0).total_memory
        return 1 + int((total - SPARE * self.peak) // max(1, self.resident))


def contest(work: Work, names: Sequence[str], folder: Path, rounds: int) -> dict[str, Found]:
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = not work.plain
    first = Entrant(names[0], work, folder)
    first.attempt(first.enter)
    if first.lets_stay >= len(names):
        return _together([first, *(Entrant(name, work, folder) for name in names[1:])], rounds)
    print("  too large to stay side by side: each runs alone, the first again at the end", flush=True)
    return _alone([first, *(Entrant(name, work, folder) for name in (*names[1:], names[0] + AGAIN))], rounds)


def _together(entrants: Sequence[Entrant], rounds: int) -> dict[str, Found]:
    for entrant in entrants[1:]:
        entrant.attempt(entrant.enter)
    for number in range(rounds):
        # Who goes first changes, so that nobody always runs on the warmer device.
        for entrant in entrants if number % 2 == 0 else entrants[::-1]:
            entrant.attempt(entrant.measure)
    for entrant in entrants:
        entrant.attempt(entrant.look_into)
        entrant.leave()
    return {entrant.name: entrant.found for entrant in entrants}


def _alone(entrants: Sequence[Entrant], rounds: int) -> dict[str, Found]:
    for number, entrant in enumerate(entrants):
        if number:
            entrant.attempt(entrant.enter)
        for _ in range(rounds):
            entrant.attempt(entrant.measure)
        entrant.attempt(entrant.look_into)
        entrant.leave()
    return {entrant.name: entrant.found for entrant in entrants}


def first_steps(work: Work, names: Sequence[str], asked: argparse.Namespace, folder: Path) -> dict[str, Found]:
    """Each time in a new process that finds nothing compiled."""
    found = {name: Found() for name in names}
    for _ in range(min(asked.rounds, 2)):
        for name in names:
            with tempfile.TemporaryDirectory() as empty:
                caches = {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
                caches["XDG_CACHE_HOME"] = empty  # where a toolkit may keep what it compiled
                command = [sys.executable, __file__, "--first-step", name, "--only", work.key, "--data", str(folder)]
                command += ["--small"] if asked.small else []
                began = time.time()
                done = subprocess.run(command, env=os.environ | caches, capture_output=True, text=True)
            if done.returncode:
                found[name].problem = (done.stderr.strip().splitlines() or ["it failed"])[-1]
                continue
            told = json.loads(done.stdout.splitlines()[-1])
            found[name].figures.append(told["seconds"])
            found[name].note = f"{told['done_at'] - began:.1f} s with the start of Python and all imports"
    return found


def first_step(work: Work, name: str, folder: Path) -> dict[str, float]:
    """In the new process: from a recipe to the end of its first step, imports left out."""
    contestant, began = CONTESTANTS[name](), time.perf_counter()
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        contestant.prepare(work, Path(runs))
        contestant.segment(1)
        told = {"seconds": time.perf_counter() - began, "done_at": time.time()}
        contestant.close()
    return told


def loss_curves(work: Work, names: Sequence[str], steps: int, folder: Path) -> dict[str, Found]:
    """The losses of so many steps on real text, each contestant with its own defaults, one after the other."""
    found = {}
    optimizer = {**work.recipe["optimizer"], "warmup": steps // 10, "decay": "cosine"}
    data = {"use": "stdlib-text", "context": work.recipe["data"]["context"]}
    recipe = {**work.recipe, "data": data, "optimizer": optimizer, "steps": steps, "log_every": 1}
    for name in names:
        entrant = Entrant(name, replace(work, recipe=recipe, steps=steps), folder)
        entrant.attempt(entrant.train_through)
        entrant.leave()
        found[name] = entrant.found
    return found


def _allocated() -> int:
    return torch.cuda.memory_allocated() if CUDA else 0


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if CUDA else 0


def _forget_peak() -> None:
    if CUDA:
        torch.cuda.reset_peak_memory_stats()


def _free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def surroundings() -> dict[str, Any]:
    """Where, when and with what."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    packages = ("torch", "triton", "lightning", "accelerate", "transformers", "gradus")
    return {
        "date": str(date.today()),
        "device": torch.cuda.get_device_name() if CUDA else "CPU",
        "python": platform.python_version(),
        **{package: installed(package) for package in packages},
    }


def clocks() -> list[dict[str, Any]]:
    """What the driver says of the GPU at this moment: its clock, and whether something slows it down."""
    counters = GpuCounters.open(at_most=1)
    if counters is None:
        return []
    try:
        shown = ("clock_mhz", "clock_max_mhz", "power_watts", "power_limit_watts", "temperature_celsius", "throttle")
        return [{name: getattr(sample, name) for name in shown} for sample in counters.read()]
    finally:
        counters.close()


def measured(work: Work, asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The row of one work, as it is written down."""
    ours = ("gradus", "gradus-lean", "gradus-lean-moments") if "memory" in work.goal else ("gradus",)
    ours += ("gradus-loop",) if work.own_loop else ()
    wanted = [name for name in (*work.peers, *ours) if name in asked.contestants]
    names = [name for name in wanted if CONTESTANTS[name].is_installed()]
    make_data(work, asked.small)
    with tempfile.TemporaryDirectory() as runs:
        if asked.losses:
            names = [name for name in names if name == "raw" or name.startswith("gradus")]
            found = loss_curves(work, names, asked.losses, Path(runs))
        elif work.measures == "first step":
            found = first_steps(work, names, asked, folder)
        else:
            found = contest(work, names, Path(runs), asked.rounds)
    torch._dynamo.reset()
    _free()
    for name, one in found.items():
        one.loss_gap = running_mean_gap(found["raw"].losses, one.losses) if "raw" in found and name != "raw" else None
    return {
        "key": work.key,
        "title": work.title if not asked.losses else f"{work.title}: {asked.losses} steps on real text",
        "unit": work.unit,
        "goal": work.goal,
        "less_is_better": work.less_is_better,
        "steps": asked.losses or work.steps,
        "units_of_a_step": work.recipe["batch"] * work.per_sample if work.measures == "rate" else 1,
        "flops_of_a_unit": _flops_of_a_unit(work),
        "absent": [name for name in wanted if name not in names and not asked.losses],
        "contestants": {name: asdict(one) for name, one in found.items()},
    }


def _said_of(one: dict[str, Any]) -> str:
    """One line about a contestant, as soon as it is there."""
    if one["problem"] and not one["figures"]:
        return str(one["problem"])
    told = [", ".join(f"{figure:,.1f}" for figure in one["figures"])]
    if one["losses"]:
        last = statistics.fmean(list(one["losses"].values())[-MEANS_OVER:])
        told.append(f"mean of the last {min(MEANS_OVER, len(one['losses']))} losses {last:.4f}")
    if one["loss_gap"] is not None:
        told.append(f"running means within {one['loss_gap']:.3%} of the raw loop's")
    return "; ".join(part for part in (*told, one["note"]) if part)


def _flops_of_a_unit(work: Work) -> float | None:
    model = work.recipe["model"]
    if work.measures != "rate" or model["use"] == catalogue.HUGGINGFACE.name:
        return None
    with torch.device("meta"):
        built = catalogue.build(model["use"], {key: value for key, value in model.items() if key != "use"})
    return float(built.flops_per_sample()) / work.per_sample  # type: ignore[operator]


def asked_for(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="Works whose key is this, or whose title has it.")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--small", action="store_true", help="Tiny models, few steps: a check that it runs.")
    parser.add_argument("--out", type=Path, help="A folder for the results, written after each work.")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="After these, no work is begun.")
    parser.add_argument("--steps", type=int, help="Of a segment, in place of each work's own.")
    parser.add_argument("--batch", type=int, help="Samples of a step, in place of each work's own.")
    parser.add_argument("--rounds", type=int, help="Segments of each contestant: 5, or 2 with --small.")
    parser.add_argument("--losses", type=int, metavar="STEPS", help="Compare loss curves on real text; only GPTs.")
    parser.add_argument("--plan", nargs="+", metavar="KEY=VALUE", help="What gradus's user writes into its plan.")
    parser.add_argument("--table", type=Path, nargs="+", help="Only print the table of these results.")
    parser.add_argument("--first-step", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help="Where made-up data is kept; else it goes with the call.")
    asked = parser.parse_args(arguments)
    asked.rounds = asked.rounds or (2 if asked.small else 5)
    return asked


def chosen_works(asked: argparse.Namespace, folder: Path) -> list[Work]:
    found = [
        work
        for work in works(asked.small, folder)
        if asked.only is None or any(word == work.key or word in work.title for word in asked.only)
    ]
    if asked.losses:
        found = [work for work in found if work.recipe["model"]["use"].startswith("gpt") and work.measures == "rate"]
    if asked.batch:
        found = [replace(work, recipe={**work.recipe, "batch": asked.batch}) for work in found]
    if asked.plan:
        keys = {key: yaml.safe_load(value) for key, _, value in (text.partition("=") for text in asked.plan)}
        found = [
            replace(work, recipe={**work.recipe, "plan": {**work.recipe.get("plan", {}), **keys}}) for work in found
        ]
    return [replace(work, steps=_whole_rows(asked.steps)) if asked.steps else work for work in found]


def _whole_rows(steps: int) -> int:
    """As many steps, or a few less, as come to a whole number of lines in gradus's log."""
    return steps - steps % max(1, steps // 10)


def main(arguments: Sequence[str] | None = None) -> None:
    asked = asked_for(arguments)
    if asked.table:
        documents = [json.loads(file.read_text()) for file in asked.table]
        print(f"{table(documents)}\n\n{roofline(documents)}")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.data or Path(temporary)
        if asked.first_step:
            print(json.dumps(first_step(chosen_works(asked, folder)[0], asked.first_step, folder)))
            return
        run_works(asked, folder)


def run_works(asked: argparse.Namespace, folder: Path) -> None:
    began, document = time.monotonic(), {**surroundings(), "rounds": asked.rounds, "works": []}
    for work in chosen_works(asked, folder):
        if time.monotonic() - began > asked.seconds:
            print(f"{work.key}: not begun, --seconds {asked.seconds:g} are over", flush=True)
            continue
        print(f"{work.key}: {work.title}", flush=True)
        row = measured(work, asked, folder)
        document["works"].append(row)
        for name, one in row["contestants"].items():
            print(f"  {name}: {_said_of(one)}", flush=True)
        for name in row["absent"]:
            print(f"  {name}: is not installed")
        if asked.out is not None:
            asked.out.mkdir(parents=True, exist_ok=True)
            (asked.out / "versus_peers.json").write_text(json.dumps(document, indent=1))
    print(f"\n{table([document])}\n\n{roofline([document])}")


if __name__ == "__main__":
    main()
