"""Planted faults: recipes with one thing wrong each, and what mends it. Run as users do, a few seconds each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

PARTS = Path(__file__).parent / "diagnosis" / "faulty" / "parts.py"

SOUND: dict[str, Any] = {
    "name": "planted",
    "model": {"use": f"{PARTS}:Perceptron"},
    "data": {"use": f"{PARTS}:Samples"},
    "loss": "mse",
    "batch": 8,
    "steps": 40,
    "optimizer": {"use": "adamw", "lr": 1e-4},
    "plan": {"workers": 0},
}


@dataclass(frozen=True)
class Planted:
    """A fault: what is changed in the sound recipe, and what of it is changed back in the clean twin."""

    name: str
    finding: str  # that must come first
    wrong: dict[str, Any]
    mended: dict[str, Any]
    nproc: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    mended_variables: dict[str, str] = field(default_factory=dict)


FAULTS = (
    Planted("slow-dataset", "data-bound", {"data.seconds": 0.006}, {"data.seconds": 0.0}),
    Planted("slow-dataset-on-two-ranks", "data-bound", {"data.seconds": 0.012}, {"data.seconds": 0.0}, nproc=2),
    Planted(
        "one-worker",
        "too-few-workers",
        {"data.seconds": 0.012, "plan.workers": 1},
        {"data.seconds": 0.0},
    ),
    Planted(
        "checkpoint-at-every-step",
        "checkpoint-stall",
        {"model.hidden": 768, "checkpoint": {"every": 1, "keep": 1, "background": False}},
        {"checkpoint": {"every": 1000, "keep": 1, "background": False}},
    ),
    Planted(
        "evaluation-at-every-step",
        "evaluation-share",
        {"evaluate": {"every": 1}},
        {"evaluate": {"every": 1000}},
    ),
    Planted(
        "slow-hook",
        "work-beside-steps",
        {"hooks": [{"use": f"{PARTS}:Dawdles", "seconds": 0.05}]},
        {"hooks": [{"use": f"{PARTS}:Dawdles", "seconds": 0.0}]},
    ),
    Planted("slow-rank", "straggler", {"model.slow_rank": 1}, {"model.slow_rank": None}, nproc=2),
    Planted(
        "slow-disk-of-one-rank",
        "straggler",
        {"data.seconds": 0.012, "data.only_on": 1},
        {"data.seconds": 0.0},
        nproc=2,
    ),
    Planted(
        "unbalanced-pipeline",
        "unbalanced-pipeline",
        {
            "pipeline_parts": ["head", "blocks", "tail"],
            "model.blocks": 6,
            "model.seconds": 0.002,
            "steps": 25,
            "plan": {
                "workers": 0,
                "mesh": {"pipeline": 2},
                "micro_batch": 1,
                "accumulate": 8,
                "stage_blocks": [1, 5],
            },
        },
        {"plan.stage_blocks": [3, 3]},
        nproc=2,
    ),
    Planted(
        "few-micro-batches",
        "pipeline-bubble",
        {
            "pipeline_parts": ["head", "blocks", "tail"],
            "model.seconds": 0.005,
            "steps": 25,
            "plan": {"workers": 0, "mesh": {"pipeline": 2}, "micro_batch": 4, "accumulate": 2},
        },
        {"plan.micro_batch": 1, "plan.accumulate": 8},
        nproc=2,
    ),
    Planted(
        "much-to-exchange",
        "exposed-communication",
        {"model": {"use": f"{PARTS}:Table", "rows": 2_000_000}, "optimizer": {"use": "sgd", "lr": 1e-3}, "steps": 20},
        {"model.rows": 400},
        nproc=2,
    ),
    Planted(
        "more-threads-than-cores",
        "cpu-oversubscription",
        {"model": {"use": f"{PARTS}:Matrices"}, "batch": 512, "steps": 20},
        {},
        nproc=2,
        variables={"OMP_NUM_THREADS": "8"},
        mended_variables={"OMP_NUM_THREADS": "1"},
    ),
    Planted(
        "recompute-without-need",
        "needless-recompute",
        {
            "model": {"use": "gpt", "layers": 4, "width": 128, "heads": 4, "context": 64},
            "data": {"use": "synthetic-tokens", "vocabulary": 64, "context": 64, "samples": 512},
            "loss": None,
            "plan": {"workers": 0, "recompute": "full"},
            "steps": 25,
        },
        {"plan.recompute": "none"},
    ),
)


def recipe_of(fault: Planted, *, clean: bool) -> dict[str, Any]:
    document = json.loads(json.dumps(SOUND))
    for change in (fault.wrong, fault.mended if clean else {}):
        for key, value in change.items():
            _put(document, key.split("."), value)
    return {key: value for key, value in document.items() if value is not None}


def _put(document: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        document = document.setdefault(key, {})
    document[keys[-1]] = value


def train(fault: Planted, folder: Path, *, clean: bool) -> Path:
    """The run directory of a fault, or of its clean twin."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(fault, clean=clean)))
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **fault.variables}
    if clean:
        variables |= fault.mended_variables
    command = [sys.executable, "-m", "gradus", "train", str(recipe), "--nproc", str(fault.nproc), "--run-id", "x"]
    done = subprocess.run(
        command, cwd=folder, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / "planted" / "x"


def explained(run: Path) -> dict[str, Any]:
    """What `gradus explain --json` says."""
    done = subprocess.run(
        [sys.executable, "-m", "gradus", "explain", str(run), "--json"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def train_here(fault: Planted, folder: Path, *, clean: bool) -> dict[str, Any]:
    """The same in this very process, which saves the starting of others: of faults of one rank."""
    from gradus.cli.explain import evidence_of
    from gradus.cli.main import app
    from gradus.diagnosis.explain import explain

    recipe = folder / f"{fault.name}-{'clean' if clean else 'wrong'}.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(fault, clean=clean)))
    place = ["--runs", str(folder / "runs"), "--run-id", recipe.stem]
    code = app(["train", str(recipe), "--debug", *place, "--set", "steps=20"], standalone_mode=False)
    assert code == 0, code
    return explain(evidence_of(str(folder / "runs" / "planted" / recipe.stem), folder)).document()


def main(folder: str, names: list[str]) -> None:
    """Train the faults of these names and their twins here, and write what is found to `found.json`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found = {
        f"{fault.name} {'clean' if clean else 'wrong'}": train_here(fault, Path(folder), clean=clean)
        for fault in FAULTS
        if fault.name in names
        for clean in (False, True)
    }
    (Path(folder) / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
