"""Take a PyTorch model from one GPU to a supercomputer: recipe + cluster → plan → run → explanation."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradus.launcher.launching import train
    from gradus.launcher.result import Result, load_run
    from gradus.launcher.slurm.submitting import submit
    from gradus.planner.planning import plan
    from gradus.planner.prediction import predict
    from gradus.record.table import Table
    from gradus.schema.cluster import Cluster
    from gradus.schema.errors import GradusError
    from gradus.schema.plan import Plan
    from gradus.schema.recipe import Recipe
    from gradus.training.hooks import Hook
    from gradus.training.own_loop import Run

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "GradusError",
    "Hook",
    "Plan",
    "Recipe",
    "Result",
    "Run",
    "Table",
    "load_run",
    "plan",
    "predict",
    "submit",
    "train",
]

_HOMES = {
    "Cluster": "gradus.schema.cluster",
    "GradusError": "gradus.schema.errors",
    "Hook": "gradus.training.hooks",
    "Plan": "gradus.schema.plan",
    "Recipe": "gradus.schema.recipe",
    "Result": "gradus.launcher.result",
    "Run": "gradus.training.own_loop",
    "Table": "gradus.record.table",
    "load_run": "gradus.launcher.result",
    "plan": "gradus.planner.planning",
    "predict": "gradus.planner.prediction",
    "submit": "gradus.launcher.slurm.submitting",
    "train": "gradus.launcher.launching",
}


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `import gradus` stays quick and needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gradus' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
