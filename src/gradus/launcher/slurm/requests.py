"""Requests: a recipe, the recipes of a sweep, or a script, planned for so many nodes of a cluster."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.launcher.containers import folders_of
from gradus.launcher.recipe_run import checked, chosen, prepared_recipe
from gradus.launcher.script import Script, with_ranks
from gradus.launcher.script_run import prepared_script
from gradus.launcher.slurm.checks import Site, check_limits, check_scheduler, chosen_partitions, read_site
from gradus.launcher.slurm.options import settled, with_options
from gradus.launcher.slurm.submission import Request, with_ranks_on_nodes
from gradus.planner.defaults import Choice
from gradus.planner.resolve import prepare_data
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.loading import parse_yaml, validated
from gradus.schema.profile_request import ProfileRequest
from gradus.schema.recipe import Recipe
from gradus.schema.scheduler import Scheduler


@dataclass(frozen=True)
class Wish:
    """What a submission was asked to be, besides its work. None: whatever suits."""

    nodes: int | None = None
    nproc: int | None = None  # ranks on each node
    fields: Mapping[str, Any] | None = None  # of the scheduler: partition, time, ...
    sbatch: Sequence[str] = ()  # options as sbatch has them
    after: Sequence[str] = ()
    runs: Path = Path("runs")
    run_id: str | None = None
    resume: str | None = None
    preflight: bool = False
    retries: int = 3
    accept_changed_data: bool = False
    profile: ProfileRequest | None = None
    dry_run: bool = False

    def site_for(self, cluster: Cluster) -> tuple[Cluster, Site]:
        """The cluster as this wish has it, and what Slurm says of it. What cannot be is refused before all planning."""
        check_scheduler(cluster)
        scheduler = settled(cluster.scheduler)
        given = {name: value for name, value in (self.fields or {}).items() if value is not None}
        if given:
            scheduler = validated(Scheduler, {**scheduler.model_dump(exclude_unset=True), **given}, "gradus submit")
        scheduler = with_options(scheduler, self.sbatch)
        site = read_site()
        if self.nodes is not None:
            check_limits(site, scheduler, self.nodes)
        chosen_partitions(site, scheduler)
        return cluster.model_copy(update={"scheduler": scheduler}), site

    def request(self, cluster: Cluster, **rest: Any) -> Request:
        return Request(
            cluster,
            runs=self.runs,
            run_id=self.run_id,
            resume=self.resume,
            after=tuple(self.after),
            preflight=self.preflight,
            retries=self.retries,
            **rest,
        )


def recipe_request(recipes: Sequence[Recipe], cluster: Cluster, wish: Wish) -> tuple[Request, Site]:
    """A request for a recipe, or for several that an array job trains, all in the same shape."""
    cluster, site = wish.site_for(cluster)
    known = [checked(recipe, goes_on=wish.resume is not None) for recipe in recipes]
    nodes = wish.nodes or _fewest_nodes(known[0], cluster, wish.nproc)
    here = cluster.model_copy(update={"nodes": nodes})
    choices = [_planned(recipe, here, wish.nproc) for recipe in known]
    sizes = {choice.plan.mesh.world_size for choice in choices}
    if len(sizes) > 1:
        raise InputError(
            f"--sweep: the plans have {', '.join(map(str, sorted(sizes)))} ranks, but the jobs of an array are alike",
            hint="set --nproc, or submit them one by one",
            field="--sweep",
            found=sorted(sizes),
        )
    if not wish.dry_run:
        for recipe in known:
            prepare_data(recipe)
    works = tuple(
        prepared_recipe(recipe, choice, wish.accept_changed_data, wish.profile)
        for recipe, choice in zip(known, choices, strict=True)
    )
    request = wish.request(
        here,
        works=works,
        ranks_per_node=with_ranks_on_nodes(here, sizes.pop()),
        ranks_per_gpu=choices[0].plan.ranks_per_gpu,
        folders=tuple(dict.fromkeys(folder for recipe in known for folder in folders_of(recipe.model_dump()))),
    )
    return request, site


def script_request(script: Script, cluster: Cluster, wish: Wish) -> tuple[Request, Site]:
    """A request for a script: without a word about ranks, one for each GPU, or one for each node without."""
    cluster, site = wish.site_for(cluster)
    here = cluster.model_copy(update={"nodes": wish.nodes or 1})
    per_node = wish.nproc or max(1, cluster.gpus_per_node)
    if cluster.gpus_per_node and per_node > cluster.gpus_per_node:
        raise InputError(
            f"--nproc: {per_node} ranks, but a node of {cluster.name} has {cluster.gpus_per_node} GPUs",
            field="--nproc",
            found=per_node,
            allowed=cluster.gpus_per_node,
        )
    work = prepared_script(with_ranks(script, here.nodes * per_node), wish.accept_changed_data, wish.profile)
    folders = (script.directory, *folders_of(list(script.arguments)))
    return wish.request(here, works=(work,), ranks_per_node=per_node, folders=folders, directory=script.directory), site


def sweep_overrides(sweep: Sequence[str]) -> list[list[str]]:
    """The overrides of each run of a sweep: `optimizer.lr=1e-3,3e-3` with `seed=1,2` are four.

    >>> sweep_overrides(["seed=1,2"])
    [['seed=1'], ['seed=2']]
    """
    choices = []
    for text in sweep:
        key, equals, values = text.partition("=")
        found = parse_yaml(f"[{values}]", f"--sweep {text}") if equals and values.strip() else None
        if not key.strip() or not isinstance(found, list) or not found:
            raise InputError(
                f"--sweep: found {text!r}, allowed: key.key=value,value",
                hint="for example --sweep optimizer.lr=1e-3,3e-3",
                field="--sweep",
                found=text,
                allowed="key.key=value,value",
            )
        if key.strip() == "name":
            raise InputError("--sweep: the runs of a sweep have one name", field="--sweep", found=text)
        choices.append([f"{key.strip()}={json.dumps(value)}" for value in found])
    return [list(combination) for combination in itertools.product(*choices)]


def swept(load: Callable[[list[str]], Recipe], sweep: Sequence[str]) -> list[Recipe]:
    """The recipes of a sweep; without one, the one recipe."""
    return [load(overrides) for overrides in sweep_overrides(sweep)]


def _planned(recipe: Recipe, cluster: Cluster, nproc: int | None) -> Choice:
    """The plan for these nodes. A number of ranks that all nodes can share is found where nobody says one."""
    if nproc is not None:
        return chosen(recipe, cluster, cluster.nodes * nproc)
    if "mesh" in recipe.plan.fixed:
        return chosen(recipe, cluster, None)
    if not cluster.gpus_per_node:
        return chosen(recipe, cluster, cluster.nodes)
    choice = chosen(recipe, cluster, None)
    even = choice.plan.mesh.world_size // cluster.nodes * cluster.nodes
    return choice if even in (0, choice.plan.mesh.world_size) else chosen(recipe, cluster, even)


def _fewest_nodes(recipe: Recipe, cluster: Cluster, nproc: int | None) -> int:
    """The fewest whole nodes on which a plan fits; one where there are no GPUs."""
    if nproc is not None or not cluster.gpus_per_node:
        fixed = recipe.plan.mesh.world_size if "mesh" in recipe.plan.fixed else 1
        return max(1, fixed // nproc) if nproc else 1
    from gradus.planner.planning import fewest_nodes

    return fewest_nodes(recipe, cluster)
