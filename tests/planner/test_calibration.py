"""Measured steps become factors, and predictions with these factors are what was measured."""

from __future__ import annotations

import pytest
from predicted_choices import GIB, prediction

from gradus.planner.calibration import (
    Measured,
    calibration_basis,
    calibration_of,
    compared,
    corrected_memory,
    step_at_achieved_rate,
)
from gradus.schema.calibration import Calibration
from gradus.schema.cluster import Cluster
from gradus.schema.prediction import StepPrediction

PREDICTED = prediction(step=StepPrediction(compute=1.2, recompute=0.3, optimizer=0.05))
MEASURED = Measured(
    device="NVIDIA H200",
    software="torch 2.13.0",
    steps=20,
    seconds=1.79,
    compute_seconds=1.65,
    optimizer_seconds=0.04,
    data_seconds=0.1,
    allocated_bytes=66 * GIB,  # 64 were predicted, 10 of them activations and logits
    reserved_bytes=67 * GIB,
    context_bytes=GIB,
)


def factors() -> Calibration:
    return calibration_of(compared(PREDICTED, MEASURED), MEASURED, 1e15, speed_known=True)


def test_factors_are_measured_over_predicted_by_kind():
    found = factors()
    assert found.factors == {
        "compute": 1.1,
        "recompute": 1.1,
        "optimizer": 0.8,
        "activations": 1.2,
        "logits": 1.2,
        "fragmentation": 2.0,
        "device_context": 2.0,
    }
    assert (found.device, found.software, found.flops_per_second) == ("NVIDIA H200", "torch 2.13.0", None)
    assert found.date is not None


def test_a_prediction_with_its_own_factors_is_what_was_measured():
    step, factor = PREDICTED.step, factors().factor
    computed = step.compute * factor("compute") + step.recompute * factor("recompute")
    assert computed == pytest.approx(MEASURED.compute_seconds)
    assert step.optimizer * factor("optimizer") == pytest.approx(MEASURED.optimizer_seconds)
    memory = corrected_memory(PREDICTED.memory, factors())
    assert memory.tensors == pytest.approx(MEASURED.allocated_bytes)
    assert memory.device_context == MEASURED.context_bytes


def test_without_factors_nothing_changes():
    assert corrected_memory(PREDICTED.memory, Calibration()) == PREDICTED.memory


def test_what_cannot_be_a_correction_is_shown_and_not_used():
    """A step that took a hundred times as long as predicted was another step."""
    slow = Measured("NVIDIA H200", "torch", 3, 200.0, 150.0, 0.04, 0.0, allocated_bytes=50 * GIB)
    lines = {line.kind: line for line in compared(PREDICTED, slow)}
    assert lines["compute"].factor is None
    assert lines["compute"].measured == 150
    assert lines["activations"].factor is None, "less was measured than is certainly there"
    assert lines["step"].factor is None


def test_a_device_of_unknown_speed_gets_its_achieved_rate():
    unknown = prediction(step=None)
    measured = Measured("A CPU", "torch 2.13.0", 5, 2.5, 2.0, 0.4, 0.1)
    found = calibration_of(compared(unknown, measured), measured, 1e12, speed_known=False)
    assert (found.factors, found.flops_per_second) == ({}, 4.167e11)
    assert step_at_achieved_rate(1e12, found).total == pytest.approx(2.4, rel=0.001), "its optimizer and all"
    assert step_at_achieved_rate(1e12, Calibration()) is None
    assert step_at_achieved_rate(1e12, found, ranks=4).total == pytest.approx(9.6, rel=0.001), "four share the node"


def test_a_prediction_says_whether_it_is_calibrated():
    plain = Cluster(name="site", cpu_cores=8, memory_gib=16)
    assert "Not calibrated" in calibration_basis(plain)[0]
    bare = plain.model_copy(update={"calibration": Calibration(factors={"compute": 1.5})})
    assert calibration_basis(bare) == ["Calibrated, the cluster file does not say on what: compute × 1.5."]
    said = calibration_basis(plain.model_copy(update={"calibration": factors()}))[0]
    assert said.startswith("Calibrated on NVIDIA H200, torch 2.13.0, ")
    assert "compute × 1.1" in said
