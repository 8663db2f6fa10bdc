"""What people read of a benchmark: a table with the numbers that the document has."""

from __future__ import annotations

from gradus.bench.result import BenchResult
from gradus.cli.bench_device import print_device
from gradus.cli.bench_loader import print_loader
from gradus.cli.bench_replicas import print_replicas
from gradus.cli.bench_scaling import print_scaling
from gradus.cli.bench_storage import print_storage


def test_replicas_are_shown_against_one_with_what_was_not_measured(capsys):
    row = {"how": "taking turns", "spread": None, "memory_peak_bytes_each": None}
    rows = [
        {**row, "replicas": 1, "samples_per_second": 1000.0, "against_one": 1.0},
        {"replicas": 4, "how": "MPS", "samples_per_second": 2500.0, "spread": 0.02, "against_one": 2.5}
        | {"memory_peak_bytes_each": 2**30},
    ]
    print_replicas(BenchResult("replicas", "Replicas", {"unit": "img"}, rows, notes=("MPS was not measured.",)))
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["1", "taking", "turns", "1,000.0", "1.00×"]
    assert out[3].split() == ["4", "MPS", "2,500.0", "±1.0%", "2.50×", "1", "GiB"]
    assert out[4] == "MPS was not measured."


def test_a_device_is_shown_beside_what_is_quoted_and_what_is_missing_is_no_row(capsys):
    row = {"group": "matmul", "unit": "TFLOP/s", "spread": 0.01, "source": None, "note": None}
    rows = [
        {**row, "name": "bf16", "value": 709.2, "quoted": 989.0, "share": 0.717},
        {**row, "name": "fp8", "value": None, "quoted": None, "share": None},
    ]
    print_device(BenchResult("device", "What a GPU does", {}, rows, notes=("fp8: not measured: none here",)))
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["matmul", "bf16", "709.2", "TFLOP/s", "±0.5%", "989", "72%"]
    assert out[3] == "fp8: not measured: none here"


def test_loaders_that_were_left_out_say_why_and_the_best_is_named(capsys):
    rows = [
        {"micro_batch": 8, "workers": 0, "samples_per_second": 1234.0, "spread": 0.1, "first_batch_seconds": 0.123},
        {"micro_batch": 8, "workers": 2, "samples_per_second": None, "spread": None, "first_batch_seconds": None},
    ]
    summary = {"best_workers": 0, "micro_batch": 8, "plan_micro_batch": 16, "plan_workers": 2}
    summary["plan_workers_reason"] = "plan.workers"
    print_loader(BenchResult("loader", "Loading", {"data": "digits", "cores": 2}, rows, summary))
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["8", "0", "1,234", "±5%", "0.12"]
    assert "not tried" in out[3]
    assert out[4] == "best: plan.workers=0 with micro-batches of 8, which is nearest to the plan's 16"
    assert out[5] == "a run would use 2 (plan.workers)"


def test_storage_shows_both_folders_and_the_advice(capsys):
    row = {"spread": None, "samples_per_second": None, "against_sequential": None, "what": "sequential read"}
    rows = [{**row, "path": path, "megabytes_per_second": rate} for path, rate in (("a", 100.0), ("b", 200.0))]
    summary = {"file_system": "ext4", "advice": ["stage it"]}
    print_storage(BenchResult("storage", "Storage at a", {}, rows, summary, notes=("a note",)))
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["sequential", "read", "100"]
    assert out[3:5] == ["b", f"{'sequential read':<20}{200:>10}{'':>9}{'':>12}{'':>15}"]
    assert out[5:] == ["a note", "advice: stage it"]


def test_scaling_without_a_single_rank_has_no_fraction_of_one_row(capsys):
    row = {"how": "processes", "plus_minus": None, "amdahl_fraction": None}
    rows = [
        {**row, "ranks": 2, "samples_per_second": 100.0, "speed_up": 1.0, "efficiency": 1.0},
        {**row, "ranks": 4, "samples_per_second": 180.0, "speed_up": 1.8, "efficiency": 0.9},
    ]
    summary = {"ranks": 4, "baseline_ranks": 2, "speed_up": 1.8, "efficiency": 0.9, "amdahl_fraction": None}
    print_scaling(BenchResult("scaling", "Scaling", {"unit": "img", "device": "GPU"}, rows, summary))
    out = capsys.readouterr().out.splitlines()
    assert out[3].split() == ["4", "180.0", "1.80×", "90.0%"]
    assert out[4] == "1.80× on 4 GPUs against 2 GPUs: efficiency 90.0%"
    assert len(out) == 5
