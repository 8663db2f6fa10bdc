"""The clock of a step: every second belongs to one kind, of the host's and of those of a device that runs behind."""

from __future__ import annotations

import pytest
import torch

from gradus.faults import own_time
from gradus.faults.own_time import OwnTime
from gradus.faults.whereabouts import Whereabouts


class Machine:
    """A host and a device that works through what the host gives it; both clocks are ours."""

    def __init__(self) -> None:
        self.now = 100.0  # the host's
        self.free_at = 0.0  # when the device will have done everything
        self.events = 0

    def host(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds

    def event(self) -> Event:
        self.events += 1
        return Event(self, max(self.free_at, self.now))

    def drain(self) -> None:
        self.now = max(self.now, self.free_at)


class Event:
    def __init__(self, machine: Machine, at: float) -> None:
        self._machine, self.at = machine, at

    def query(self) -> bool:
        return self.at <= self._machine.now

    def elapsed_time(self, later: Event) -> float:
        return (later.at - self.at) * 1000


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(own_time.time, "monotonic", lambda: made.now)
    monkeypatch.setattr(OwnTime, "_event", lambda own: made.event())
    return made


def clock(device: str) -> OwnTime:
    own = OwnTime(Whereabouts(), torch.device("cpu"))
    own.on_gpu = device == "cuda"
    own.start()
    return own


def one_step(own: OwnTime, machine: Machine, step: int, *, fetch: float, compute: float) -> None:
    """The host waits for data, launches a step that takes the device a while, and goes on at once."""
    own.where.enter("data")
    machine.host(fetch)
    with own.inside("host_to_device"):
        machine.host(0.0)
    own.where.enter("forward-backward")
    machine.launch(compute / 4)
    with own.backward():
        machine.launch(compute / 2)
    own.where.enter("optimizer")
    machine.launch(compute / 4)
    own.stepped(step, fetch)
    own.where.stepped(step)


def test_every_second_of_a_step_belongs_to_one_kind(machine):
    own = clock("cpu")
    machine.host(1.0)
    own.where.enter("data")
    machine.host(2.0)
    own.where.enter("forward-backward")
    machine.host(3.0)
    with own.waiting():
        machine.host(4.0)
    with own.backward():
        machine.host(5.0)
        with own.waiting(), own.waiting():
            machine.host(6.0)
    own.where.enter("optimizer")
    machine.host(7.0)
    own.where.enter("saving")
    machine.host(8.0)
    with own.waiting():  # a save is a save, also where it waits for other ranks
        machine.host(1.0)
    own.where.enter("evaluating")
    with own.inside("host_to_device"):
        machine.host(10.0)
    own.where.enter("between-steps")
    own.stepped(1, 2.0)
    own.close()
    [times] = own.ended_until(1)
    assert times.host == {
        "data": 2.0,
        "host_to_device": 0.0,
        "forward": 3.0,
        "backward": 5.0,
        "exposed_communication": 10.0,
        "optimizer": 7.0,
        "checkpoint": 9.0,
        "evaluation": 10.0,
        "other": 1.0,
    }
    assert own._recent[-1] == (18.0, 2.0), "the rank itself: no waits, no saves, no evaluations"


def test_after_its_last_gradient_a_backward_pass_waits_until_its_end(machine):
    own = clock("cpu")
    own.where.enter("forward-backward")
    with own.backward():
        machine.host(1.0)
        own._on_last_gradient(torch.zeros(()))
        machine.host(2.0)
        with own.waiting():
            machine.host(3.0)
        machine.host(4.0)
        assert own.where.waiting_since is None or own.where.waiting_since > 0
    assert own.where.waiting_since is None
    own.stepped(1, 0.0)
    own.close()
    [times] = own.ended_until(1)
    assert (times.host["backward"], times.host["exposed_communication"]) == (1.0, 9.0)


def test_steps_are_handed_out_once_and_only_those_that_are_asked_for(machine):
    own = clock("cpu")
    for step in (1, 2, 3):
        machine.host(1.0)
        own.stepped(step, 0.0)
    own.close()
    assert [times.step for times in own.ended_until(2)] == [1, 2]
    assert [times.step for times in own.ended_until(3)] == [3]


@pytest.mark.parametrize("in_detail", [True, False])
def test_a_wait_for_data_costs_nothing_while_the_device_is_busy(machine, monkeypatch, in_detail):
    monkeypatch.setattr(own_time, "FIRST_GPU_STEPS", 3 if in_detail else 0)
    own = clock("cuda")
    one_step(own, machine, 1, fetch=0.0, compute=1.0)
    one_step(own, machine, 2, fetch=0.5, compute=1.0)  # the device still works on the first
    machine.drain()
    own.close()
    first, second = own.ended_until(2)
    assert (first.fetching, second.fetching) == (0.0, 0.0)
    assert second.host["data"] == 0.5


@pytest.mark.parametrize("in_detail", [True, False])
def test_a_wait_for_data_costs_what_the_device_idled(machine, monkeypatch, in_detail):
    monkeypatch.setattr(own_time, "FIRST_GPU_STEPS", 3 if in_detail else 0)
    own = clock("cuda")
    one_step(own, machine, 1, fetch=0.0, compute=1.0)
    one_step(own, machine, 2, fetch=3.0, compute=1.0)
    machine.drain()
    own.close()
    _, second = own.ended_until(2)
    assert second.fetching == pytest.approx(2.0), "of three seconds, the device worked for one"


def test_events_of_a_measured_step_add_up_to_what_the_device_took(machine):
    own = clock("cuda")
    one_step(own, machine, 1, fetch=2.0, compute=4.0)
    own.settle()
    assert own.measured() == [], "the device has not come so far: nobody waits for it"
    machine.drain()
    own.settle()
    [found] = own.measured()
    own.close()
    assert found["data"] == pytest.approx(2.0)
    assert (found["forward"], found["backward"], found["optimizer"]) == pytest.approx((1.0, 2.0, 1.0))
    assert sum(found.values()) == pytest.approx(6.0)


def test_the_usual_step_on_a_gpu_records_two_events(machine):
    own = clock("cuda")
    counts = []
    for step in range(1, 31):
        before = machine.events
        one_step(own, machine, step, fetch=0.001, compute=0.01)
        counts.append(machine.events - before)
    own.close()
    assert sorted(counts)[: len(counts) // 2] == [2] * 15
    assert sum(count > 3 for count in counts) == own_time.FIRST_GPU_STEPS + 30 // own_time.GPU_STEPS


def test_a_save_that_waits_until_the_device_has_done_its_step_is_not_charged_for_it(machine):
    own = clock("cuda")
    one_step(own, machine, 1, fetch=0.0, compute=5.0)
    own.where.enter("saving")
    with own.waiting_for_device():
        machine.drain()
    machine.host(2.0)
    own.where.elsewhere()
    own.elsewhere()
    own.close()
    assert own.since_last_step()["checkpoint"] == pytest.approx(2.0)
