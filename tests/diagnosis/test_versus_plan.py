"""Plan against measured: the same kinds as the planner's calibration, the largest deviation first."""

from __future__ import annotations

import pytest
from made_up_runs import GIB, ON_GPU, STEP, run_with

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.versus_plan import measured_by, versus_plan
from gradus.planner.calibration import calibration_of, compared
from gradus.schema.prediction import MemoryPrediction, Prediction, StepPrediction

PREDICTED = Prediction(
    memory=MemoryPrediction(
        parameters=4 * GIB, gradients=4 * GIB, optimizer=8 * GIB, activations=10 * GIB, fragmentation=2 * GIB
    ),
    peak_at="the first backward",
    limit_bytes=140 * GIB,
    memory_error=0.05,
    step=StepPrediction(compute=0.045, optimizer=0.01, exposed_communication=0.002),
    tokens_per_second=40_000.0,
    samples_per_second=560.0,
    model_flops=1e12,
    hardware_flops=1e12,
    verdict="fits",
)


@pytest.fixture
def evidence(tmp_path) -> Evidence:
    rows = [{"step": n, "loss": 2.0, "samples_per_second": 280.0, "tokens_per_second": 20_000.0} for n in range(1, 41)]
    seconds = {**STEP, "data": 0.004, "checkpoint": 0.5}
    given = {"memory_peak_bytes": 28 * GIB, "memory_reserved_bytes": 31 * GIB}
    run = run_with(tmp_path, cluster=ON_GPU, gpu={}, prediction=PREDICTED, seconds=seconds, rows=rows, **given)
    return Evidence.of_run(run)


def test_every_kind_is_beside_its_prediction(evidence):
    lines = {line.kind: line for line in versus_plan(evidence)}
    assert lines["compute"].predicted == pytest.approx(0.045)
    assert lines["compute"].measured == pytest.approx(0.09)
    assert lines["compute"].ratio == pytest.approx(2.0)
    assert lines["optimizer"].ratio == pytest.approx(1.0)
    assert lines["optimizer"].why == "as predicted"
    assert lines["activations"].measured == 12 * GIB  # all that is not counted
    assert lines["fragmentation"].measured == 3 * GIB
    assert lines["tokens_per_second"].ratio == pytest.approx(0.5)


def test_saving_is_no_part_of_a_predicted_step(evidence):
    lines = {line.kind: line for line in versus_plan(evidence)}
    assert lines["total"].measured == pytest.approx(0.104)


def test_the_largest_deviation_comes_first_and_is_explained(evidence):
    first, *_ = versus_plan(evidence)
    assert first.kind == "total"
    assert first.why == "mostly compute: 0.045 s more than predicted"
    assert "plan --measure" in {line.kind: line for line in versus_plan(evidence)}["compute"].why


def test_what_nobody_measured_comes_last_and_says_so(evidence):
    last = versus_plan(evidence)[-1]
    assert last.measured is None
    assert "not measured" in last.why


def test_a_calibration_of_the_planner_is_made_of_the_same_numbers(evidence):
    measured = measured_by(evidence)
    assert measured is not None
    calibration = calibration_of(compared(PREDICTED, measured), measured, flops=1e12, speed_known=True)
    lines = {line.kind: line for line in versus_plan(evidence)}
    assert calibration.factors["compute"] == pytest.approx(lines["compute"].ratio)
    assert calibration.factors["activations"] == pytest.approx(lines["activations"].ratio)


def test_without_a_prediction_what_was_measured_stands_alone(tmp_path):
    lines = versus_plan(Evidence.of_run(run_with(tmp_path)))
    assert all(line.predicted is None and line.ratio is None for line in lines)
    assert {line.kind for line in lines} >= {"compute", "total", "exposed_communication"}


def test_without_timings_there_is_nothing_to_compare(tmp_path):
    run = run_with(tmp_path, prediction=PREDICTED)
    (run.path / "timings" / "rank-0.jsonl").unlink()
    assert versus_plan(Evidence.of_run(run)) == []
