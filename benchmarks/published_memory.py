"""Published formulas and memory beside what gradus computes and predicts.

python benchmarks/published_memory.py

First what is exact to rounding: formulas of papers against the tables of the same papers. Then figure 1 of Korthikanti
et al. 2022, which the general predictor has to meet: the reference model `gpt`, traced with the shapes of a row, under
the row's plan, with the settings of Megatron-LM. Nothing is fitted to either.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gradus.planner.memory.device_memory import NO_GPU
from gradus.planner.memory.framework import MEGATRON
from gradus.planner.memory.rank_memory import MemoryFacts, predicted_memory
from gradus.planner.profile.of_recipe import profile_of
from gradus.planner.profile.program import ModelProfile
from gradus.planner.published import FLOPS_OF_A_PF_DAY, anatomy_bytes, largest_model, training_days, training_flops
from gradus.planner.resolve import resolved
from gradus.planner.zero import zero_bytes
from gradus.schema.plan import Mesh, Plan
from gradus.schema.recipe import Recipe

TABLES = Path(__file__).parent / "tables"
GIB = 2**30
BERT_LAB = 2_472_627_289  # parameters of the preset bert-2.5b, a BERT with 192 layers
IMAGENET = 1_281_167  # images of its training set


@dataclass(frozen=True)
class Row:
    """A published number and ours."""

    table: str
    name: str
    published: float
    ours: float
    unit: str

    @property
    def error(self) -> float:
        return self.ours / self.published - 1


def rows_of(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open() as file:
        return list(csv.DictReader(file))


def formulas() -> Iterator[Row]:
    """What has to be exact, but for the rounding of print."""
    for row in rows_of("zero_table1_model_state_GB.csv"):
        parameters = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[row["model"]]
        for zero, column in ((1, "Pos_pub"), (2, "Pos_g_pub"), (3, "Pos_g_p_pub")):
            ours = zero_bytes(int(parameters), zero, int(row["dp_degree"])).total / 1e9
            name = f"{row['model']}, zero {zero}, {row['dp_degree']} ranks"
            yield Row("ZeRO, table 1 (arXiv:1910.02054)", name, float(row[column]), ours, "GB")
    for row in rows_of("zero_table2_max_model_size_B_on_32GB_V100.csv"):
        ways = int(row["mp"])
        for zero, column in enumerate(("baseline", "Pos", "Pos_g", "Pos_g_p")):
            ours = largest_model(32e9, zero, int(row["gpus"]) // ways, ways) / 1e9
            name = f"{row['gpus']} GPUs, model-parallel {ways}, zero {zero}"
            yield Row("ZeRO, table 2 (arXiv:1910.02054)", name, float(row[f"theory_{column}"]), ours, "B parameters")
    for row in rows_of("gpt3_table_D1_compute.csv"):
        per = float(row["flops_per_parameter_and_token"])
        flops = training_flops(float(row["params_M"]) * 1e6, float(row["tokens_B"]) * 1e9, per)
        table = "Compute, table D.1 (arXiv:2005.14165)"
        yield Row(table, row["model"], float(row["pf_days"]), flops / FLOPS_OF_A_PF_DAY, "PF-days")


def single_numbers() -> Iterator[Row]:
    lab = anatomy_bytes(BERT_LAB, 1, 2, low=2, high=4, gradient=0) / GIB
    yield Row("Memory anatomy", "192-layer BERT, zero 1 on two ranks, as DeepSpeed logs it", 18.42, lab, "GiB")
    alone = anatomy_bytes(BERT_LAB, 0, 1, low=4, high=4) / GIB
    yield Row("Memory anatomy", "the same in fp32 on one rank", 36.85, alone, "GiB")
    trillion = zero_bytes(1024 * 10**9, 3, 1024).total / 1e9
    yield Row("ZeRO (arXiv:1910.02054)", "a trillion (1,024 billion) parameters on 1,024 GPUs", 16, trillion, "GB")
    days = training_days(175e9, 300e9, 1024, 140e12)
    yield Row("Megatron-LM (arXiv:2104.04473)", "GPT-3 on 1,024 A100, 140 TFLOP/s each", 34, days, "days")
    # 90 epochs of ImageNet at published rates: 3 s an epoch on 1,536 V100 of Summit (Panda et al., tutorial on
    # high-performance deep learning); 260,000 images/s on 2,048 nodes of Frontera (Jain et al. 2019).
    yield Row("ImageNet, 90 epochs", "Summit, 3 s an epoch", 4.5, 90 * 3 / 60, "minutes")
    yield Row("ImageNet, 90 epochs", "Frontera, 260,000 images/s", 7.4, 90 * IMAGENET / 260_000 / 60, "minutes")


def korthikanti() -> Iterator[Row]:
    """Figure 1: 16-bit parameters beside fp32 ones and fp32 gradients, attention from separate products, dropout 0.1.

    The figure counts the layers alone, without embedding and logits.
    """
    facts = MemoryFacts(framework=MEGATRON, device=NO_GPU)
    models = {row["model"]: row for row in reversed(rows_of("korthikanti_table3_table5.csv"))}
    for row in rows_of("korthikanti_fig1_memory_GiB_per_gpu.csv"):
        model, plain = models[row["model"]], row["variant"] == "none"
        # What they call selective computes the inside of attention again: what flash attention keeps anyway.
        profile = layers_of(model, fused=not plain)
        found = predicted_memory(profile, plan_of(model, slices=not plain), facts).memory
        state = (found.parameters + found.master + found.optimizer + found.gradients) / GIB
        for what, column, ours in (
            ("state", "params_plus_optimizer_GiB", state),
            ("activations", "activation_GiB", found.activations / GIB),
        ):
            name = f"{row['model']}, {row['variant']}: {what}"
            yield Row("Korthikanti, figure 1 (arXiv:2205.05198)", name, float(row[column]), ours, "GiB")


def layers_of(model: dict[str, str], *, fused: bool) -> ModelProfile:
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
    narrow = {"precision": "bf16", "narrow_parameters": True, "capability": (8, 0)}
    found = profile_of(resolved(recipe), fused_attention=fused, **narrow)  # type: ignore[arg-type]
    blocks = tuple(call for call in found.calls if found.parts[call].block)
    return replace(found, calls=blocks, tied_elements=0, tied_trained=0, sample_bytes=0.0)


def plan_of(model: dict[str, str], *, slices: bool) -> Plan:
    ways, per_rank = int(model["pp"]), int(model["interleave_m"])
    stages = ways * per_rank
    return Plan(
        mesh=Mesh(pipeline=ways, tensor=int(model["tp"])),
        precision="bf16",
        micro_batch=int(model["micro_batch"]),
        accumulate=int(model["global_batch"]) // int(model["micro_batch"]),
        pipeline_schedule="interleaved" if per_rank > 1 else "1f1b",
        stages_per_rank=per_rank,
        sequence_parallel=slices,
        stage_blocks=[int(model["layers"]) // stages] * stages if ways > 1 else None,
    )


def table_of(rows: list[Row]) -> list[str]:
    """As Markdown, each row."""
    lines = ["| table | row | published | ours | error |", "|---|---|---|---|---|"]
    for row in rows:
        figures = f"{row.published:g} {row.unit} | {row.ours:.4g} | {row.error:+.2%}"
        lines.append(f"| {row.table} | {row.name} | {figures} |")
    return [*lines, ""]


def worst_of(rows: list[Row]) -> list[str]:
    """Of each table, how many rows there are and the largest error."""
    lines = ["| table | rows | largest error | in |", "|---|---|---|---|"]
    for table in dict.fromkeys(row.table for row in rows):
        members = [row for row in rows if row.table == table]
        worst = max(members, key=lambda row: abs(row.error))
        printed = f"{worst.name}: published {worst.published:g}, {worst.ours:.4g} here"
        lines.append(f"| {table} | {len(members)} | {abs(worst.error):.2%} | {printed} |")
    return [*lines, ""]


def main() -> None:
    print("\n".join(["Formulas against the tables of their papers; what is left is rounding in print.", ""]))
    print("\n".join(worst_of(list(formulas()))))
    print("\n".join(table_of(list(single_numbers()))))
    memory = list(korthikanti())
    print("\n".join(table_of(memory)))
    mean = sum(abs(row.error) for row in memory) / len(memory)
    print(f"Memory of figure 1: mean absolute error {mean:.1%}, worst {max(abs(row.error) for row in memory):.1%}.")


if __name__ == "__main__":
    main()
