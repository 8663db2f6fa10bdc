"""What `gradus runs RUN` says about time and energy."""

from __future__ import annotations

import pytest

from gradus.record.append_log import AppendLog
from gradus.record.costs import NO_COUNTER, NO_DRIVER, NOT_SAMPLED, costs_of
from gradus.record.device_log import DeviceLog
from gradus.record.timings import TimingLog
from gradus.schema.breakdown import Breakdown
from gradus.schema.device_sample import DeviceSample, GpuSample


def timed(run, *lines: tuple[int, float, float]) -> None:
    """Lines of rank 0: step, time, and seconds of data; forward is a second."""
    log = TimingLog(run, 0)
    before = 0
    for step, time, data in lines:
        log.write(
            Breakdown(
                time=time,
                attempt=1,
                rank=0,
                node="n1",
                step=step,
                steps=step - before,
                measured_steps=1,
                step_seconds=1.0 + data,
                seconds={"data": data, "forward": 1.0},
            )
        )
        before = step
    log.close()


def logged(run, *steps: int, batch: int = 10, tokens: int | None = None) -> None:
    log = AppendLog(run.metrics_path)
    for step in steps:
        samples = step * batch
        log.write({"step": step, "attempt": 1, "samples": samples, "tokens": samples * tokens if tokens else None})
    log.close()


def sampled(run, *readings: tuple[float, float | None], gpus: bool = True) -> None:
    log = DeviceLog(run, "n1")
    for time, joules in readings:
        found = (GpuSample(index=0, uuid="GPU-1", energy_joules=joules),) if gpus else None
        log.write(DeviceSample(time=time, attempt=1, node="n1", gpus=found))
    log.close()


def test_the_first_step_does_not_count_where_there_are_others(run):
    timed(run, (1, 10.0, 9.0), (11, 20.0, 1.0))
    found = costs_of(run)
    assert found.step_seconds == 2.0
    assert (found.seconds["data"], found.seconds["forward"]) == (1.0, 1.0)
    assert any("data" in line and "50.0%" in line for line in found.lines())


def test_joules_for_a_sample_are_those_of_the_time_in_which_it_was_trained(run):
    timed(run, (1, 100.0, 0.0), (11, 110.0, 0.0))
    logged(run, 1, 11, tokens=5)
    # 1000 J before the first step, 100 W while training, 1000 J after it.
    sampled(run, (90.0, 0.0), (100.0, 1000.0), (110.0, 2000.0), (120.0, 3000.0))
    found = costs_of(run)
    assert found.energy.joules == 3000.0
    assert found.joules_per_sample == pytest.approx(1000 / 100)
    assert found.joules_per_token == pytest.approx(1000 / 500)
    assert found.document()["joules_per_sample"] == pytest.approx(10.0)
    assert found.lines()[-1] == "energy  3 kJ (100 W on average), per sample 10 J, per token 2 J"


@pytest.mark.parametrize(
    ("readings", "gpus", "why"),
    [((), True, NOT_SAMPLED), (((1.0, None),), False, NO_DRIVER), (((1.0, None), (2.0, None)), True, NO_COUNTER)],
)
def test_energy_that_nobody_counted_is_unavailable_and_never_zero(run, readings, gpus, why):
    sampled(run, *readings, gpus=gpus)
    found = costs_of(run)
    assert found.document()["energy_joules"] is None
    assert found.document()["joules_per_sample"] is None
    assert found.lines() == [f"energy  unavailable: {why}"]


def test_a_script_without_metrics_has_energy_but_none_for_a_sample(run):
    sampled(run, (0.0, 0.0), (10.0, 50.0))
    found = costs_of(run)
    assert (found.energy.joules, found.joules_per_sample) == (50.0, None)
    assert "per sample unavailable" in found.lines()[-1]
