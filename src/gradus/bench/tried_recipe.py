"""The recipe that a benchmark tries: a user's own, or one made for a model of the catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gradus.bench.ranks import check_one_process
from gradus.hardware.cluster import detect_cluster, gpu_of
from gradus.launcher.recipe_run import chosen
from gradus.models import catalogue
from gradus.models.settings import image_shape
from gradus.parallel.support import check_supported
from gradus.planner.defaults import Choice, case_of
from gradus.planner.resolve import prepare_data, resolved
from gradus.schema.cluster import Cluster
from gradus.schema.errors import GradusError, InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import DataBlock, Recipe

_STEPS = 1000
_LEAST_IMAGES, _IMAGE_BYTES = 64, 128 << 20


def given(recipe: str | None, model: str | None, overrides: Sequence[str], *, batch: int | None = None) -> Recipe:
    """A recipe from a file, or of a model on made-up samples; exactly one of them. Its data is ready to be opened."""
    if (recipe is None) == (model is None):
        raise InputError(
            f"RECIPE: found {'both a recipe and --model' if recipe else 'neither a recipe nor --model'}",
            hint="gradus bench ... recipes/quickstart.yaml, or gradus bench ... --model resnet18",
            field="RECIPE",
            found=recipe or "nothing",
            allowed="a recipe.yaml, or --model NAME",
        )
    sizes = [f"batch={batch}"] if batch is not None else []
    if recipe is not None:
        found = Recipe.load(Path(recipe), [*overrides, *sizes])
    else:
        assert model is not None
        found = Recipe.from_document(_of_model(model), "--model", [*overrides, *sizes])
    found = resolved(found)
    if model is not None and found.data.use == "synthetic-images":
        found = _with_images_in_memory(found)
    prepare_data(found)
    return found


def _with_images_in_memory(recipe: Recipe) -> Recipe:
    asked = recipe.data.options
    settings = catalogue.resolve(recipe.model.use, recipe.model.options)[1]
    channels, side = image_shape(settings)
    side = asked.get("size", side)
    most = max(_LEAST_IMAGES, _IMAGE_BYTES // (channels * side**2))
    made = {"size": side, "channels": channels, "classes": asdict(settings)["classes"]}
    made["samples"] = min(int(asked["samples"]), most)
    if "augment" in asked:
        made["augment"] = asked["augment"]
    return recipe.model_copy(update={"data": DataBlock(use="gradus.bench.made_up:images", **made)})


def _of_model(name: str) -> dict[str, Any]:
    """Settings come from --set model.KEY=VALUE; what data must agree with them, the recipe works out."""
    images = catalogue.resolve(name, {})[0].sample == "image"
    data: dict[str, Any] = {"use": "synthetic-images" if images else "synthetic-tokens", "samples": 4096}
    if name == "mnist-cnn":
        data |= {"size": 28, "channels": 1}
    optimizer = {"use": "sgd", "lr": 0.01, "momentum": 0.9} if images else {"use": "adamw", "lr": 3e-4}
    return {
        "name": name.replace("/", "-"),
        "model": {"use": name},
        "data": data,
        "batch": 32 if images else 8,
        "steps": _STEPS,
        "optimizer": optimizer,
    }


def plan_here(recipe: Recipe, nproc: int | None, cluster: str | None = None) -> tuple[Choice, Cluster]:
    """What the planner would do on this machine, which is what is tried."""
    check_one_process()
    here = detect_cluster()
    if cluster is None:
        return chosen(recipe, here, nproc), here
    site = Cluster.load(cluster)
    wanted, found = (gpu.name if gpu else "no GPU" for gpu in (gpu_of(site), gpu_of(here)))
    if wanted != found:
        raise InputError(
            f"--cluster: {site.name} has {wanted}, but this machine, where it would be measured, has {found}",
            hint="run it on a node of that cluster",
            field="--cluster",
            found=found,
            allowed=wanted,
        )
    machine = site.model_copy(update={"nodes": 1})  # trials run here
    return chosen(recipe, machine, nproc), machine


def why_not(recipe: Recipe, cluster: Cluster, plan: Plan) -> str | None:
    """Why a plan cannot be tried, if it is known before: nobody waits for ranks that would refuse it."""
    try:
        plan.check(recipe.batch, plan.mesh.world_size)
        check_supported(case_of(recipe, cluster, plan))
    except GradusError as error:
        return error.message
    return None
