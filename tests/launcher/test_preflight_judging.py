"""From what nodes say to findings: each problem is named with its node or link, and a healthy set of nodes is fit."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest

from gradus.launcher.preflight.judging import judged
from gradus.launcher.preflight.report import Finding, Preflight, read_report, write_report
from gradus.schema.cluster import Cluster

NAMES = ("n1", "n2", "n3", "n4")
GIB = 2**30


def facts(node: str, **changes: Any) -> dict[str, Any]:
    number = int(node[1:])
    space = {
        name: {"path": f"/{name}", "free_bytes": 500 * GIB, "total_bytes": 900 * GIB}
        for name in ("shared", "local", "shm")
    }
    return {
        "node": node,
        "host": f"host-{node}",
        "identity": f"boot-{node}",
        "address": f"10.0.0.{number}",
        "address_of": f"host name {node}",
        "address_problem": None,
        "versions": {"python": "3.11.7", "torch": "2.13.0", "NVIDIA driver": "570.1"},
        "cores": 64,
        "memory_bytes": 512 * GIB,
        "memory_available_bytes": 500 * GIB,
        "space": space,
        "driver": "570.1",
        "gpus": 2,
        "gpu_names": ["NVIDIA H100 80GB HBM3"] * 2,
        "gpu_problems": [],
        "gpu_ecc": [True, True],
        "gpu_celsius": [40, 42],
        "fabric": ["mlx5_0:1/InfiniBand 400 Gb/sec (4X NDR)"],
    } | changes


def rows(wrong: int = 0, intra: float = 360.0) -> list[dict[str, Any]]:
    row = {"operation": "all-reduce", "dtype": "float32", "bytes": 64 << 20, "ranks": 8, "seconds": 1e-3, "wrong": 0}
    numbers = {"algorithm_gb_per_second": 1.0, "bus_gb_per_second": intra}
    check = {**row, **numbers, "where": "check", "wrong": wrong}
    return [check, {**row, **numbers, "where": "node"}, {**row, **numbers, "where": "world", "bus_gb_per_second": 45.0}]


def healthy() -> dict[int, dict[str, Any]]:
    """What four good nodes with two GPUs each say."""
    reports = {}
    for index, name in enumerate(NAMES):
        others = [other for other in range(len(NAMES)) if other != index]
        rank = {"stage": "done", "backend": "nccl", "rows": rows(), "pairs": [[other, 24.0] for other in others]}
        reports[index] = {
            "facts": facts(name),
            "clock": {"offset_seconds": 0.0001 * index, "uncertainty_seconds": 0.0001},
            "unreachable": {},
            "shared": {"path": "/shared/runs", "problem": None, "seen_seconds": 0.02, "unseen": []},
            "ranks": [{**rank, "rank": 2 * index}, {**rank, "rank": 2 * index + 1}],
            "nccl": {
                "network": "IB",
                "devices": ["mlx5_0:1/IB"],
                "channels": {"NET/IB": 4},
                "reasons": [],
                "over_sockets": False,
            },
        }
    return copy.deepcopy(reports)


CLUSTER = Cluster(
    name="c",
    nodes=4,
    gpus_per_node=2,
    gpu="H100-SXM",
    cpu_cores=64,
    memory_gib=512,
    links={"intra": "NVLink 4", "inter": "InfiniBand NDR"},  # type: ignore[arg-type]
)


def judge(reports: dict[int, dict[str, Any]], cluster: Cluster | None = CLUSTER) -> Preflight:
    return judged(NAMES, reports, cluster, 12.0)


def the_error(found: Preflight, check: str) -> Finding:
    errors = [finding for finding in found.errors if finding.check == check]
    assert len(errors) == 1, found.lines()
    return errors[0]


def test_healthy_nodes_are_fit_and_every_number_has_its_promise():
    found = judge(healthy())
    assert found.fit, found.lines()
    assert not [finding for finding in found.findings if finding.state != "ok"], found.lines()
    pairs = next(finding for finding in found.findings if finding.check == "pairs")
    assert (pairs.measured, pairs.promised, pairs.unit) == (48.0, 50.0, "GB/s")  # two ranks a node, one port of NDR


def test_a_silent_node_is_named():
    reports = healthy()
    del reports[2]
    found = judge(reports)
    assert the_error(found, "nodes").nodes == ("n3",)
    assert found.bad_nodes == found.exclude == ("n3",)


def test_when_nobody_answers_all_are_named_and_none_can_be_left_out():
    found = judge({})
    assert found.bad_nodes == NAMES
    assert found.exclude == ()


@pytest.mark.parametrize(("seconds", "state"), [(2.0, "warning"), (-40.0, "error")])
def test_a_clock_that_is_off_is_named_even_if_it_is_the_first_nodes_own(seconds, state):
    reports = healthy()
    for index in (1, 2, 3):  # as seen against the first node's clock, all others are off
        reports[index]["clock"]["offset_seconds"] = -seconds
    [clock] = [finding for finding in judge(reports).findings if finding.check == "clocks"]
    assert (clock.state, clock.nodes) == (state, ("n1",))
    assert clock.measured == pytest.approx(seconds, abs=0.1)


def test_an_uncertain_clock_is_not_called_wrong():
    reports = healthy()
    reports[3]["clock"] = {"offset_seconds": 5.0, "uncertainty_seconds": 6.0}
    assert judge(reports).fit


@pytest.mark.parametrize("package", ["torch", "NVIDIA driver"])
def test_another_version_on_one_node_is_an_error_that_names_it(package):
    reports = healthy()
    reports[1]["facts"]["versions"][package] = "0.1"
    error = the_error(judge(reports), "versions")
    assert error.nodes == ("n2",)
    assert package in error.text


def test_a_name_that_means_loopback_is_an_error_across_machines():
    reports = healthy()
    reports[2]["facts"]["address"] = "127.0.1.1"
    error = the_error(judge(reports), "addresses")
    assert error.nodes == ("n3",)
    assert "network.interface" in error.text


def test_on_one_machine_loopback_is_fine():
    reports = healthy()
    for report in reports.values():
        report["facts"] |= {"address": "127.0.0.1", "identity": "one"}
    assert not [finding for finding in judge(reports).errors if finding.check == "addresses"]


def test_missing_and_other_and_sick_gpus_are_errors_of_their_nodes():
    reports = healthy()
    reports[0]["facts"] |= {"gpus": 1, "gpu_names": ["NVIDIA H100 80GB HBM3"]}
    reports[1]["facts"] |= {"gpu_names": ["NVIDIA A100-SXM4-80GB"] * 2}
    reports[2]["facts"] |= {"gpu_problems": ["GPU 0: 3 uncorrected memory errors"]}
    found = judge(reports)
    texts = {error.nodes: error.text for error in found.errors if error.check == "GPUs"}
    assert "1 GPUs" in texts[("n1",)]
    assert "A100" in texts[("n2",)]
    assert "uncorrected" in texts[("n3",)]


def test_promised_gpus_without_a_driver_anywhere_are_said_but_do_not_fail():
    reports = healthy()
    for report in reports.values():
        report["facts"] |= {"driver": None, "gpus": 0, "gpu_names": [], "gpu_ecc": [], "gpu_celsius": []}
    found = judge(reports)
    assert not [error for error in found.errors if error.check == "GPUs"]
    assert any("no node has an NVIDIA driver" in finding.text for finding in found.findings)


def test_a_node_without_a_driver_among_others_that_have_one_is_an_error():
    reports = healthy()
    reports[3]["facts"] |= {"driver": None, "gpus": 0, "gpu_names": [], "gpu_ecc": [], "gpu_celsius": []}
    assert the_error(judge(reports), "GPUs").nodes == ("n4",)


def test_a_node_that_cannot_write_to_the_shared_folder_is_named():
    reports = healthy()
    reports[1]["shared"]["problem"] = "Read-only file system"
    for index in (0, 2, 3):
        reports[index]["shared"]["unseen"] = ["n2"]
    found = judge(reports)
    assert the_error(found, "shared folder").nodes == ("n2",)


def test_a_node_with_another_folder_of_that_name_is_named_and_the_others_are_not():
    reports = healthy()
    reports[3]["shared"]["unseen"] = ["n1", "n2", "n3"]
    for index in (0, 1, 2):
        reports[index]["shared"]["unseen"] = ["n4"]
    error = the_error(judge(reports), "shared folder")
    assert error.nodes == ("n4",)


def test_a_folder_that_is_another_on_every_node_blames_none_of_them():
    reports = healthy()
    for index, report in reports.items():
        report["shared"]["unseen"] = [name for at, name in enumerate(NAMES) if at != index]
    error = the_error(judge(reports), "shared folder")
    assert error.nodes == ()


def test_a_full_shm_is_a_warning():
    reports = healthy()
    reports[0]["facts"]["space"]["shm"] = {"path": "/dev/shm", "free_bytes": 64 << 20, "total_bytes": 64 << 20}
    found = judge(reports)
    assert found.fit
    assert any("/dev/shm" in finding.text for finding in found.findings if finding.state == "warning")


def test_a_node_that_nobody_can_connect_to_is_named_with_the_reason():
    reports = healthy()
    for index in (0, 1, 3):
        reports[index] |= {"unreachable": {"n3": "10.0.0.3: No route to host"}, "ranks": [], "nccl": None}
    reports[2] |= {"ranks": [], "nccl": None}
    error = the_error(judge(reports), "connections")
    assert error.nodes == ("n3",)
    assert "No route to host" in error.text


def test_a_firewall_between_two_nodes_is_a_link():
    reports = healthy()
    reports[0]["unreachable"] = {"n4": "timed out"}
    found = judge(reports)
    assert the_error(found, "connections").link == ("n1", "n4")
    assert found.bad_nodes == ()
    assert found.exclude == ("n4",)  # without one of the two, the rest will do


def slow(reports: dict[int, dict[str, Any]], pairs: list[tuple[int, int]], value: float | None) -> None:
    for one, other in itertools.chain(pairs, [(b, a) for a, b in pairs]):
        for rank in reports[one]["ranks"]:
            rank["pairs"] = [[to, value if to == other else reached] for to, reached in rank["pairs"]]


@pytest.mark.parametrize("value", [3.0, None], ids=["slow", "dead"])
def test_a_slow_node_is_named_by_its_pairs(value):
    reports = healthy()
    slow(reports, [(1, 0), (1, 2), (1, 3)], value)
    error = the_error(judge(reports), "pairs")
    assert error.nodes == ("n2",)


@pytest.mark.parametrize("value", [3.0, None], ids=["slow", "dead"])
def test_a_slow_link_is_named_by_its_ends(value):
    reports = healthy()
    slow(reports, [(1, 2)], value)
    found = judge(reports)
    assert the_error(found, "pairs").link == ("n2", "n3")
    assert found.bad_links == (("n2", "n3"),)


def test_links_that_are_all_slower_than_promised_blame_the_promise_and_no_node():
    reports = healthy()
    slow(reports, list(itertools.combinations(range(4), 2)), 6.0)
    found = judge(reports)
    assert the_error(found, "pairs").nodes == ()
    assert "promises 50 GB/s" in the_error(found, "pairs").text


def test_without_a_promise_nodes_are_compared_with_each_other():
    reports = healthy()
    slow(reports, [(1, 0), (1, 2), (1, 3)], 2.0)
    assert the_error(judge(reports, None), "pairs").nodes == ("n2",)
    assert judge(healthy(), None).fit


def test_nodes_that_share_a_machine_are_not_compared():
    reports = healthy()
    for report in reports.values():
        report["facts"]["identity"] = "one"
    slow(reports, [(1, 0), (1, 2), (1, 3)], 2.0)
    assert judge(reports, None).fit


def test_slow_links_inside_a_node_name_the_node():
    reports = healthy()
    for rank in reports[3]["ranks"]:
        rank["rows"] = rows(intra=20.0)
    error = the_error(judge(reports), "bandwidth")
    assert (error.nodes, error.measured, error.promised) == (("n4",), 20.0, 450.0)


def test_one_wrong_element_is_an_error():
    reports = healthy()
    reports[0]["ranks"][0]["rows"] = rows(wrong=1)
    assert "are wrong" in the_error(judge(reports), "all-reduce").text


SOCKETS = {"network": "Socket", "devices": [], "channels": {"NET/Socket": 2}, "over_sockets": True}


def test_a_node_that_fell_back_to_sockets_is_named_with_nccls_reason():
    reports = healthy()
    reports[1]["nccl"] = {**SOCKETS, "reasons": ["NET/IB : No device found."]}
    error = the_error(judge(reports), "network")
    assert error.nodes == ("n2",)
    assert "No device found" in error.text
    assert "mlx5_0" in error.text


def test_sockets_on_all_nodes_are_an_error_of_the_set_up_and_of_no_node():
    reports = healthy()
    for report in reports.values():
        report["nccl"] = {**SOCKETS, "reasons": []}
        report["facts"]["fabric"] = []
    found = [error for error in judge(reports).errors if error.check == "network"]
    assert len(found) == 4
    assert {error.nodes for error in found} == {()}
    assert "promises InfiniBand NDR" in found[0].text


def test_sockets_are_fine_where_nothing_else_is_there_or_promised():
    reports = healthy()
    for report in reports.values():
        report["nccl"] = {**SOCKETS, "reasons": []}
        report["facts"]["fabric"] = []
    assert not [error for error in judge(reports, None).errors if error.check == "network"]


def test_a_rank_that_died_names_its_node_and_its_words():
    reports = healthy()
    reports[2]["ranks"][0]["problem"] = "left with 1 while it was at: started: ImportError: libcudart.so.12"
    error = the_error(judge(reports), "ranks")
    assert error.nodes == ("n3",)
    assert "libcudart" in error.text


def test_ranks_that_only_load_slowly_are_a_warning_and_no_reason_to_refuse():
    reports = healthy()
    for index, stage in enumerate(["started", *["meeting the other ranks"] * 3]):
        for rank in reports[index]["ranks"]:
            rank |= {"stage": stage, "hung": True, "problem": "no answer in time", "pairs": [], "rows": []}
    found = judge(reports)
    assert found.fit, found.lines()
    assert [finding.nodes for finding in found.findings if finding.check == "ranks"] == [("n1",)]


def test_ranks_that_hang_in_a_collective_are_an_error():
    reports = healthy()
    for report in reports.values():
        for rank in report["ranks"]:
            rank |= {"stage": "all-reduce over all ranks", "hung": True, "problem": "no answer in time"}
    assert "no answer in time" in the_error(judge(reports), "ranks").text


def test_a_report_is_the_same_after_it_was_written_and_read(tmp_path):
    reports = healthy()
    slow(reports, [(1, 2)], None)
    found = judge(reports)
    write_report(tmp_path / "preflight.json", found)
    assert (tmp_path / "preflight.json").stat().st_mode & 0o077 == 0
    again = read_report(tmp_path / "preflight.json")
    assert again is not None
    assert again.findings == found.findings
    assert again.document()["exclude"] == ["n3"]


def test_the_verdict_comes_last_and_names_who_is_to_blame():
    reports = healthy()
    del reports[0]
    assert judge(reports).lines()[-1].startswith("preflight: not fit: node n1")
    assert judge(healthy()).lines()[-1] == "preflight: 4 nodes fit after 12 s"
