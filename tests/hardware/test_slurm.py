"""What Slurm says of its nodes becomes a cluster; what it does not say, or not in time, is no reason to fail.

`sinfo-22.05.json` and `sinfo-no-controller.json` were printed by Slurm 22.05.8 (GPUs and nodes added to the former);
`sinfo-24.11.json` has the shape that its data parser documents; `sinfo.txt` is the plain format of any version.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from gradus.hardware import slurm
from gradus.hardware.detect import DetectedGpu, Machine
from gradus.hardware.slurm import NodeGroup, detect_slurm, gpus_in_gres, groups_in_json, groups_in_text, site_of
from gradus.schema.cluster import Cluster, GpuNumbers

ANSWERS = Path(__file__).parent / "slurm_answers"
A100 = DetectedGpu(0, "NVIDIA A100-SXM4-80GB", 85_899_345_920, (8, 0), "GPU-0")
HOST = Machine("login1", 8, 2**35)


class FakeSlurm:
    """Commands `sinfo` and `scontrol` that print recorded answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def command(self, name: str, script: str) -> None:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def answers(self, json_answer: str, text_answer: str, limits: str = "") -> None:
        self.command(
            "sinfo", f'case "$*" in\n*--json*) {json_answer};;\n*%T*) {text_answer};;\n*) {limits or ":"};;\nesac'
        )
        self.command("scontrol", "echo 'ClusterName             = tiny'")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return FakeSlurm(folder)


def cat(name: str) -> str:
    return f"cat {ANSWERS / name}"


@pytest.mark.parametrize(
    ("gres", "count", "kind"),
    [
        ("(null)", 0, None),
        ("", 0, None),
        ("gpu:4", 4, None),
        ("gpu", 1, None),
        ("gpu:a100:4(S:0-1)", 4, "a100"),
        ("gpu:a100:4(S:0,2-3),tmpsize:7T", 4, "a100"),
        ("tmpsize:7T,gpu:nvidia_h100_80gb_hbm3:8(S:0-1)", 8, "nvidia_h100_80gb_hbm3"),
        ("gpu:a100:3,gpu:a100_1g.5gb:7", 7, "a100_1g.5gb"),
        ("mic:knc:1", 0, None),
        ("gpu:2(IDX:0-1)", 2, None),
    ],
)
def test_gpus_are_read_from_gres(gres: str, count: int, kind: str | None) -> None:
    assert gpus_in_gres(gres) == (count, kind)


def test_the_plain_format_gives_the_largest_set_of_equal_gpu_nodes_that_can_run_a_job() -> None:
    site = site_of(groups_in_text((ANSWERS / "sinfo.txt").read_text()), "tiny", HOST)
    assert site.cluster is not None
    assert (site.cluster.nodes, site.cluster.gpus_per_node) == (11, 8)  # 7 at work, 4 powered down, 1 drained
    assert site.cluster.scheduler.partition == "gpu"  # the same nodes as debug, for longer
    assert site.cluster.scheduler.time == "1-00:00:00"
    assert (site.cluster.cpu_cores, site.cluster.memory_gib) == (128, 1006.84)
    assert any("1 nodes of partition gpu are out of service" in note for note in site.notes)


def test_a_partition_can_be_asked_for() -> None:
    site = site_of(groups_in_text((ANSWERS / "sinfo.txt").read_text()), "tiny", HOST, partition="hopper")
    assert site.cluster is not None
    assert (site.cluster.nodes, site.cluster.gpus_per_node, site.cluster.scheduler.time) == (2, 4, None)


def test_json_of_newer_versions_says_the_same_in_more_words() -> None:
    site = site_of(groups_in_json(json.loads((ANSWERS / "sinfo-24.11.json").read_text())), "onehpc", HOST)
    assert site.cluster == Cluster.model_validate(
        {
            "name": "onehpc",
            "nodes": 30,
            "gpus_per_node": 8,
            "gpu": "H100-SXM",
            "cpu_cores": 224,
            "memory_gib": 2014.65,
            "scheduler": {"kind": "slurm", "partition": "gpu", "time": "1-00:00:00"},
        }
    )


