"""Predicted throughput beside what others published of other frameworks: how far a prediction is from what people get.

python benchmarks/elsewhere.py > benchmarks/elsewhere.md

It is no test of the planner alone: a prediction is of what gradus would do, with its own kernels and overlap, and what
is published is what another framework did. No constant is fitted on these rows (tables/elsewhere.yaml, with sources).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml

import gradus
from gradus.record.format import count_text
from gradus.schema.cluster import Cluster
from gradus.schema.recipe import Recipe

TABLE = Path(__file__).parent / "tables" / "elsewhere.yaml"


@dataclass(frozen=True)
class Row:
    """A published throughput and what is predicted for it, in tokens of each GPU in a second."""

    source: str
    name: str
    published: float
    predicted: float
    stated_error: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


@functools.cache
def table() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(TABLE.read_text())
    return document


def predicted(row: Mapping[str, Any]) -> Row:
    found = gradus.predict(recipe_of(row), cluster_of(row), plan_of(row))
    assert found.tokens_per_second is not None
    assert found.step_error is not None
    return Row(row["source"], name_of(row), row["tokens"], found.tokens_per_second / row["gpus"], found.step_error)


def recipe_of(row: Mapping[str, Any]) -> Recipe:
    document = {
        "name": "elsewhere",
        "model": {**table()["models"][row["model"]], "context": row["context"]},
        "data": {"use": "synthetic-tokens"},
        "batch": row["batch"],
        "steps": 100,
        "optimizer": {"use": "adamw", "lr": 1e-4, "clip": 1.0},
        "plan": plan_of(row),
    }
    return Recipe.from_document(document)


def plan_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"loss_chunks": 1, **row["plan"]}  # none of them computes its loss in parts


def cluster_of(row: Mapping[str, Any]) -> Cluster:
    name = row["cluster"]
    given = table()["clusters"].get(name)
    return Cluster.load(name) if given is None else Cluster.model_validate({"name": name, **given})


def name_of(row: Mapping[str, Any]) -> str:
    plan = row["plan"]
    mesh = " × ".join(f"{name} {ways}" for name, ways in plan["mesh"].items()) or "one GPU"
    recompute = {"none": "", "selective": ", selective recompute", "full": ", full recompute"}[plan["recompute"]]
    compiled = ", compiled" if plan["compile"] else ""
    shape = f"{row['model']}, {row['context']:,} tokens, {count_text(row['gpus'], 'GPU')} of {row['cluster']}"
    return f"{shape}, {mesh}, micro-batch {plan['micro_batch']}, {plan['precision']}{compiled}{recompute}"


def printed(rows: Iterable[Row]) -> str:
    rows = list(rows)
    lines = ["| source | what | published | predicted | predicted / published |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.source} | {row.name} | {row.published:,.0f} | {row.predicted:,.0f} | {row.ratio:.2f} |" for row in rows
    ]
    inside = sum(abs(row.ratio - 1) <= row.stated_error for row in rows)
    lines += ["", "| source | rows | median of predicted / published | least | most |", "|---|---|---|---|---|"]
    for source in dict.fromkeys(row.source for row in rows):
        lines.append(_summary(source, [row.ratio for row in rows if row.source == source]))
    lines.append(_summary("all", [row.ratio for row in rows]))
    lines += ["", f"Within the error that the prediction states: {inside} of {len(rows)}."]
    return "\n".join(lines)


def _summary(source: str, ratios: list[float]) -> str:
    return f"| {source} | {len(ratios)} | {median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} |"


INTRODUCTION = """\
# Predictions beside what others published

Tokens of each GPU in a second, as other frameworks reached them and as gradus predicts of itself on the same GPUs with
the same split, by `benchmarks/elsewhere.py`. Above 1, more is predicted than was published. No constant of the planner
is fitted on these rows, and no row was left out for its figure; one fault of the planner was found with them and mended
(pairs of GPUs without a switch). A ratio has two causes that this cannot tell apart: how much slower the other
framework is than gradus would be, and how far the prediction is off. What is known of the largest: attention kernels
of 2023 or of another kind at long sequences, GPUs with a lowered power limit (H100 of 500 W; told, not predicted), and
links that others use as well.
"""


def main() -> None:
    print(INTRODUCTION)
    print("Sources:\n")
    print("\n".join(f"- {name}: {where}" for name, where in table()["sources"].items()) + "\n")
    print(printed(map(predicted, table()["rows"])))


if __name__ == "__main__":
    main()
