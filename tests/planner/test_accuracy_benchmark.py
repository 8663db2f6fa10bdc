"""The benchmarks that hold the planner to what was measured: their cases are sound, and their tables tell errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIB = 2**30


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in ("plan_cases", "plan_accuracy", "published_memory", "published_tables"):
        sys.modules.pop(name, None)


@pytest.fixture
def cases(benchmarks: None) -> ModuleType:
    import plan_cases

    return plan_cases


@pytest.fixture
def accuracy(benchmarks: None) -> ModuleType:
    import plan_accuracy

    return plan_accuracy


def test_every_case_is_a_recipe_that_gradus_accepts_in_full_size_and_in_miniature(cases: ModuleType) -> None:
    everything = (*cases.CASES, *cases.COMPILED, *cases.SHARDED)
    names = [case.name for case in everything]
    assert len(names) == len(set(names))
    for case in everything:
        for one in (case, cases.small(case)):
            recipe = one.recipe()
            recipe.plan.check(recipe.batch, recipe.plan.mesh.world_size)


def test_about_a_third_is_held_out_and_limits_are_within_15_percent_of_the_peak(cases: ModuleType) -> None:
    held_out = sum(case.held_out for case in cases.CASES)
    assert len(cases.CASES) >= 34
    assert len(cases.CASES) / 4 <= held_out <= len(cases.CASES) / 2
    assert len(cases.CAPS) >= 12
    for cap in cases.CAPS:
        assert cases.named(cap.case) in cases.CASES
        assert abs(cap.of_peak - 1) <= 0.15 + 1e-9


def test_a_measured_case_is_a_row_with_its_error(accuracy: ModuleType, cases: ModuleType) -> None:
    """As far as half: what is predicted twice as large as measured is off by 100 %."""
    name = "gpt2 b8 fp32"
    expected = accuracy.outcome(cases.named(name), None).prediction
    row = {
        "before_bytes": 0,
        "second_step_peak_bytes": expected.memory.tensors / 2,
        "steady_peak_bytes": expected.memory.tensors / 2 - 1,
        "step_seconds": expected.step.total / 2,
        "steps": 10,
        "phase_seconds": {"data": 0.0, "forward": 1.0, "backward": 2.0, "optimizer": 1.0},
    }
    text = "\n".join(accuracy.report(_document({name: row}), [name], memory_only=False))
    assert text.count("+100.0%") == 3, text  # of memory, of time, and of time with the factors of no other case
    assert "Peak memory, from the second step on: all median 100.0%" in text


def test_a_step_is_calibrated_on_other_cases_and_never_on_itself(accuracy: ModuleType, cases: ModuleType) -> None:
    times = {"gpt2 b8 fp32": 1.25, "gpt2 b16 fp16": 2.0}  # as long as predicted
    rows = {}
    for name, factor in times.items():
        step = accuracy.outcome(cases.named(name), None).prediction.step
        share = step.optimizer / step.total
        phases = {"data": 0.0, "forward": 0.5 * (1 - share), "backward": 0.5 * (1 - share), "optimizer": share}
        rows[name] = {"step_seconds": factor * step.total, "steps": 10, "phase_seconds": phases}
    text = "\n".join(accuracy.report(_document(rows), list(times), memory_only=False))
    of_time = text.partition("## Step time, eager")[2]
    for name, error in (("gpt2 b8 fp32", 2.0 / 1.25 - 1), ("gpt2 b16 fp16", 1.25 / 2.0 - 1)):
        line = next(line for line in of_time.splitlines() if line.startswith(f"| {name} |"))
        assert [cell.strip() for cell in line.split("|")][5:7] == [f"{error:+.1%}"] * 2, line


def test_a_verdict_that_did_not_hold_is_called_wrong(accuracy: ModuleType, cases: ModuleType) -> None:
    caps = [cap for cap in cases.CAPS if cap.case == "gpt2 b32 bf16"]
    rows: dict[str, Any] = {
        caps[0].name: {"ran": False, "limit_bytes": 120 * GIB},  # must have been called `fits`
        caps[1].name: {"ran": True, "limit_bytes": 4 * GIB},  # and this one `no`
        caps[2].name: {"ran": True, "limit_bytes": 120 * GIB},
    }
    text = "\n".join(accuracy.cap_table(rows))
    assert text.count("WRONG") == 2, text
    assert "3 cases near a limit: 2 wrong, 0 called tight." in text


def test_files_are_merged_and_a_failure_does_not_hide_what_was_measured(accuracy: ModuleType, tmp_path: Path) -> None:
    files = []
    for number, rows in enumerate(({"a": {"peak_bytes": 1}}, {"a": {"failed": "no"}, "b": {"failed": "no"}})):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(_document(rows)))
    accuracy.merge(files, tmp_path / "measured" / "all.json")
    merged = json.loads((tmp_path / "measured" / "all.json").read_text())
    assert merged["cases"] == {"a": {"peak_bytes": 1}, "b": {"failed": "no"}}


@pytest.mark.slow
def test_small_cases_are_measured_on_any_machine(tmp_path: Path) -> None:
    names = ["gpt2 b64 micro 16 bf16", "unet b128 bf16"]
    options = ["--small", "--only", ",".join(names), "--out", str(tmp_path)]
    subprocess.run(
        [sys.executable, str(BENCHMARKS / "measure_cases.py"), *options],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
        timeout=300,
    )
    rows = json.loads((tmp_path / "cases.json").read_text())["cases"]
    assert list(rows) == names
    for row in rows.values():
        assert row["step_seconds"] > 0
        assert set(row["phase_seconds"]) == {"data", "forward", "backward", "optimizer"}
        assert row["steady_peak_bytes"] is None  # on a CPU


def _document(rows: dict[str, Any]) -> dict[str, Any]:
    return {"device": "H200", "torch": "2.11", "cases": rows}
