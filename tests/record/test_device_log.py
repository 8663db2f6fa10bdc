"""Energy from the drivers' counters: known integrals, counters that fall, attempts, GPUs without a counter."""

from __future__ import annotations

import pytest

from gradus.record.device_log import DeviceLog, energy_between, energy_of, read_device_samples
from gradus.schema.device_sample import DeviceSample, GpuSample


def sample(time: float, *joules: float | None, attempt: int = 1, node: str = "n1") -> DeviceSample:
    gpus = tuple(GpuSample(index=i, uuid=f"GPU-{node}-{i}", energy_joules=one) for i, one in enumerate(joules))
    return DeviceSample(time=time, attempt=attempt, node=node, gpus=gpus)


def test_energy_is_the_difference_of_the_counters():
    found = energy_of([sample(0.0, 1000.0, 500.0), sample(2.0, 1400.0, 500.0), sample(4.0, 1800.0, 700.0)])
    assert found.joules == 1000.0
    assert found.by_gpu == {"GPU-n1-0": 800.0, "GPU-n1-1": 200.0}
    assert found.average_watts == 250.0
    assert found.per(500) == 2.0


def test_gpus_of_all_nodes_are_added_up():
    samples = [sample(0.0, 0.0), sample(0.1, 50.0, node="n2"), sample(2.0, 10.0), sample(2.1, 70.0, node="n2")]
    assert energy_of(samples).joules == 30.0


def test_what_a_gpu_took_between_attempts_is_not_the_runs():
    samples = [sample(0.0, 0.0), sample(2.0, 10.0), sample(100.0, 9000.0, attempt=2), sample(102.0, 9020.0, attempt=2)]
    found = energy_of(samples)
    assert found.joules == 30.0
    assert found.seconds == 4.0


def test_a_counter_that_falls_counts_from_there_on():
    assert energy_of([sample(0.0, 1000.0), sample(2.0, 1100.0), sample(4.0, 50.0), sample(6.0, 80.0)]).joules == 180.0


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [sample(0.0, 100.0)],
        [sample(0.0), sample(2.0)],
        [sample(0.0, None), sample(2.0, None)],
        [sample(0.0, 0.0, None), sample(2.0, 10.0, None)],  # a part of the GPUs is no answer
        [DeviceSample(time=t, attempt=1, node="n1") for t in (0.0, 2.0)],
    ],
)
def test_without_a_counter_energy_is_unknown_and_never_zero(samples):
    found = energy_of(samples)
    assert found.joules is None
    assert found.average_watts is None
    assert found.per(10) is None


def test_energy_of_a_part_of_an_attempt_takes_power_as_even_between_samples():
    samples = [sample(0.0, 0.0), sample(2.0, 200.0), sample(4.0, 600.0)]
    assert energy_between(samples, {1: (1.0, 3.0)}).joules == pytest.approx(100.0 + 200.0)
    assert energy_between(samples, {1: (-5.0, 50.0)}).joules == pytest.approx(600.0)
    assert energy_between(samples, {2: (0.0, 4.0)}).joules is None


def test_samples_are_read_by_time_and_what_is_none_stays_none(run):
    for node, times in (("n1", (1.0, 3.0)), ("n2", (2.0,))):
        log = DeviceLog(run, node)
        for time in times:
            log.write(sample(time, None, node=node))
        assert log.close() == []
    with (run.path / "devices" / "n1.jsonl").open("a") as file:
        file.write('{"time": 9.0, "atte')
    found = read_device_samples(run)
    assert [(one.time, one.node) for one in found] == [(1.0, "n1"), (2.0, "n2"), (3.0, "n1")]
    assert found[0].gpus is not None
    assert found[0].gpus[0].energy_joules is None
    assert found[0].host.cpu_utilisation is None
    assert read_device_samples(run, attempt=2) == []
