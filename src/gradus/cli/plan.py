"""`gradus plan`: how a recipe would be cut up over a cluster, before anything starts."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradus.cli.output import print_json
from gradus.cli.plan_display import show_plans
from gradus.cli.plan_measure import calibrate, check_is_here
from gradus.planner.choice.gpu_count import limits_of
from gradus.planner.defaults import Choice, ranks_on_a_node
from gradus.planner.layout_table import layout_document, layout_text
from gradus.planner.page import plan_page
from gradus.planner.planning import planned, site_for
from gradus.planner.profile.modules import ModuleRow, by_module, modules_text
from gradus.planner.profile.request import profile_for, request_for
from gradus.planner.resolve import resolved
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe


@dataclass(frozen=True)
class PlanOptions:
    """What was typed after `gradus plan`."""

    recipe: str
    cluster: str | None = None
    gpus: str | None = None
    deadline: str | None = None
    budget: float | None = None
    gpu_hours: float | None = None
    top: int = 10
    overrides: tuple[str, ...] = ()
    show_layout: bool = False
    show_modules: bool = False
    html: str | None = None
    measure: bool = False
    as_json: bool = False


def plan_command(options: PlanOptions) -> int:
    recipe = resolved(Recipe.load(options.recipe, options.overrides))
    site, count = site_for(options.cluster, options.gpus)
    limits = limits_of(site, options.deadline, options.budget, options.gpu_hours)
    at_hand = options.cluster is None
    if options.measure:
        check_is_here(site)
    found = planned(recipe, site, count, at_hand=at_hand, limits=limits, most=options.top)
    measured: dict[str, Any] = {}
    if options.measure:
        calibrated = calibrate(recipe, site, options.cluster, found.choices[0].plan)
        print("\n".join(calibrated.text()), file=sys.stderr)
        measured, site = {"calibration": calibrated.document()}, calibrated.cluster
        found = planned(recipe, site, count, at_hand=at_hand, limits=limits, most=options.top)
    choices, refused = found.choices, found.refused
    best = choices[0].plan
    modules = _modules(recipe, best, site) if options.show_modules else []
    if options.html is not None:
        _write(options.html, plan_page(recipe.name, f"{recipe.model.use} on {site.name}", choices, refused))
    if options.as_json:
        documents = [_document(choice, site, options.show_layout) for choice in choices]
        shown = {"modules": [asdict(row) for row in modules]} if options.show_modules else {}
        print_json({"choices": documents, "refused": refused, **shown, **measured})
        return 0
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    print(_where(site, best))
    show_plans(choices, refused)
    if options.show_layout:
        print("\n" + layout_text(best, ranks_on_a_node(site, best)))
    if options.show_modules:
        print("\n" + modules_text(modules, best.micro_batch))
    return 0


def _where(site: Cluster, plan: Plan) -> str:
    """How much of the cluster the best plan is for. A comment, as all but the plan is."""
    ranks, on_a_node = plan.mesh.world_size, ranks_on_a_node(site, plan)
    if not site.gpus_per_node:
        return f"# {site.name}: {count_text(ranks, 'rank')} without GPUs"
    gpus, nodes = -(-ranks // plan.ranks_per_gpu), -(-ranks // on_a_node)
    shape = count_text(nodes, "node") + (f" of {site.gpus_per_node}" if nodes > 1 else "")
    return f"# {site.name}: {gpus} × {site.gpu_name} on {shape}"


def _modules(recipe: Recipe, plan: Plan, site: Cluster) -> list[ModuleRow]:
    """What each module of the model does in one pass of the plan."""
    return by_module(profile_for(recipe, request_for(plan, site)), plan.micro_batch)


def _document(choice: Choice, site: Cluster, show_layout: bool) -> dict[str, Any]:
    prediction = choice.prediction.document() if choice.prediction is not None else None
    reasons = [{"field": field, "reason": reason} for field, reason in choice.reasons.items()]
    layout = {"layout": layout_document(choice.plan, ranks_on_a_node(site, choice.plan))} if show_layout else {}
    return {"plan": choice.plan.model_dump(), "prediction": prediction, "reasons": reasons, **layout}


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"--html: {file} cannot be written: {error.strerror}", field="--html", found=file, allowed="a file to write"
        ) from None
