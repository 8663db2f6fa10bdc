"""A run on GPUs starts with the planner's best plan, and keeps the prediction beside it."""

from __future__ import annotations

from pathlib import Path

import yaml
from planner_cases import recipe, site

from gradus.launcher.recipe_run import prepare
from gradus.record.lock import release
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import PREDICTION_FILE, Prediction


def attempt(tmp_path: Path, **settings: object) -> Path:
    launch = prepare(recipe(**settings), None, cluster=site(gpus=2), runs=tmp_path)  # type: ignore[arg-type]
    assert launch.lock is not None
    release(launch.lock)
    assert launch.ranks == 2
    return launch.run.attempt_path(launch.attempt)


def test_the_plan_is_the_planners_and_its_prediction_is_kept(tmp_path: Path) -> None:
    folder = attempt(tmp_path)
    plan = Plan.load(folder / "plan.yaml")
    assert plan.mesh.world_size == 2
    assert "GiB of 80.0" in (folder / "plan.yaml").read_text(), "reasons have numbers"
    assert Prediction.load(folder / PREDICTION_FILE).verdict == "fits"


def test_what_the_recipe_fixes_stays(tmp_path: Path) -> None:
    folder = attempt(tmp_path, mesh=Mesh(shard=2), zero=2, micro_batch=4, precision="fp32")
    plan = yaml.safe_load((folder / "plan.yaml").read_text())
    assert (plan["mesh"]["shard"], plan["zero"], plan["micro_batch"], plan["precision"]) == (2, 2, 4, "fp32")


def test_without_gpus_nothing_is_predicted(tmp_path: Path) -> None:
    cpu = site().model_copy(update={"gpus_per_node": 0, "gpu": None})
    launch = prepare(recipe(), 2, cluster=cpu, runs=tmp_path)
    assert launch.lock is not None
    release(launch.lock)
    assert not (launch.run.attempt_path(launch.attempt) / PREDICTION_FILE).exists()
