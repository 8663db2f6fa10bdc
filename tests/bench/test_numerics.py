"""Formats on a model's own numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gradus_command import Gradus
from torch import nn
from typer.testing import CliRunner

from gradus.bench.number_formats import FORMATS
from gradus.bench.numerics import KINDS, MOST_ELEMENTS, looked_at, numerics, range_of, some_rows, watched
from gradus.bench.result import BenchResult
from gradus.bench.tried_recipe import given, plan_here
from gradus.cli.main import app

TINY = ["model.layers=2", "model.width=32", "model.heads=2", "model.context=16", "batch=4"]


@pytest.fixture(scope="module")
def found() -> BenchResult:
    recipe = given(None, "gpt", TINY)
    return numerics(recipe, plan_here(recipe, 1)[0].plan, steps=2, formats=tuple(FORMATS), say=lambda text: None)


def row(found: BenchResult, kind: str, name: str, scale: str = "none") -> dict[str, Any]:
    (chosen,) = (r for r in found.rows if (r["kind"], r["format"], r["scale"]) == (kind, name, scale))
    return chosen


def test_every_kind_of_number_of_every_layer_is_looked_at(found: BenchResult) -> None:
    for kind in KINDS:
        assert row(found, kind, "bf16")["tensors"] == found.summary["layers"] >= 8
    assert found.summary["ranges"]["output gradient"]["highest_power_of_two"] < 0


def test_more_bits_and_finer_scales_mean_less_noise(found: BenchResult) -> None:
    for kind in KINDS:
        ratio = {name: row(found, kind, name)["snr_db"] for name in ("tf32", "bf16", "fp16", "e4m3")}
        assert ratio["tf32"] > ratio["bf16"] > ratio["e4m3"]
        scaled = {scale: row(found, kind, "e4m3", scale) for scale in ("none", "tensor", "row", "block")}
        assert scaled["block"]["snr_db"] >= scaled["tensor"]["snr_db"] - 0.5
        assert scaled["tensor"]["underflow"] <= scaled["none"]["underflow"]
        assert 30 < scaled["block"]["snr_db"] < 36  # three bits of mantissa


def test_gradients_need_a_scale_in_eight_bits(found: BenchResult) -> None:
    assert row(found, "output gradient", "e4m3")["underflow"] > 0.5
    assert row(found, "output gradient", "e4m3", "row")["underflow"] < 0.1
    lifted, plain = row(found, "output gradient", "fp16", "loss"), row(found, "output gradient", "fp16")
    assert lifted["snr_db"] >= plain["snr_db"]


def test_the_worst_layer_is_named(found: BenchResult) -> None:
    worst = row(found, "weight", "e2m1", "tensor")
    assert worst["worst_layer"]
    assert worst["worst_snr_db"] <= worst["snr_db"]


def test_pictures_and_rows_survive_a_file(found: BenchResult, tmp_path: Path) -> None:
    again = BenchResult.load(found.save(tmp_path / "numerics.json"))
    assert again.rows == json.loads(json.dumps(found.rows))
    assert [chart.title for chart in again.charts] == [chart.title for chart in found.charts]


def test_hooks_see_what_passes_and_are_gone_afterwards() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    seen: dict[tuple[str, str], torch.Tensor] = {}

    def look(layer: str, kind: str, rows: torch.Tensor) -> None:
        seen[layer, kind] = rows

    x = torch.randn(5, 1, 4, 4)
    with watched(model, look):
        model(x).square().sum().backward()
    assert {layer for layer, _ in seen} == {"0", "2"}
    assert torch.equal(seen["0", "activation"], x.flatten(1))
    assert torch.equal(seen["2", "weight"], model[2].weight)  # type: ignore[arg-type]
    assert torch.equal(seen["2", "weight gradient"], model[2].weight.grad)  # type: ignore[arg-type,union-attr]
    seen.clear()
    model(x).sum().backward()
    assert not seen


def test_of_a_large_tensor_whole_rows_are_taken() -> None:
    large = torch.arange(float(4 * MOST_ELEMENTS)).reshape(-1, 256)
    rows = some_rows(large, convolution=False)
    assert rows.shape == (MOST_ELEMENTS // 256, 256)
    assert torch.equal(rows[1], large[4])


def test_a_tensor_of_zeros_has_no_range_and_no_error() -> None:
    nothing = looked_at("layer", "weight gradient", torch.zeros(4, 8), [FORMATS["e4m3"]])
    assert nothing.range.zeros == 1
    assert nothing.damages["e4m3", "row"].relative_error == 0
    assert range_of(torch.tensor([[0.0, 0.25, 8.0]])).lowest == -2


def test_an_unknown_format_is_bad_input() -> None:
    done = CliRunner().invoke(app, ["bench", "numerics", "--model", "gpt", "--formats", "e4m4", "--json"])
    assert done.exit_code == 2
    assert "did you mean 'e4m3'" in json.loads(done.stdout)["error"]["message"]


@pytest.mark.slow
def test_the_command_prints_one_document_and_writes_a_page(tmp_path: Path) -> None:
    settings = [word for override in TINY for word in ("--set", override)]
    done = Gradus(tmp_path)("bench", "numerics", "--model", "gpt", *settings, "--html", "page.html", "--json")
    assert done.code == 0, done.err
    assert done.json["kind"] == "numerics"
    assert "Where magnitudes lie" in (tmp_path / "page.html").read_text()
