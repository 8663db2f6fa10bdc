"""`gradus plan`: how a recipe would be cut up over a cluster, before anything starts."""

from __future__ import annotations

from typing import Any

from gradus.cli.output import print_json
from gradus.planner.defaults import Choice, ranks_on_a_node
from gradus.planner.layout_table import layout_document, layout_text
from gradus.planner.planning import planned, site_for
from gradus.planner.resolve import resolved
from gradus.schema.cluster import Cluster
from gradus.schema.recipe import Recipe


def plan_command(
    recipe: str, cluster: str | None, gpus: str | None, overrides: list[str], show_layout: bool, as_json: bool
) -> int:
    site, count = site_for(cluster, gpus)
    choices = planned(resolved(Recipe.load(recipe, overrides)), site, count)
    if as_json:
        print_json({"choices": [_document(choice, site, show_layout) for choice in choices], "refused": []})
        return 0
    best = choices[0]
    print(best.plan.to_yaml(best.reasons), end="")
    if show_layout:
        print("\n" + layout_text(best.plan, ranks_on_a_node(site, best.plan)))
    return 0


def _document(choice: Choice, site: Cluster, show_layout: bool) -> dict[str, Any]:
    reasons = [{"field": field, "reason": reason} for field, reason in choice.reasons.items()]
    layout = {"layout": layout_document(choice.plan, ranks_on_a_node(site, choice.plan))} if show_layout else {}
    return {"plan": choice.plan.model_dump(), "reasons": reasons, **layout}
