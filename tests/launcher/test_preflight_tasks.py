"""A preflight with real tasks: here, and on machines whose links are slow or cut, or whose folder is another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from separate_networks import INTERFACE, Networks, separate_networks

from gradus.launcher.preflight import hub as hub_module
from gradus.launcher.preflight.facts import active_ports
from gradus.launcher.preflight.hub import Hub, Member
from gradus.launcher.preflight.node import alone
from gradus.launcher.preflight.report import Preflight
from gradus.launcher.preflight.slurm_task import task_of
from gradus.launcher.preflight.starting import Asked, run_preflight
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError

TASK = Path(__file__).parent.parent / "preflight_task.py"
NAMES = ["n1", "n2", "n3", "n4"]
CLUSTER = {"name": "c", "nodes": 4, "cpu_cores": 1, "memory_gib": 1.0, "network": {"interface": INTERFACE}}


def test_this_machine_by_itself_is_fit_and_nothing_is_left_behind(tmp_path):
    found = alone(tmp_path, None)
    assert found.fit, found.lines()
    assert {finding.check for finding in found.findings} >= {"nodes", "versions", "memory", "space", "shared folder"}
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path):
    [error] = alone(tmp_path / "missing", None).errors
    assert error.check == "shared folder"
    assert "No such file or directory" in error.text


def test_more_nodes_than_this_machine_need_slurm(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(InputError, match="no Slurm here"):
        run_preflight(Asked(None, 2, tmp_path / "runs"), print)
    assert not (tmp_path / "runs").exists()


def test_clocks_are_compared_by_round_trips(monkeypatch):
    hub = Hub(1, "key", 0, time.monotonic() + 30)
    answer = hub._answer
    ahead = 40.0
    monkeypatch.setattr(
        hub, "_answer", lambda index, question: {k: v + ahead for k, v in answer(index, question).items()}
    )
    member = Member.connected(("127.0.0.1",), hub.port, 0, "key", time.monotonic() + 30)
    clock = member.clock()
    hub.close()
    assert clock.offset_seconds == pytest.approx(ahead, abs=clock.uncertainty_seconds + 1e-3)


def test_the_hub_does_not_leave_before_a_report_is_answered(monkeypatch):
    hub = Hub(1, "key", 0, time.monotonic() + 30)
    answer, may_answer = hub._answer, threading.Event()

    def later(index: int, question: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] == "report":
            may_answer.wait(30)
        return answer(index, question)

    monkeypatch.setattr(hub, "_answer", later)
    member = Member.connected(("127.0.0.1",), hub.port, 0, "key", time.monotonic() + 30)
    member.join({}, 30)
    reporting = threading.Thread(target=member.report, args=({"fit": True},))
    reporting.start()
    hub.wait_for_reports(time.monotonic() + 0.3)
    assert hub.reports == {}
    may_answer.set()
    hub.wait_for_reports(time.monotonic() + 30)
    assert hub.reports == {0: {"fit": True}}
    reporting.join(30)
    hub.close()


def test_a_stranger_who_answers_is_not_the_hub(monkeypatch):
    monkeypatch.setattr(
        hub_module, "PORTS", 1
    )  # whoever listens at the ports after it has a way of their own to say no
    hub = Hub(1, "another key", 0, time.monotonic() + 30)
    with pytest.raises(OSError, match="closed the connection"):
        Member.connected(("127.0.0.1",), hub.port, 0, "key", time.monotonic() + 0.2)
    hub.close()


def test_a_task_finds_its_place_in_slurms_variables(tmp_path):
    variables = {
        "SLURM_JOB_ID": "12",
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NODELIST": "gpu[07-09]",
        "SLURM_NODEID": "2",
        "SLURM_LAUNCH_NODE_IPADDR": "10.1.2.3",
    }
    first, third = (task_of(tmp_path, None, {**variables, "SLURM_NODEID": number}) for number in "02")
    assert third.names == ("gpu07", "gpu08", "gpu09")
    assert third.index == 2
    assert third.hub == ("gpu07", "10.1.2.3")
    assert (first.key, first.port) == (third.key, third.port)
    again = task_of(tmp_path, None, {**variables, "SLURM_RESTART_COUNT": "1"})
    assert again.key != third.key


def test_active_ports_are_read_from_the_kernel(tmp_path):
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        for name, text in (("state", state), ("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)")):
            (port / name).write_text(text + "\n")
    assert active_ports(tmp_path) == ("mlx5_0:1/InfiniBand 400 Gb/sec (4X NDR)",)


@pytest.fixture
def networks() -> Iterator[Networks]:
    if os.geteuid() != 0:
        pytest.skip("only root can make networks")
    with separate_networks(len(NAMES)) as networks:
        yield networks


def preflight(networks: Networks, folders: list[Path], *, absent: int | None = None, seconds: float = 240) -> Preflight:
    """All tasks, each on a machine of its own; the machine is busy, so that they get more time than a user would."""
    tasks: list[subprocess.Popen[str]] = []
    for index in range(len(NAMES)):
        given: dict[str, Any] = {
            "index": index,
            "names": NAMES,
            "hub": [networks.address(0)],
            "port": 15000,
            "folder": str(folders[index]),
            "cluster": CLUSTER,
            "seconds": seconds,
        }
        if index != absent:
            command = [*networks.inside(index), sys.executable, str(TASK), json.dumps(given)]
            # Slurm's name for a node, which the machines of this test do not have as a host name.
            variables = {**os.environ, "SLURMD_NODENAME": NAMES[index]}
            tasks.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables))
    out = [task.communicate(timeout=seconds + 60)[0] for task in tasks]
    assert out[1:] == [""] * (len(tasks) - 1)
    return Preflight.of(json.loads(out[0]))


@pytest.mark.slow
def test_good_machines_are_fit(networks, tmp_path):
    found = preflight(networks, [tmp_path] * 4)
    assert found.fit, found.lines()
    assert {finding.check for finding in found.findings} >= {"clocks", "connections", "pairs", "all-reduce"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_slow_machine_is_named_by_what_its_pairs_reach(networks, tmp_path):
    networks.slow(2, "30mbit")
    found = preflight(networks, [tmp_path] * 4)
    assert [(error.check, error.nodes) for error in found.errors] == [("pairs", ("n3",))], found.lines()


@pytest.mark.slow
def test_a_cut_link_and_a_folder_of_its_own_are_named(networks, tmp_path):
    (tmp_path / "other").mkdir()
    networks.cut(1, 3)
    found = preflight(networks, [tmp_path, tmp_path, tmp_path / "other", tmp_path])
    assert {(error.check, error.nodes, error.link) for error in found.errors} == {
        ("connections", (), ("n2", "n4")),
        ("shared folder", ("n3",), None),
    }, found.lines()


@pytest.mark.slow
def test_a_machine_that_does_not_come_is_named_and_the_others_go_on(networks, tmp_path):
    found = preflight(networks, [tmp_path] * 4, absent=1, seconds=60)
    assert found.bad_nodes == ("n2",), found.lines()


def test_the_cluster_of_these_tests_is_one():
    assert Cluster(**CLUSTER).network.interface == INTERFACE
