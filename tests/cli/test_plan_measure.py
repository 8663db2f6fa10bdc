"""`gradus plan --measure`: real steps here, factors in the cluster file, and plans that use them and say so."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from gradus_command import Gradus

import gradus
from gradus.cli import plan_measure
from gradus.cli.plan_measure import Calibrated, check_is_here
from gradus.planner.calibration import Compared, Measured
from gradus.schema.calibration import Calibration
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LAPTOP = Cluster(name="laptop", cpu_cores=2, memory_gib=8)


@pytest.fixture
def place(tmp_path: Path) -> Gradus:
    gradus = Gradus(tmp_path)
    model = {"use": "gpt", "layers": 2, "width": 32, "heads": 2, "context": 32}
    gradus.recipe("gpt.yaml", model=model, data={"use": "synthetic-tokens"}, batch=16, steps=100)
    (tmp_path / "here.yaml").write_text("# mine\nname: here\ncpu_cores: 2 # as many as I may use\nmemory_gib: 8.0\n")
    return gradus


@pytest.mark.slow
def test_what_was_measured_is_in_the_file_and_in_later_plans(place):
    done = place("plan", "gpt.yaml", "--cluster", "here.yaml", "--measure", "--json", **NO_GPU)
    assert done.code == 0, done.err
    calibration = done.json["calibration"]
    rate = calibration["flops_per_second"]
    assert rate > 1e6
    assert {line["kind"] for line in calibration["compared"]} == {"compute", "optimizer", "data", "step"}
    assert all(line["predicted"] is None for line in calibration["compared"]), "nobody quotes the speed of a CPU"
    assert "steps on" in done.err, "people see it, too"

    text = (place.folder / "here.yaml").read_text()
    assert "# mine" in text
    assert "# as many as I may use" in text
    written = yaml.safe_load(text)["calibration"]
    assert written["flops_per_second"] == rate
    assert written["software"].startswith("torch")
    assert sorted(path.name for path in place.folder.iterdir()) == ["gpt.yaml", "here.yaml", "own.py"], "no run is left"

    step = done.json["choices"][0]["prediction"]["step"]["total"]
    [later] = gradus.plan(place.folder / "gpt.yaml", place.folder / "here.yaml")
    assert later.prediction.step.total == step
    assert any(f"Calibrated on {calibration['device']}" in sentence for sentence in later.prediction.basis)
    measured = next(line["measured"] for line in calibration["compared"] if line["kind"] == "step")
    assert step == pytest.approx(measured, rel=0.5), "the very step that was measured"


def test_another_device_than_the_cluster_has_is_refused(place):
    site = {"name": "far", "gpus_per_node": 4, "gpu": "H100-SXM", "cpu_cores": 64, "memory_gib": 512}
    (place.folder / "far.yaml").write_text(yaml.safe_dump(site))
    done = place("plan", "gpt.yaml", "--cluster", "far.yaml", "--gpus", "1", "--measure", "--json", **NO_GPU)
    assert done.code == 2
    assert done.json["error"]["field"] == "--measure"
    assert "far has H100-SXM, but this machine has no GPU" in done.json["error"]["message"]
    assert yaml.safe_load((place.folder / "far.yaml").read_text()) == site


def test_the_same_device_by_another_name_is_the_same(monkeypatch):
    def machine(gpu: str | None) -> Cluster:
        return LAPTOP.model_copy(update={"gpu": gpu, "gpus_per_node": 1 if gpu else 0})

    monkeypatch.setattr(plan_measure, "detect_cluster", lambda: machine("NVIDIA H100 80GB HBM3"))
    check_is_here(machine("H100-SXM"))
    with pytest.raises(InputError, match="A100-SXM4-80GB, but this machine has H100-SXM"):
        check_is_here(machine("A100-SXM4-80GB"))
    with pytest.raises(InputError, match="no GPU, but this machine has H100-SXM"):
        check_is_here(machine(None))


def test_the_comparison_is_a_table():
    lines = [
        Compared("compute", 1.2, 1.32, 1.1),
        Compared("data", 0.0, 0.002),
        Compared("device_context", 2**29, 2**30, 2.0, "bytes"),
    ]
    measured = Measured("NVIDIA H200", "torch 2.13.0", 20, 1.4, 1.32, 0.05, 0.002)
    cluster = LAPTOP.model_copy(
        update={"calibration": Calibration(device="NVIDIA H200", software="torch 2.13.0", factors={"compute": 1.1})}
    )
    assert Calibrated(cluster, Path("site.yaml"), measured, lines).text() == [
        "20 steps on NVIDIA H200, torch 2.13.0, one rank",
        "                  predicted  measured  factor",
        "  compute             1.2 s    1.32 s   × 1.1",
        "  data                  0 s      2 ms",
        "  device context   0.50 GiB  1.00 GiB     × 2",
        "written to site.yaml; later plans use it with --cluster site.yaml",
    ]
