"""The published formulas against the published numbers: tables of papers, and the lab of a course."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Literal

import pytest

from gradus.planner.published import (
    FLOPS_OF_A_PF_DAY,
    anatomy_activation_bytes,
    anatomy_bytes,
    largest_model,
    layer_activation_bytes,
    pipeline_activation_bytes,
    training_days,
    training_flops,
)
from gradus.planner.zero import zero_bytes

GIB = 2**30
TABLES = Path(__file__).parents[2] / "benchmarks" / "tables"
BERT = 2_472_627_289  # parameters of a BERT with 192 layers


def rows(name: str) -> list[dict[str, str]]:
    with (TABLES / name).open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", rows("zero_table1_model_state_GB.csv"), ids=lambda r: f"{r['model']}/{r['dp_degree']}")
def test_the_table_of_model_state(row: dict[str, str]) -> None:
    """arXiv:1910.02054, table 1, in GB; printed with three digits, the 1,024-fold ones cut off."""
    parameters = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[row["model"]]
    for zero, column in ((1, "Pos"), (2, "Pos_g"), (3, "Pos_g_p")):
        found = zero_bytes(int(parameters), zero, int(row["dp_degree"])).total / 1e9
        assert found == pytest.approx(float(row[f"{column}_formula"]), abs=6e-4)
        published = float(row[f"{column}_pub"])
        assert abs(found - published) <= max(0.005, 0.0031 * published, 1.0 if published > 500 else 0)


@pytest.mark.parametrize("row", rows("zero_table2_max_model_size_B_on_32GB_V100.csv"), ids=lambda r: r["gpus"])
def test_the_table_of_largest_models(row: dict[str, str]) -> None:
    """arXiv:1910.02054, table 2: on 32 GB; 64 data-parallel ranks of so many model-parallel ones each."""
    ways = int(row["mp"])
    for zero, column in enumerate(("baseline", "Pos", "Pos_g", "Pos_g_p")):
        found = largest_model(32e9, zero, int(row["gpus"]) // ways, ways) / 1e9
        # The last column is rounded to whole hundreds from 500 on.
        assert found == pytest.approx(float(row[f"theory_{column}"]), rel=0.025)


def test_the_anatomy_formula_predicts_what_the_lab_logged() -> None:
    """18.42 GiB of parameters and optimizer state with zero 1 on two ranks; without gradients, as DeepSpeed logs it."""
    found = anatomy_bytes(BERT, 1, 2, low=2, high=4, gradient=0)
    assert found / GIB == pytest.approx(18.4225, abs=5e-5)
    assert anatomy_bytes(BERT, 0, 1, low=4, high=4) / GIB == pytest.approx(36.85, abs=0.01)


def test_a_trillion_parameters_on_1024_gpus_take_16_gb_each() -> None:
    """arXiv:1910.02054, abstract and table 1."""
    assert zero_bytes(10**12, 3, 1024).total / 1e9 == pytest.approx(16, abs=0.4)
    assert zero_bytes(1024 * 10**9, 3, 1024).total / 1e9 == pytest.approx(16)


@pytest.mark.parametrize("row", rows("gpt3_table_D1_compute.csv"), ids=lambda r: r["model"])
def test_the_table_of_compute(row: dict[str, str]) -> None:
    """arXiv:2005.14165, table D.1: all seventeen models."""
    per = float(row["flops_per_parameter_and_token"])
    found = training_flops(float(row["params_M"]) * 1e6, float(row["tokens_B"]) * 1e9, per)
    assert found == pytest.approx(float(row["total_flops"]), rel=0.0031)
    assert found / FLOPS_OF_A_PF_DAY == pytest.approx(float(row["pf_days"]), rel=0.003)


def test_the_table_of_compute_is_whole() -> None:
    assert len(rows("gpt3_table_D1_compute.csv")) == 17


def test_gpt_3_on_1024_a100_takes_34_days() -> None:
    """arXiv:2104.04473, section 5.1: 300 billion tokens at 140 TFLOP/s for each GPU."""
    assert training_days(175e9, 300e9, 1024, 140e12) == pytest.approx(34, abs=0.1)


Policy = Literal["none", "selective", "full"]


@pytest.mark.parametrize(
    ("tensor", "sequence", "recompute", "expected"),
    [
        (1, False, "none", "34 + 5*a*s/h"),
        (8, False, "none", "10 + 24/t + 5*a*s/(h*t)"),
        (8, True, "none", "34/t + 5*a*s/(h*t)"),
        (8, False, "selective", "10 + 24/t"),
        (8, True, "selective", "34/t"),
        (8, False, "full", "2"),
    ],
)
def test_the_table_of_activations(tensor: int, sequence: bool, recompute: Policy, expected: str) -> None:
    """arXiv:2205.05198, table 2, for the layer of a 22-billion GPT."""
    s, b, h, a = 2048, 4, 6144, 64
    found = layer_activation_bytes(s, b, h, a, tensor=tensor, sequence_parallel=sequence, recompute=recompute)
    each = eval(expected, {"s": s, "h": h, "a": a, "t": tensor})
    assert found == pytest.approx(s * b * h * each)


def test_the_course_counts_activations_as_the_paper_does() -> None:
    assert anatomy_activation_bytes(2048, 4, 6144, 64, 48, low=2) == 48 * layer_activation_bytes(2048, 4, 6144, 64)


@pytest.mark.parametrize(
    "row", rows("korthikanti_fig1_memory_GiB_per_gpu.csv"), ids=lambda r: f"{r['model']}/{r['variant']}"
)
def test_the_figure_of_memory(row: dict[str, str]) -> None:
    """arXiv:2205.05198, figure 1: activations of the first rank."""
    model = next(m for m in rows("korthikanti_table3_table5.csv") if m["model"] == row["model"])
    none = row["variant"] == "none"
    layer = layer_activation_bytes(
        int(model["seq"]),
        int(model["micro_batch"]),
        int(model["hidden"]),
        int(model["heads"]),
        tensor=int(model["tp"]),
        sequence_parallel=not none,
        recompute="none" if none else "selective",
    )
    stages = int(model["interleave_m"])
    found = pipeline_activation_bytes(layer, int(model["layers"]), int(model["pp"]), stages)
    assert found / GIB == pytest.approx(float(row["activation_GiB"]), rel=1e-3)
