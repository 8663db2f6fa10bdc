"""`gradus plan` says how a recipe would be split and why, for any cluster, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from gradus_command import Gradus

from gradus.schema.plan import Plan

GPT = {"model": {"use": "gpt", "layers": 4}, "data": {"use": "synthetic-tokens"}, "batch": 32}
LINKS = {"intra": "NVLink 4", "inter": "InfiniBand NDR", "nics_per_node": 8}
SITE = {"name": "site", "nodes": 4, "gpus_per_node": 8, "gpu": "H100-SXM5-80GB", "cpu_cores": 64, "memory_gib": 512}
SITE |= {"links": LINKS, "price_per_gpu_hour": 2.0}


@pytest.fixture
def place(tmp_path: Path) -> Gradus:
    gradus = Gradus(tmp_path)
    gradus.recipe("gpt.yaml", **GPT)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump(SITE))
    return gradus


def test_the_plan_is_yaml_with_reasons_and_nothing_is_written(place: Gradus) -> None:
    before = sorted(place.folder.rglob("*"))
    done = place("plan", "gpt.yaml", CUDA_VISIBLE_DEVICES="")
    assert done.code == 0, done.err
    assert Plan.model_validate(yaml.safe_load(done.out)).micro_batch == 32
    assert "# batch 32 over 1 data rank" in done.out
    assert "# fixed by the recipe" in done.out  # workers
    assert sorted(place.folder.rglob("*")) == before


def test_json_is_one_document_with_choices_and_reasons(place: Gradus) -> None:
    done = place("plan", "gpt.yaml", "--cluster", "site.yaml", "--gpus", "16", "--json")
    assert done.code == 0, done.err
    assert set(done.json) == {"choices", "refused"}
    for choice in done.json["choices"]:
        assert set(choice) == {"plan", "prediction", "reasons"}
        Plan.model_validate(choice["plan"]).check(32, 16)
    best = done.json["choices"][0]
    assert best["plan"]["mesh"]["replicate"] == 16
    reasons = {reason["field"]: reason["reason"] for reason in best["reasons"]}
    assert reasons["mesh"].startswith("16 ranks, each with the whole model: ")
    memory, step = best["prediction"]["memory"], best["prediction"]["step"]
    assert memory.pop("peak") == sum(memory.values())
    hidden = step.pop("overlapped_communication")
    assert step.pop("total") == pytest.approx(sum(step.values()))
    assert hidden >= 0
    assert all(set(entry) == {"plan", "reason"} for entry in done.json["refused"])


@pytest.mark.parametrize("where", [["--cluster", "site.yaml"], pytest.param(["--gpus", "4x8"], marks=pytest.mark.slow)])
def test_the_layout_of_four_nodes_says_where_stages_and_slices_are(place: Gradus, where: list[str]) -> None:
    mesh = "plan.mesh={tensor: 4, pipeline: 4, replicate: 2}"
    done = place("plan", "gpt.yaml", *where, "--set", mesh, "--show-layout", CUDA_VISIBLE_DEVICES="")
    assert done.code == 0, done.err
    for words in (
        "32 ranks on 4 nodes of 8",
        "Two stages per node.",
        "No tensor group across nodes.",
        "1     12-15  0        3      0-3",
    ):
        assert words in done.out


def test_the_layout_as_json_has_every_rank(place: Gradus) -> None:
    done = place("plan", "gpt.yaml", "--gpus", "4x8", "--set", "plan.mesh.shard=32", "--show-layout", "--json")
    assert done.code == 0, done.err
    layout = done.json["choices"][0]["layout"]
    assert [line["shard"] for line in layout["lines"]] == [list(range(n, n + 8)) for n in range(0, 32, 8)]
    assert "Shard groups of 32 ranks reach across 4 nodes." in layout["summary"]


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        (["--gpus", "64", "--cluster", "site.yaml"], "--gpus", "site has 4 nodes of 8 GPUs"),
        (["--gpus", "lots"], "--gpus", "found lots"),
        (["--cluster", "nowhere"], "--cluster", "nowhere"),
        (["--deadline", "tomorrow"], "--deadline", "a duration such as"),
        (["--gpu-hours", "-3"], "--gpu-hours", "a number above 0"),
        (["--budget", "9"], "--budget", "no price_per_gpu_hour"),
        (["--set", "data.context=512"], "data.context", "context 512, but model.context is"),
        (["--gpus", "3x8"], "batch", "32 samples cannot be split evenly over 24 ranks"),
        (["--set", "plan.mesh.tensor=3"], "plan.mesh.tensor", "gpt has 4 heads"),
        (["--gpus", "8", "--set", "plan.mesh.tensor=4"], "plan.mesh", "tensor 4 is 4 ranks, but there are 8"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(place: Gradus, options, field, words) -> None:
    done = place("plan", "gpt.yaml", *options, "--json", CUDA_VISIBLE_DEVICES="")
    assert done.code == 2
    assert done.json["error"]["field"] == field
    assert words in done.json["error"]["message"]


def test_when_nothing_fits_the_exit_code_is_3_and_the_error_names_what_binds_and_what_would_fit(place: Gradus) -> None:
    small = {**SITE, "gpu": {"name": "small", "memory_gib": 2.0}, "nodes": 1}
    (place.folder / "small.yaml").write_text(yaml.safe_dump(small))
    wide = ["--set", "model.width=2048", "--set", "plan.offload=none", "--set", "plan.activation_offload=false"]
    done = place("plan", "gpt.yaml", "--cluster", "small.yaml", "--gpus", "1", *wide, "--json")
    assert done.code == 3
    error = done.json["error"]
    assert (error["kind"], error["binds"], done.json["exit_code"]) == ("no-plan", "optimizer", 3)
    assert error["needs_bytes"] > error["limit_bytes"] == 2 * 2**30
    assert all(change["peak_bytes"] <= 2 * 2**30 for change in error["changes"])
    assert any("gpus" in change for change in error["changes"])


def test_under_a_limit_of_money_no_gpus_need_be_named(place: Gradus) -> None:
    done = place("plan", "gpt.yaml", "--cluster", "site.yaml", "--budget", "100", "--top", "1", "--json")
    assert done.code == 0, done.err
    [choice] = done.json["choices"]
    assert choice["prediction"]["budget"]["cost"] <= 100


def test_it_is_among_the_verbs(place: Gradus) -> None:
    assert " plan " in place("--help").out
    assert "--show-layout" in place("plan", "--help").out
