"""The general predictor, on the reference GPT as it is traced, against a published figure of memory.

arXiv:2205.05198, figure 1, is about Megatron-LM on A100: 16-bit parameters beside fp32 ones and fp32 gradients,
attention from separate products, dropout 0.1. The figure counts the layers alone, without embedding and logits.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from gradus.planner.memory.device_memory import NO_GPU
from gradus.planner.memory.framework import MEGATRON
from gradus.planner.memory.rank_memory import MemoryFacts, predicted_memory
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.profile.program import ModelProfile
from gradus.planner.resolve import resolved
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

TABLES = Path(__file__).parents[3] / "benchmarks" / "tables"
GIB = 2**30
LARGE = ("530B", "1T")


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open() as file:
        return list(csv.DictReader(file))


FIGURE = [
    pytest.param(row, id=f"{row['model']}/{row['variant']}", marks=[pytest.mark.slow] if row["model"] in LARGE else [])
    for row in rows("korthikanti_fig1_memory_GiB_per_gpu.csv")
]


@pytest.mark.parametrize("row", FIGURE)
def test_memory_is_within_five_percent_of_what_is_published(row: dict[str, str]) -> None:
    model = next(m for m in rows("korthikanti_table3_table5.csv") if m["model"] == row["model"])
    none = row["variant"] == "none"
    # What they call selective is to compute the inside of attention again: what flash attention keeps anyway.
    found = predicted_memory(_profile(model, fused=not none), _plan(model, slices=not none), _FACTS).memory
    state = (found.parameters + found.master + found.optimizer + found.gradients) / GIB
    assert state == pytest.approx(float(row["params_plus_optimizer_GiB"]), rel=0.05)
    assert found.activations / GIB == pytest.approx(float(row["activation_GiB"]), rel=0.05)


_FACTS = MemoryFacts(framework=MEGATRON, device=NO_GPU)


def _profile(model: dict[str, str], *, fused: bool) -> ModelProfile:
    sizes = {"layers": int(model["layers"]), "width": int(model["hidden"]), "heads": int(model["heads"])}
    recipe = Recipe.from_document(
        {
            "name": "published",
            "model": {"use": "gpt", **sizes, "context": 2048, "vocabulary": int(model["vocab"]), "dropout": 0.1},
            "data": {"use": "synthetic-tokens"},
            "batch": int(model["global_batch"]),
            "steps": 1,
            "optimizer": {"use": "adamw", "lr": 1e-4},
        }
    )
    found = profile_of(
        resolved(recipe), precision="bf16", narrow_parameters=True, capability=(8, 0), fused_attention=fused
    )
    blocks = tuple(call for call in found.calls if found.parts[call].block)
    return replace(found, calls=blocks, tied_elements=0, tied_trained=0, sample_bytes=0.0)


def _plan(model: dict[str, str], *, slices: bool) -> Plan:
    ways, per_rank = int(model["pp"]), int(model["interleave_m"])
    return Plan(
        mesh=Mesh(pipeline=ways, tensor=int(model["tp"])),
        precision="bf16",
        micro_batch=int(model["micro_batch"]),
        accumulate=int(model["global_batch"]) // int(model["micro_batch"]),
        pipeline_schedule="interleaved" if per_rank > 1 else "1f1b",
        stages_per_rank=per_rank,
        sequence_parallel=slices,
        stage_blocks=[int(model["layers"]) // (ways * per_rank)] * ways * per_rank if ways > 1 else None,
    )