def test_json_of_22_05_lists_nodes_and_its_time_limits_are_asked_for(commands: FakeSlurm) -> None:
    limits = "printf 'cpu|up|2-00:00:00\\ndebug|up|30:00\\ngpu|up|1-00:00:00\\nclosed|down|infinite\\n'"
    commands.answers(cat("sinfo-22.05.json"), "exit 1", limits)
    site = detect_slurm(HOST)
    assert site.cluster is not None
    assert (site.cluster.name, site.cluster.nodes, site.cluster.gpus_per_node) == ("tiny", 3, 4)
    assert (site.cluster.scheduler.partition, site.cluster.scheduler.time) == ("gpu", "1-00:00:00")


@pytest.mark.parametrize("json_answer", ["exit 1", "echo not json", "echo '{}'", cat("sinfo-no-controller.json")])
def test_without_usable_json_the_plain_format_is_asked_for(commands: FakeSlurm, json_answer: str) -> None:
    commands.answers(json_answer, cat("sinfo.txt"))
    site = detect_slurm(HOST)
    assert site.cluster is not None
    assert (site.cluster.scheduler.partition, site.cluster.nodes) == ("gpu", 11)


def test_a_controller_that_does_not_answer_is_noted_and_this_machine_counts(
    commands: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.answers(cat("sinfo-no-controller.json"), "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert "Unable to contact slurm controller" in detect_slurm(HOST).notes[0]
    here = Cluster.detect()
    assert (here.nodes, here.scheduler.kind) == (1, "local")
    assert "only this machine counts" in capsys.readouterr().err


def test_a_command_that_hangs_costs_seconds_not_the_run(commands: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_PATIENCE_SECONDS", 0.2)
    commands.answers("exec sleep 20", "exec sleep 20")
    assert "took more than" in detect_slurm(HOST).notes[0]


def test_the_cluster_at_hand_is_slurms_outside_of_a_job_and_the_machine_inside(
    commands: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.answers("exit 1", cat("sinfo.txt"))
    assert (Cluster.detect().name, Cluster.detect().nodes) == ("tiny", 11)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert Cluster.detect().nodes == 1


def test_no_slurm_is_nothing_to_note(commands: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(commands.folder))  # this machine may have one
    assert detect_slurm(HOST) == slurm.SlurmSite(None)


def group(kind: str | None) -> NodeGroup:
    return NodeGroup("gpu", 2, 64, 512000, 4, kind, None, in_service=True)


@pytest.mark.parametrize(
    ("kind", "gpu", "words"),
    [
        ("nvidia_a100-sxm4-80gb", "A100-SXM4-80GB", None),
        ("tesla_v100-sxm2-32gb", "V100-SXM2-32GB", None),
        ("mi250x", "MI250X", None),
        ("4090", "4090", "does not know the GPU that Slurm calls 4090"),
        ("rtx_4090", "RTX 4090", None),
        ("h200", "H200", None),
        ("a100", "A100-PCIe-40GB", "A100-PCIe-40GB is assumed, it could be A100-SXM4-40GB or A100-SXM4-80GB"),
        (None, None, "does not say which GPUs"),
    ],
)
def test_a_type_is_the_catalogues_gpu_or_the_smallest_that_it_may_mean(kind, gpu, words) -> None:
    site = site_of([group(kind)], "tiny", HOST)
    assert site.cluster is not None
    assert site.cluster.gpu == gpu
    assert (words is None and not site.notes) or words in site.notes[0]


@pytest.mark.parametrize("kind", ["a100", None])
def test_the_gpu_of_this_machine_tells_what_a_type_leaves_open(kind: str | None) -> None:
    site = site_of([group(kind)], "tiny", Machine("g1", 64, 2**39, gpus=(A100, A100)))
    assert site.cluster is not None
    assert site.cluster.gpu == GpuNumbers(name="NVIDIA A100-SXM4-80GB", memory_gib=80.0, compute_capability=[8, 0])


def test_nodes_out_of_service_are_no_cluster() -> None:
    broken = NodeGroup("gpu", 2, 64, 512000, 4, "h100", None, in_service=False)
    assert site_of([broken], "tiny", HOST).cluster is None
