"""Predicted step times beside published ones: Megatron-LM 2021, Korthikanti et al. 2022, Llama 3 405B.

python benchmarks/published_tables.py

Everything comes out of the planner's general path: the reference model `gpt` is traced with the shapes of a row, and
its time is predicted for the row's plan on a cluster of the row's GPUs. What is fitted belongs to a GPU and a software
era (src/gradus/hardware/speeds.yaml says which rows it was fitted on); those rows are marked, and the error is given
for the others by themselves.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.planner.profile.program import ModelProfile
from gradus.planner.resolve import resolved
from gradus.planner.speed.device import Era, device_of
from gradus.planner.speed.network import fabric_of
from gradus.planner.speed.step_time import StepFacts, uncalibrated_step
from gradus.planner.speed.throughput import model_flops
from gradus.schema.cluster import Cluster
from gradus.schema.plan import Mesh, Plan
from gradus.schema.prediction import StepPrediction
from gradus.schema.recipe import Recipe

TABLES = Path(__file__).parent / "tables"
# The rows that a constant of 2021 was fitted on: the first and the last, and two in between. All others are held out.
FITTED = {("Megatron-LM 2021", name) for name in ("1.7B", "18B", "145B", "1T")}


@dataclass(frozen=True)
class Row:
    """A published time and what is predicted for it."""

    table: str
    name: str
    published: float  # seconds of a step
    step: StepPrediction
    note: str = ""

    @property
    def error(self) -> float:
        return self.step.total / self.published - 1

    @property
    def fitted(self) -> bool:
        return (self.table, self.name) in FITTED


def rows_of(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open() as file:
        return list(csv.DictReader(file))


@functools.cache
def _profile(
    era: Era, capability: tuple[int, int], context: int, settings: tuple[tuple[str, Any], ...]
) -> ModelProfile:
    from gradus.planner.profile.of_recipe import profile_of

    document = {
        "name": "published",
        "model": {"use": "gpt", "context": context, **dict(settings)},
        "data": {"use": "synthetic-tokens"},
        "batch": 8,
        "steps": 1,
        "optimizer": {"use": "adamw", "lr": 1e-4, "clip": 1.0},
    }
    return profile_of(
        resolved(Recipe.from_document(document)),
        precision="bf16",
        narrow_parameters=True,
        capability=capability,
        fused_attention=era == "modern",
    )


def _megatron_model(row: dict[str, str], hidden: str = "hidden") -> tuple[tuple[str, Any], ...]:
    return (
        ("layers", int(row["layers"])),
        ("width", int(row[hidden])),
        ("heads", int(row["heads"])),
        ("vocabulary", int(row["vocab"])),
        ("dropout", 0.1),
    )


def _predicted(profile: ModelProfile, plan: Plan, cluster: str, era: Era) -> StepPrediction:
    site = Cluster.load(cluster)
    device = device_of(site, era)
    assert device is not None, cluster
    return uncalibrated_step(profile, plan, fabric_of(site), device, StepFacts(clip=True))


def megatron() -> list[Row]:
    """Table 1 of Narayanan et al. 2021 (arXiv:2104.04473): weak scaling on A100s, everything recomputed.

    Its kernels were fused by hand, much as a compiler fuses them: `compile` stands for that.
    """
    found = []
    for row in rows_of("megatron_sc21_table1_A100_weak_scaling.csv"):
        data, micro_batch, chunks = int(row["dp"]), int(row["micro_batch"]), int(row["vpp_chunks"])
        plan = Plan(
            mesh=Mesh(replicate=data, pipeline=int(row["pp"]), tensor=int(row["tp"])),
            micro_batch=micro_batch,
            accumulate=int(row["global_batch"]) // (data * micro_batch),
            precision="bf16",
            recompute="full",
            compile=True,
            pipeline_schedule="interleaved" if chunks > 1 else "1f1b",
            stages_per_rank=chunks,
            sequence_parallel=False,
        )
        profile = _profile("2021", (8, 0), int(row["seq"]), _megatron_model(row))
        step = _predicted(profile, plan, "selene", "2021")
        found.append(Row("Megatron-LM 2021", row["model"], float(row["derived_iter_time_s"]), step))
    return found


def korthikanti() -> list[Row]:
    """Table 5 of Korthikanti et al. 2022 (arXiv:2205.05198): all recomputed, and sequence-parallel with attention
    recomputed."""
    found = []
    for row in rows_of("korthikanti_table3_table5.csv"):
        if not row["micro_batch"]:
            continue  # only an MFU is published
        micro_batch, chunks = int(row["micro_batch"]), int(row["interleave_m"])
        for column, recompute, sliced in (
            ("iter_s_full_recompute", "full", False),
            ("iter_s_seqpar_selective", "selective", True),
        ):
            plan = Plan(
                mesh=Mesh(pipeline=int(row["pp"]), tensor=int(row["tp"])),
                micro_batch=micro_batch,
                accumulate=int(row["global_batch"]) // micro_batch,
                precision="bf16",
                recompute=recompute,  # type: ignore[arg-type]
                compile=True,
                pipeline_schedule="interleaved" if chunks > 1 else "1f1b",
                stages_per_rank=chunks,
                sequence_parallel=sliced,
            )
            profile = _profile("2021", (8, 0), int(row["seq"]), _megatron_model(row))
            step = _predicted(profile, plan, "selene", "2021")
            found.append(Row(f"Korthikanti 2022, {recompute}", row["model"], float(row[column]), step))
    return found


def llama() -> list[Row]:
    """Table 4 of Grattafiori et al. 2024 (arXiv:2407.21783): 405B parameters on H100s."""
    found = []
    for row in rows_of("llama3_405B_table4.csv"):
        settings = (
            ("layers", int(row["layers"])),
            ("width", int(row["hidden"])),
            ("heads", int(row["heads"])),
            ("kv_heads", int(row["kv_heads"])),
            ("inner", int(row["ffn"])),
            ("vocabulary", int(row["vocab"])),
            ("positions", "rotary"),
            ("norm", "rmsnorm"),
            ("activation", "swiglu"),
            ("bias", False),
            ("tied", False),
        )
        profile = _profile("modern", (9, 0), int(row["seq"]), settings)
        # One layer in each of 128 stages, the first and the last without one (section 3.3.2): here 126 stages of one.
        plan = Plan(
            mesh=Mesh(shard=int(row["dp"]), context=int(row["cp"]), pipeline=int(row["pp"]), tensor=int(row["tp"])),
            zero=2,
            micro_batch=1,
            accumulate=int(row["batch_per_dp"]),
            precision="bf16",
            pipeline_schedule="interleaved",
            stages_per_rank=7,
            context_attention="gather",
        )
        step = _predicted(profile, plan, "dgx-h100", "modern")
        published = model_flops(profile, plan) / (int(row["gpus"]) * float(row["tflops_per_gpu"]) * 1e12)
        name = f"{row['gpus']} GPUs, {row['seq']} tokens"
        found.append(Row("Llama 3 405B", name, published, step))
    return found


def mean_error(rows: Sequence[Row]) -> float:
    return sum(abs(row.error) for row in rows) / len(rows)


def table_of(rows: Sequence[Row]) -> list[str]:
    """As Markdown."""
    lines = ["| table | row | published s | predicted s | error | compute | recompute | exposed | bubble | optimizer |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        step = row.step
        kinds = (step.compute, step.recompute, step.exposed_communication, step.bubble, step.optimizer)
        shares = " | ".join(f"{seconds:.2f}" for seconds in kinds)
        mark = " (fitted)" if row.fitted else ""
        figures = f"{row.published:.2f} | {step.total:.2f} | {row.error:+.1%}"
        lines.append(f"| {row.table} | {row.name}{mark} | {figures} | {shares} |")
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    lines.append("")
    for name, members in tables.items():
        held_out = [row for row in members if not row.fitted]
        words = f"{name}: mean absolute error {mean_error(members):.1%} over {len(members)} rows"
        if len(held_out) < len(members):
            words += f"; of the {len(held_out)} that nothing was fitted on, {mean_error(held_out):.1%}"
        lines.append(f"- {words}")
    return lines


def main() -> None:
    print("\n".join(table_of([*megatron(), *korthikanti(), *llama()])))


if __name__ == "__main__":
    main()
