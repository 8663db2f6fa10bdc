"""What `gradus tune` tries: for each knob of a plan the values that may help here, or why none would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gradus.bench.largest_micro_batch import LargestMicroBatch, sizes_of
from gradus.bench.tried import Tried
from gradus.models import catalogue
from gradus.parallel.case import reason_of
from gradus.parallel.support import RULES
from gradus.planner.defaults import case_of
from gradus.planner.model_facts import facts_of
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

KNOBS = (
    *("workers", "micro_batch", "recompute", "compile", "channels_last", "bucket", "precision", "narrow_weights"),
    *("loss_chunks", "cuda_graph"),
)
_FIELDS = {
    "bucket": ("bucket_mib",),
    "micro_batch": ("micro_batch", "accumulate"),
    "recompute": ("recompute", "recompute_blocks"),
}
_LITTLE_WAITING = 0.02  # of a step: faster loading would gain less than noise hides
_WORKERS = (0, 1, 2, 4, 8, 16)
_BUCKETS = (5, 25, 50, 100)
_SIZES_TRIED = 3
_CHUNKS = (1, 4, 8)

# Which knob a finding of `gradus explain` points at.
POINTS_AT: dict[str, tuple[str, ...]] = {
    "data-bound": ("workers",),
    "too-few-workers": ("workers",),
    "slow-storage": ("workers",),
    "cpu-oversubscription": ("workers",),
    "small-kernels": ("compile", "cuda_graph", "micro_batch"),
    "fp32": ("precision",),
    "no-tensor-cores": ("precision",),
    "channels-last": ("channels_last",),
    "exposed-communication": ("bucket",),
    "memory-headroom": ("micro_batch", "recompute"),
    "near-memory-limit": ("micro_batch",),
    "fragmentation": ("micro_batch",),
    "needless-recompute": ("recompute",),
    "pipeline-bubble": ("micro_batch",),
}


@dataclass(frozen=True)
class Candidates:
    """Changes of the plan that are worth a trial, or why there are none."""

    changes: tuple[dict[str, Any], ...] = ()
    why_none: str = ""


@dataclass(frozen=True)
class Standing:
    """What is known when a knob's turn comes."""

    recipe: Recipe
    cluster: Cluster
    plan: Plan
    last: Tried  # a trial of that plan
    largest: LargestMicroBatch | None = None
    asked_for: bool = False  # by name: what rarely pays is tried all the same


def fields_of(knob: str) -> tuple[str, ...]:
    """The fields of the plan that a knob turns."""
    return _FIELDS.get(knob, (knob,))


def ordered(findings: Iterable[str], knobs: Iterable[str] = KNOBS) -> list[str]:
    """What the findings point at first, in their order; then the rest."""
    wanted = list(knobs)
    pointed = [knob for finding in findings for knob in POINTS_AT.get(finding, ()) if knob in wanted]
    return list(dict.fromkeys([*pointed, *wanted]))


def candidates(knob: str, now: Standing) -> Candidates:
    if knob_is_fixed(knob, now.recipe):
        return Candidates(why_none="fixed by the recipe")
    return _TRIES[knob](now)


def knob_is_fixed(knob: str, recipe: Recipe) -> bool:
    return any(field in recipe.plan.fixed for field in fields_of(knob))


