"""The benchmark against peers: it runs on any machine, compares equal things, and its table tells what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in set(sys.modules) - before:
        if name.startswith("peer_") or name in ("gpu_fp8", "kernel_times"):
            del sys.modules[name]


def written(
    contestants: dict[str, dict[str, Any]], absent: list[str], *, less_is_better: bool = False
) -> dict[str, Any]:
    """What the benchmark writes down, with one work."""
    empty = {"peak_gib": None, "clocks": [], "loss_gap": None, "problem": None}
    work = {
        "title": "a work",
        "unit": "steps/s",
        "goal": "≥ 1.5×",
        "less_is_better": less_is_better,
        "flops_of_a_unit": None,
        "absent": absent,
        "contestants": {name: {**empty, **found} for name, found in contestants.items()},
    }
    packages = dict.fromkeys(("torch", "lightning", "accelerate", "transformers"), "1.0")
    return {"date": "2026-11-16", "device": "CPU", "rounds": 3, **packages, "works": [work]}


def test_the_best_peer_counts_and_the_absent_are_named(benchmarks: None) -> None:
    from peer_table import table

    figures = {"raw": [9.0, 10.0, 12.0], "accelerate": [20.0], "gradus": [30.0]}
    row = table([written({name: {"figures": found} for name, found in figures.items()}, ["fabric"])]).splitlines()[-1]
    assert row == "| a work, steps/s | 10 ± 1.5 | absent | 20 ± 0 | 30 ± 0 | 1.500 (accelerate) |  |  |  | ≥ 1.5× |"


def test_each_work_has_the_columns_of_all_works(benchmarks: None) -> None:
    from peer_table import table

    first, second = written({"raw": {"figures": [10.0]}}, []), written({"gradus-lean": {"figures": [30.0]}}, [])
    header, _, *rows = table([first, second]).splitlines()[-4:]
    assert header.startswith("| work | raw | gradus-lean | gradus / best peer |")
    assert [row.split("|")[2:4] for row in rows] == [[" 10 ± 0 ", "  "], ["  ", " 30 ± 0 "]]


def test_both_of_ours_are_compared_in_speed_and_in_memory(benchmarks: None) -> None:
    from peer_table import table

    found = {
        "raw": {"figures": [10.0], "peak_gib": 20.0},
        "gradus": {"figures": [12.0], "peak_gib": 15.0, "loss_gap": 0.0},
        "gradus-lean": {"figures": [11.0], "peak_gib": 10.0, "loss_gap": 0.001},
    }
    row = table([written(found, [])]).splitlines()[-1]
    assert "| 1.200, 1.100 (raw) | 0.75, 0.50 (15.0, 10.0 / 20.0 GiB) |  | 0.00%, 0.10% |" in row


def test_of_times_the_shortest_is_the_best(benchmarks: None) -> None:
    from peer_table import table

    found = {"raw": {"figures": [40.0]}, "accelerate": {"figures": [50.0]}, "gradus": {"figures": [20.0]}}
    assert "| 0.500 (raw) |" in table([written(found, [], less_is_better=True)])


def test_a_contestant_that_fails_is_told_and_not_compared(benchmarks: None) -> None:
    from peer_table import table

    failed = {"figures": [], "problem": "OutOfMemoryError: too large"}
    row = table([written({"raw": {"figures": [10.0]}, "gradus": failed}, [])]).splitlines()[-1]
    assert row == "| a work, steps/s | 10 ± 0 | OutOfMemoryError: too large |  |  |  |  | ≥ 1.5× |"


def test_losses_are_compared_at_the_steps_that_both_have(benchmarks: None) -> None:
    from peer_table import running_mean_gap

    reference = dict.fromkeys(range(1, 101), 4.0)
    assert running_mean_gap(reference, {10: 4.0, 20: 4.0, 101: 99.0}) == 0.0
    assert running_mean_gap(reference, reference | {50: 5.0}) == pytest.approx(0.25 / 20)
    assert running_mean_gap(reference, {101: 4.0}) is None


def test_what_kernels_do_not_take_of_a_step_the_device_did_nothing(benchmarks: None) -> None:
    from kernel_times import kind_of
    from peer_table import roofline

    kernels = {kind_of("nvjet_sm90_tst_192x192"): 0.2, kind_of("triton_poi_fused_add_0"): 0.1}
    document = written(
        {"raw": {"figures": [4.0, 2.0, 3.0], "kernels": {"by_kind": kernels}}, "gradus": {"figures": [9.0]}}, []
    )
    document["works"][0]["units_of_a_step"] = 1.5
    first, _, *rows = roofline([document]).splitlines()
    assert first == "| work | contestant | step, ms | matrix products | memory-bound | nothing |"
    assert rows == ["| a work | raw | 500 | 200 | 100 | 200 |"]


def test_what_is_not_installed_is_known(benchmarks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from peer_contestants import CONTESTANTS

    monkeypatch.setattr(CONTESTANTS["fabric"], "package", "no_such_package")
    assert CONTESTANTS["raw"].is_installed()
    assert not CONTESTANTS["fabric"].is_installed()


@pytest.mark.slow
def test_all_contestants_train_the_same(tmp_path: Path) -> None:
    """One model of our own and one of transformers: losses at equal steps are those of the raw loop."""
    command = [sys.executable, str(BENCHMARKS / "versus_peers.py"), "--small", "--out", str(tmp_path), "--rounds", "1"]
    done = subprocess.run([*command, "--only", "gpt2", "hf-llama-1b"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    works = json.loads((tmp_path / "versus_peers.json").read_text())["works"]
    assert [work["key"] for work in works] == ["gpt2", "hf-llama-1b"]
    for work in works:
        contestants = work["contestants"]
        assert {"raw", "gradus"} <= set(contestants)
        wanted = contestants["raw"]["losses"]
        # Far apart for what is held equal here: other samples have other losses.
        assert max(wanted.values()) / min(wanted.values()) > 1 + 1e-4
        for found in contestants.values():
            assert found["problem"] is None
            assert found["figures"][0] > 0
            assert found["losses"] == pytest.approx(wanted, rel=1e-5)
