"""Planning: the plans for a recipe on a cluster, best first. For now that is one: the plain defaults."""

from __future__ import annotations

import re
from pathlib import Path

from gradus.planner.defaults import Choice, default_plan
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe


def plan(
    recipe: Recipe | str | Path, cluster: Cluster | str | Path | None = None, gpus: int | str | None = None
) -> list[Choice]:
    """Ranked choices, each with `.plan` and `.reasons`. Nothing is written, and the cluster need not be at hand.

    `cluster` is this machine unless it is given, as a Cluster, a name or a path. `gpus` is how many of its GPUs to plan
    for (ranks, where it has none), or `"4x8"`: 4 nodes of 8.
    """
    recipe = resolved(recipe if isinstance(recipe, Recipe) else Recipe.load(recipe))
    return planned(recipe, *site_for(cluster, gpus))


def planned(recipe: Recipe, site: Cluster, gpus: int | None) -> list[Choice]:
    """The choices for a resolved recipe on so many GPUs of a site (ranks, where it has none), or as many as suit."""
    per_gpu = recipe.plan.ranks_per_gpu if site.gpus_per_node else 1
    return [default_plan(recipe, site, gpus * per_gpu if gpus else None)]


def site_for(cluster: Cluster | str | Path | None, gpus: int | str | None) -> tuple[Cluster, int | None]:
    """The cluster to plan for, and how many of its GPUs; None where nobody said."""
    at_hand = cluster is None
    site = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster) if cluster else Cluster.detect()
    if gpus is None:
        return site, None
    shape = re.fullmatch(r"(?:([1-9]\d*) *[x×] *)?([1-9]\d*)", str(gpus).strip())
    if shape is None:
        raise InputError(
            f"--gpus: found {gpus}, allowed: a number of GPUs such as 32, or nodes and GPUs on each such as 4x8",
            field="--gpus",
            found=gpus,
            allowed="32 or 4x8",
        )
    count = int(shape[2])
    if shape[1] is None:
        if site.gpus_per_node and count > site.nodes * site.gpus_per_node:
            raise _too_many(site, gpus, at_hand)
        return site, count
    nodes = int(shape[1])
    if not at_hand and (nodes > site.nodes or count > site.gpus_per_node):
        raise _too_many(site, gpus, at_hand)
    # Of a cluster that is neither here nor has a file, only the shape is known.
    return site.model_copy(update={"nodes": nodes, "gpus_per_node": count}), nodes * count


def _too_many(site: Cluster, gpus: int | str, at_hand: bool) -> InputError:
    has = f"{site.nodes} node{'s' if site.nodes > 1 else ''} of {site.gpus_per_node}"
    return InputError(
        f"--gpus: found {gpus}, but {site.name} has {has} GPUs",
        hint="for GPUs that are not here, say nodes and GPUs on each: --gpus 4x8" if at_hand else "see --cluster",
        field="--gpus",
        found=gpus,
        allowed=f"at most {site.nodes}x{site.gpus_per_node}",
    )
