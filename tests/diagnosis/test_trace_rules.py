"""What is said of a trace alone, and of a run together with its traces. Traces are made up, in microseconds."""

from __future__ import annotations

import json
from pathlib import Path

from made_up_runs import ON_GPU, run_with
from synthetic_traces import ADD, ALL_REDUCE, GEMM, TALK, Trace
from typer.testing import CliRunner

from gradus.cli.main import app
from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import explain


def busy_steps(*, waits_for_data: int = 0, kernel: str = GEMM) -> Trace:
    """Three steps of a millisecond that compute all the time, but for what a test wants."""
    trace = Trace()
    for start in range(0, 3000, 1000):
        trace.step(start, start + 1000)
        if waits_for_data:
            trace.mark("gradus:data", start, start + waits_for_data)
        trace.kernel(kernel, start + waits_for_data, start + 1000, launched=start)
    return trace


def first_of(trace: Trace, folder: Path) -> str | None:
    found = explain(Evidence.of_trace(trace.write(folder / "trace.json.gz"))).findings
    return found[0].id if found else None


def test_a_trace_that_computes_all_the_time_has_no_finding(tmp_path):
    assert first_of(busy_steps(), tmp_path) is None


def test_a_trace_that_waits_for_samples(tmp_path):
    assert first_of(busy_steps(waits_for_data=400), tmp_path) == "data-bound"


def test_a_trace_that_exchanges_without_computing(tmp_path):
    trace = Trace()
    trace.step(0, 1000)
    trace.kernel(GEMM, 0, 600, launched=0)
    trace.kernel(ALL_REDUCE, 500, 1000, launched=10, stream=TALK)
    assert first_of(trace, tmp_path) == "exposed-communication"


def test_a_trace_of_tiny_kernels(tmp_path):
    trace = Trace()
    trace.step(0, 1000)
    for start in range(0, 1000, 10):
        trace.op("aten::add", start, start + 9)
        trace.kernel(ADD, start + 7, start + 10, launched=start + 5)
    assert first_of(trace, tmp_path) == "small-kernels"


def test_a_trace_of_matrix_products_in_fp32(tmp_path):
    assert first_of(busy_steps(kernel="ampere_sgemm_128x64_nn"), tmp_path) == "no-tensor-cores"


def test_a_run_in_fp32_is_told_so_once(tmp_path):
    run = run_with(tmp_path, cluster=ON_GPU, gpu={}, plan={"precision": "fp32"})
    (run.path / "traces").mkdir()
    busy_steps(kernel="ampere_sgemm_128x64_nn").write(run.path / "traces" / "attempt-1-rank-0-steps-1-3.json.gz")
    assert [one.id for one in explain(Evidence.of_run(run)).findings] == ["fp32"]


def test_a_trace_that_was_cut_off_is_used_as_far_as_it_goes(tmp_path):
    whole = busy_steps(waits_for_data=400).text
    (tmp_path / "trace.json").write_text(whole[: int(len(whole) * 0.8)])
    said = CliRunner().invoke(app, ["explain", str(tmp_path / "trace.json"), "--json"])
    assert said.exit_code == 0, said.stdout
    document = json.loads(said.stdout)
    assert document["findings"][0]["id"] == "data-bound"
    assert any("cut off" in line for line in document["not_measured"])
    assert document["trace"].endswith("trace.json")
