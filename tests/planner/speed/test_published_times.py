"""The general predictor, on the reference GPT as it is traced, against published step times (benchmarks/tables)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import published_tables

    yield published_tables
    sys.modules.pop("published_tables", None)


def test_a_row_that_nothing_was_fitted_on_is_within_ten_percent(tables, monkeypatch):
    rows = tables.rows_of("megatron_sc21_table1_A100_weak_scaling.csv")
    monkeypatch.setattr(tables, "rows_of", lambda name: [row for row in rows if row["model"] == "39B"])
    (found,) = tables.megatron()
    assert not found.fitted
    assert abs(found.error) < 0.1


@pytest.mark.slow
def test_published_times_are_met_within_ten_percent_on_average(tables):
    megatron = tables.megatron()
    assert len(megatron) == 10
    assert tables.mean_error(megatron) < 0.1
    held_out = [row for row in megatron if not row.fitted]
    assert len(held_out) == 6
    assert tables.mean_error(held_out) < 0.1
    korthikanti = tables.korthikanti()
    assert len(korthikanti) == 8
    for recompute in ("full", "selective"):
        assert tables.mean_error([row for row in korthikanti if recompute in row.table]) < 0.1
    llama = tables.llama()
    assert len(llama) == 3
    assert tables.mean_error(llama) < 0.1
