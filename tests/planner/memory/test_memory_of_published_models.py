"""The general predictor, on the reference GPT as it is traced, against a published figure of memory.

arXiv:2205.05198, figure 1, is about Megatron-LM on A100: 16-bit parameters beside fp32 ones and fp32 gradients,
attention from separate products, dropout 0.1. The figure counts the layers alone, without embedding and logits.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gradus.planner.memory.device_memory import NO_GPU
from gradus.planner.memory.framework import MEGATRON
from gradus.planner.memory.rank_memory import MemoryFacts, predicted_memory

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
GIB = 2**30
LARGE = ("530B", "1T")


def rows(name: str) -> list[dict[str, str]]:
    with (BENCHMARKS / "tables" / name).open() as file:
        return list(csv.DictReader(file))


FIGURE = [
    pytest.param(row, id=f"{row['model']}/{row['variant']}", marks=[pytest.mark.slow] if row["model"] in LARGE else [])
    for row in rows("korthikanti_fig1_memory_GiB_per_gpu.csv")
]


FACTS = MemoryFacts(framework=MEGATRON, device=NO_GPU)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import published_memory

    yield published_memory
    sys.modules.pop("published_memory", None)


@pytest.mark.parametrize("row", FIGURE)
def test_memory_is_within_five_percent_of_what_is_published(row: dict[str, str], benchmark: ModuleType) -> None:
    model = next(m for m in rows("korthikanti_table3_table5.csv") if m["model"] == row["model"])
    none = row["variant"] == "none"
    # What they call selective is to compute the inside of attention again: what flash attention keeps anyway.
    found = predicted_memory(
        benchmark.layers_of(model, fused=not none), benchmark.plan_of(model, slices=not none), FACTS
    ).memory
    state = (found.parameters + found.master + found.optimizer + found.gradients) / GIB
    assert state == pytest.approx(float(row["params_plus_optimizer_GiB"]), rel=0.05)
    assert found.activations / GIB == pytest.approx(float(row["activation_GiB"]), rel=0.05)