def _workers(now: Standing) -> Candidates:
    share = now.last.data_share
    if share is not None and share < _LITTLE_WAITING and not now.asked_for:
        return Candidates(why_none=f"a step waits for samples during {share:.1%} of its time: little to gain")
    ranks = max(1, now.plan.mesh.world_size // max(1, now.cluster.nodes))
    # Workers that wait for a disk need no core: twice as many as cores may still help.
    most = max(2, 2 * now.cluster.cpu_cores // ranks)
    return Candidates(tuple({"workers": n} for n in _WORKERS if n != now.plan.workers and n <= most))


def _micro_batch(now: Standing) -> Candidates:
    assert now.largest is not None
    largest = now.largest.micro_batch
    if largest is None:
        return Candidates(why_none=now.largest.why)
    share = now.recipe.batch // now.plan.mesh.data_ranks
    below = [size for size in sizes_of(now.recipe.batch, now.plan) if size <= largest]
    # The largest is not always the fastest; of what is smaller, each about half of the one before.
    chosen: list[int] = []
    for size in reversed(below):
        if len(chosen) < _SIZES_TRIED and (not chosen or 2 * size <= chosen[-1]):
            chosen.append(size)
    changes = [{"micro_batch": size, "accumulate": share // size} for size in chosen if size != now.plan.micro_batch]
    return Candidates(tuple(changes), "" if changes else f"{largest} is the only size that can be")


def _recompute(now: Standing) -> Candidates:
    if now.plan.recompute != "none":
        less = ("none",) if now.plan.recompute == "selective" else ("none", "selective")
        blocks = {} if now.plan.recompute_blocks is None else {"recompute_blocks": None}
        return Candidates(tuple({"recompute": value, **blocks} for value in less))
    found = now.largest
    if found is None or found.too_large is None or found.micro_batch is None:
        return Candidates(why_none="nothing is recomputed, and memory does not bind")
    share = now.recipe.batch // now.plan.mesh.data_ranks
    size = found.too_large
    larger = {"micro_batch": size, "accumulate": share // size}
    return Candidates(tuple({"recompute": value, **larger} for value in ("selective", "full")))


def _compile(now: Standing) -> Candidates:
    if not now.cluster.gpus_per_node and not now.asked_for:
        return Candidates(why_none="for a CPU, compiling takes longer than it gains (--knobs compile tries it)")
    return Candidates(({"compile": not now.plan.compile},))


def _channels_last(now: Standing) -> Candidates:
    if not now.cluster.gpus_per_node and not now.asked_for:
        return Candidates(why_none="a layout for tensor cores, and there is no GPU")
    if now.recipe.model.built_in:
        reference, _ = catalogue.resolve(now.recipe.model.use, now.recipe.model.options)
        if reference.sample != "image":
            return Candidates(why_none="the samples are no images")
    elif not now.asked_for:
        return Candidates(why_none="your own model may not take it (--knobs channels_last tries it)")
    return Candidates(({"channels_last": not now.plan.channels_last},))


def _bucket(now: Standing) -> Candidates:
    if now.plan.mesh.replicate == 1 or now.plan.sharded or now.plan.mesh.pipeline > 1:
        return Candidates(why_none="no gradients are reduced in buckets: that is for several replicas")
    return Candidates(tuple({"bucket_mib": size} for size in _BUCKETS if size != now.plan.bucket_mib))


def _precision(now: Standing) -> Candidates:
    if now.plan.precision not in ("fp32", "tf32"):
        return Candidates(why_none=f"it is {now.plan.precision} already")
    if not now.cluster.gpus_per_node and not now.asked_for:
        return Candidates(why_none="few CPUs are faster in bf16 (--knobs precision tries it)")
    return Candidates(({"precision": "bf16"},))


def _narrow_weights(now: Standing) -> Candidates:
    if now.plan.mesh.world_size > 1 or now.plan.sharded:
        return Candidates(why_none="for one rank; on several, zero 1 to 3 compute with such weights")
    if now.plan.precision not in ("bf16", "fp16", "fp8"):
        return Candidates(why_none=f"weights are computed with in {now.plan.precision}")
    if not now.cluster.gpus_per_node and not now.asked_for:
        return Candidates(why_none="less to read from a GPU's memory, and there is no GPU")
    return Candidates(({"narrow_weights": not now.plan.narrow_weights},))


def _loss_chunks(now: Standing) -> Candidates:
    if now.plan.mesh.tensor > 1:
        return Candidates(why_none="with mesh.tensor, each rank has the logits of a part of the vocabulary alone")
    if facts_of(now.recipe).vocabulary is None and not now.asked_for:
        return Candidates(why_none="for losses over a vocabulary (--knobs loss_chunks tries it)")
    if not now.cluster.gpus_per_node and not now.asked_for:
        return Candidates(why_none="on a CPU it saves memory and no time (--knobs loss_chunks tries it)")
    return Candidates(tuple({"loss_chunks": chunks} for chunks in _CHUNKS if chunks != now.plan.loss_chunks))


def _cuda_graph(now: Standing) -> Candidates:
    graphed = now.plan.model_copy(update={"cuda_graph": True})
    refusal = RULES["cuda_graph"](case_of(now.recipe, now.cluster, graphed))
    if refusal is not None:
        return Candidates(why_none=reason_of(refusal))
    return Candidates(({"cuda_graph": not now.plan.cuda_graph},))


_TRIES = {
    "workers": _workers,
    "micro_batch": _micro_batch,
    "recompute": _recompute,
    "compile": _compile,
    "channels_last": _channels_last,
    "bucket": _bucket,
    "precision": _precision,
    "narrow_weights": _narrow_weights,
    "loss_chunks": _loss_chunks,
    "cuda_graph": _cuda_graph,
}


def change_text(plan: Plan, change: dict[str, Any]) -> str:
    """`workers 0 → 2`, for people."""
    shown = {field: value for field, value in change.items() if field != "accumulate"}
    return ", ".join(f"{field} {_word(getattr(plan, field))} → {_word(value)}" for field, value in shown.items())


def _word(value: Any) -> str:
    return {True: "on", False: "off"}.get(value, str(value)) if isinstance(value, bool) else str(value)
