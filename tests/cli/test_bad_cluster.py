"""`gradus plan` on a cluster that cannot be: exit 2, with the file, the field, what was found and the nearest name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from gradus_command import Gradus

GPT = {"model": {"use": "gpt", "layers": 2}, "data": {"use": "synthetic-tokens"}, "batch": 8}
SITE = {"name": "site", "nodes": 2, "gpus_per_node": 4, "gpu": "H100-SXM", "cpu_cores": 64, "memory_gib": 512}


@pytest.mark.parametrize(
    ("change", "field", "found", "nearest"),
    [
        ({"gpu": "H100-SMX"}, "gpu", "H100-SMX", "H100-SXM"),
        ({"nodes": 0}, "nodes", 0, None),
        ({"links": {"inter": "InfiniBand NDDR"}}, "links.inter", "InfiniBand NDDR", "InfiniBand NDR"),
        ({"price_per_gpu_hour": -2.5}, "price_per_gpu_hour", -2.5, None),
        ({"calibration": {"factors": {"computes": 1.1}}}, "calibration.factors.computes", "computes", "compute"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused_by_name(tmp_path: Path, change, field, found, nearest) -> None:
    gradus = Gradus(tmp_path)
    gradus.recipe("gpt.yaml", **GPT)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({**SITE, **change}))
    before = sorted(tmp_path.rglob("*"))
    done = gradus("plan", "gpt.yaml", "--cluster", "site.yaml", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.code == 2
    error = done.json["error"]
    assert (error["file"], error["field"], error["found"]) == ("site.yaml", field, found)
    assert error.get("nearest") == nearest
    assert error["allowed"]
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_name_is_met_with_those_that_come_along(tmp_path: Path) -> None:
    gradus = Gradus(tmp_path)
    gradus.recipe("gpt.yaml", **GPT)
    done = gradus("plan", "gpt.yaml", "--cluster", "leonrado", "--json", CUDA_VISIBLE_DEVICES="")
    assert done.code == 2
    assert done.json["error"]["nearest"] == "leonardo"
    assert "param-rudra" in done.json["error"]["allowed"]
