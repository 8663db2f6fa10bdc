"""Measured bytes are the sums of real shards: rows as torch deals them out, times the size of their number format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_cases import measured
from pool import Pool

from gradus.models import catalogue
from gradus.planner.resolve import resolved
from gradus.planner.zero import number_bytes, zero_bytes
from gradus.record.directory import RunDirectory
from gradus.schema.recipe import Recipe

# Six rows over four ranks are 2, 2, 2 and none; the pooling layer is frozen, the decoder tied to the embedding.
BERT = {"layers": 3, "width": 6, "heads": 2, "context": 7, "vocabulary": 263, "pooler": True}
FP32, BF16 = 4, 2


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements on one rank, from the shapes of the parameters alone."""

    whole: int
    outside_blocks: int
    trained: int
    tensors: int
    shard: int
    trained_shard: int


def sizes_on(rank: int, ranks: int) -> Sizes:
    with torch.device("meta"):
        model = catalogue.build("bert", BERT)
    every = dict(model.named_parameters())  # each once, by its first name
    trained = {name: p for name, p in every.items() if p.requires_grad}
    assert len(trained) == len(every) - 2

    def rows_here(parameters: dict[str, Any]) -> int:
        total = 0
        for parameter in parameters.values():
            rows = parameter.shape[0]
            at_most = math.ceil(rows / ranks)
            total += max(0, min(rows, (rank + 1) * at_most) - rank * at_most) * math.prod(parameter.shape[1:])
        return total

    return Sizes(
        whole=sum(p.numel() for p in every.values()),
        outside_blocks=sum(p.numel() for name, p in every.items() if not name.startswith("blocks.")),
        trained=sum(p.numel() for p in trained.values()),
        tensors=len(trained),
        shard=rows_here(every),
        trained_shard=rows_here(trained),
    )


def expected(sizes: Sizes, zero: int, bf16: bool) -> dict[str, dict[str, int]]:
    """Adam has two fp32 moments for each element, and for each tensor the number of its steps."""
    if zero == 0:  # autocast makes no copy that stays; DDP keeps the memory of gradients between steps
        held = {"parameters": FP32 * sizes.whole, "master": 0, "gradients": FP32 * sizes.trained}
        held["optimizer"] = FP32 * (2 * sizes.trained + sizes.tensors)
        return dict.fromkeys(("first forward", "first backward", "last backward", "between steps"), held)
    rows = {"parameters": 0 if bf16 else FP32 * sizes.shard, "master": FP32 * sizes.shard if bf16 else 0}
    optimizer = FP32 * (2 * sizes.trained_shard + sizes.tensors)
    gathered = (BF16 if bf16 else FP32) * (sizes.outside_blocks if zero == 3 else sizes.whole)
    between = {**rows, "gradients": 0, "optimizer": optimizer}
    sharded = {**between, "gradients": FP32 * sizes.trained_shard}
    with_gathered = {**between, "parameters": rows["parameters"] + gathered}
    return {
        "first forward": with_gathered,
        "first backward": {
            1: {**with_gathered, "gradients": FP32 * sizes.trained},  # whole until the last micro-batch
            2: {**with_gathered, "gradients": FP32 * sizes.trained_shard},
            3: sharded,
        }[zero],
        "last backward": sharded,
        "between steps": between,
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_rank_holds_the_bytes_of_its_shards(pool: Pool, tmp_path: Path, zero: int, ranks: int) -> None:
    mesh = {"shard": ranks} if zero else {"replicate": ranks}
    for precision in ("fp32", "bf16"):
        recipe = resolved(
            Recipe.from_document(
                {
                    "name": "memory",
                    "model": {"use": "bert", **BERT},
                    "data": {"use": "stdlib-text", "max_bytes": 50_000},
                    "batch": 2 * ranks,
                    "steps": 2,
                    "optimizer": {"use": "adamw", "lr": 1e-3},
                    "plan": {"mesh": mesh, "zero": zero, "accumulate": 2, "precision": precision},
                }
            )
        )
        run = RunDirectory.create(tmp_path, "memory")
        everyone = pool.run(ranks, measured, str(run.path), recipe)
        for rank, found in enumerate(everyone):
            sizes = sizes_on(rank, ranks)
            assert found == expected(sizes, zero, precision == "bf16"), (precision, rank)
        compare(everyone, zero, ranks, precision)


def compare(everyone: list[dict[str, dict[str, int]]], zero: int, ranks: int, precision: str) -> None:
    """The most that a rank held, beside the published formulas; they are the same where both count the same."""
    most = {kind: max(m[kind] for found in everyone for m in found.values()) for kind in everyone[0]["first forward"]}
    low, high = number_bytes(precision)  # type: ignore[arg-type]
    published = zero_bytes(sizes_on(0, ranks).whole, zero, ranks, low=low, high=high, gradient=high)
    print(
        f"\nzero {zero} over {ranks} ranks, {precision}: measured (largest rank) "
        + ", ".join(f"{kind} {size:,}" for kind, size in most.items())
        + f"; published parameters {published.parameters:,.0f}, master {published.master:,.0f}, gradients "
        f"{published.gradients:,.0f}, optimizer {published.moments:,.0f}"
    )
    if zero in (1, 2) and precision == "bf16":
        assert most["parameters"] == published.parameters
