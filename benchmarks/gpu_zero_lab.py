"""A model of 2.5 billion parameters that one rank with 32 GiB cannot train, and two that share its state can (ZeRO 1).

python benchmarks/gpu_zero_lab.py           # needs a CUDA GPU with 64 GiB or more, which two ranks share
python benchmarks/gpu_zero_lab.py --tiny    # the same commands with a small model, on any machine

First, one rank: it must end with exit code 93 and an explanation (which term, how much, what would fit) and no
traceback. Then `zero: 1` over two ranks: bf16 weights, fp32 master copy and Adam state are 8 bytes for each parameter
on each rank, which is 18.42 GiB, measured on the tensors between forward and backward. Both go through `gradus train`.
Lines are printed as the run goes; the numbers are also written to zero_lab.json in --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import yaml

import gradus
from gradus.models import catalogue
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics
from gradus.training.hooks import HookRun
from gradus.training.memory import memory_of

GIB = 2**30
HERE = Path(__file__).resolve()
TOLERANCE = 0.02
BYTES_FOR_EACH_PARAMETER = 2 + (4 + 8) / 2  # bf16 weights whole; fp32 master and two moments over two ranks
PARAMETERS = 2_472_627_289
TINY: dict[str, Any] = {"use": "bert", "layers": 4, "width": 32, "heads": 4, "inner": 64, "vocabulary": 512}


class MemoryInStep(gradus.Hook):
    """Writes what each rank holds between forward and backward, from the second step on."""

    every_rank = True

    def on_start(self, run: HookRun) -> None:
        def measure(*_: Any) -> None:
            if run.step >= 1:
                held = memory_of(run.model, run.optimizer)
                on_gpu = next(run.model.parameters()).device.type == "cuda"
                peak = torch.cuda.max_memory_allocated() if on_gpu else None
                record = {"rank": run.rank, "step": run.step + 1, **asdict(held), "peak_bytes": peak}
                path = run.directory / f"memory-{run.rank}.json"
                path.with_suffix(".part").write_text(json.dumps(record))
                path.with_suffix(".part").replace(path)

        run.model.register_forward_hook(measure)


class RunsOut(gradus.Hook):
    """In place of a limit, which a CPU has not: the first step of the optimizer fails as it would on a GPU."""

    every_rank = True

    def on_start(self, run: HookRun) -> None:
        def full(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16.00 MiB. GPU 0 has ...")

        run.optimizer.register_step_pre_hook(full)


def model_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {**TINY, "context": arguments.context} if arguments.tiny else {"use": "bert-2.5b"}


def recipe_of(arguments: argparse.Namespace, plan: dict[str, Any], hooks: list[str]) -> dict[str, Any]:
    vocabulary = TINY["vocabulary"] if arguments.tiny else 50_265
    data = {"use": "synthetic-tokens", "context": arguments.context, "vocabulary": vocabulary, "objective": "masked"}
    limit = arguments.limit_gib * parameter_count(arguments) / PARAMETERS  # as tight for the tiny one
    return {
        "name": "zero-lab",
        "model": model_of(arguments),
        "data": {**data, "validation": 0},
        "batch": arguments.batch,
        "steps": 10_000,  # it is ended after a few: a checkpoint would be 30 GB
        "optimizer": {"use": "adamw", "lr": 1e-4, "clip": 1.0},
        "hooks": [f"{HERE}:{hook}" for hook in hooks],
        "plan": {"precision": "bf16", "compile": False, "memory_limit_gib": limit, "checkpoint_every": 10_000, **plan},
    }


def command(folder: Path, name: str, recipe: dict[str, Any]) -> list[str]:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return [sys.executable, "-m", "gradus", "train", str(path), "--runs", str(folder / "runs"), "--run-id", name]


def one_rank(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """It must fail, and say why in its own words."""
    recipe = recipe_of(arguments, {}, ["RunsOut"] if arguments.tiny and not torch.cuda.is_available() else [])
    done = subprocess.run(command(folder, "one", recipe), capture_output=True, text=True, timeout=900)
    print(f"one rank with {arguments.limit_gib:g} GiB: exit code {done.returncode}\n{done.stderr}", flush=True)
    assert done.returncode == 93, f"exit code {done.returncode}"
    assert "out of memory in " in done.stderr
    assert "what binds: the optimizer state" in done.stderr
    assert "plan.zero=1" in done.stderr
    assert "Traceback" not in done.stderr
    return {"exit_code": done.returncode, "said": done.stderr}


def two_ranks(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """It must train, with the memory that the formula says."""
    plan = {"mesh": {"shard": 2}, "zero": 1, "ranks_per_gpu": 2}
    run = RunDirectory(folder / "runs" / "zero-lab" / "two")
    process = subprocess.Popen(command(folder, "two", recipe_of(arguments, plan, ["MemoryInStep"])))
    shown = 0
    try:
        while shown < arguments.steps:
            assert process.poll() is None, f"the run ended with exit code {process.returncode}"
            time.sleep(0.5)
            rows = [row for row in read_metrics(run) if "loss" in row] if run.metrics_path.exists() else []
            for row in rows[shown : arguments.steps]:
                print(line_of(row, memory(run)), flush=True)
            shown = len(rows)
    finally:
        stop = [sys.executable, "-m", "gradus", "runs", "stop", str(run.path), "--now"]
        subprocess.run(stop, capture_output=True, timeout=120)
        process.wait(timeout=120)
    parameters = parameter_count(arguments)
    expected = BYTES_FOR_EACH_PARAMETER * parameters
    ranks = memory(run)
    for held in ranks:
        state = held["parameters"] + held["master"] + held["optimizer"]
        apart = state / expected - 1
        print(
            f"rank {held['rank']}: parameters {text(held['parameters'])} + master {text(held['master'])} + optimizer "
            f"{text(held['optimizer'])} = {text(state)} GiB; {BYTES_FOR_EACH_PARAMETER:g} bytes × {parameters:,} = "
            f"{text(expected)} GiB ({apart:+.2%})",
            flush=True,
        )
        assert abs(apart) <= TOLERANCE, apart
    assert len(ranks) == 2
    losses = [row["loss"] for row in rows[: arguments.steps]]
    return {"losses": losses, "ranks": ranks, "expected_bytes": expected, "rows": rows[: arguments.steps]}


def memory(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(run.path.glob("memory-*.json"))]


def line_of(row: dict[str, Any], ranks: list[dict[str, Any]]) -> str:
    held = ", ".join(text(one["parameters"] + one["master"] + one["optimizer"]) for one in ranks) or "not measured yet"
    speed = f"{row['samples_per_second']:.2f} samples/s" if row.get("samples_per_second") else ""
    peak = text(row["memory_peak_bytes"])
    return f"step {row['step']} | loss {row['loss']:.4f} | {speed} | GiB on each rank: {held} | peak on rank 0: {peak}"


def text(count: float) -> str:
    return f"{count / GIB:.2f}" if count >= GIB / 100 else f"{count / GIB:.6f}"


def parameter_count(arguments: argparse.Namespace) -> int:
    options = model_of(arguments)
    with torch.device("meta"):
        model = catalogue.build(options.pop("use"), options)
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, to try the commands anywhere")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit-gib", type=float, default=32.0)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", choices=["one", "two"])
    arguments = parser.parse_args()
    print(f"{'a tiny model' if arguments.tiny else 'bert-2.5b'}: {parameter_count(arguments):,} parameters", flush=True)
    found: dict[str, Any] = {"parameters": parameter_count(arguments), "torch": torch.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("one", one_rank), ("two", two_ranks)):
            if arguments.only in (None, name):
                found[name] = part(Path(folder), arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "zero_lab.json").write_text(json.dumps(found, indent=2))
    print("all as it must be", flush=True)


if __name__ == "__main__":
    main()
