"""What of a small dataset is kept on the device is told without loading it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gradus.data.source import open_source
from gradus.planner.prediction import Predictor
from gradus.planner.resident_data import resident_bytes
from gradus.planner.resolve import data_options, resolved
from gradus.schema.cluster import Cluster, GpuNumbers
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe

GPU = GpuNumbers(name="NVIDIA H200", memory_gib=141, compute_capability=[9, 0])
SITE = Cluster(name="site", gpus_per_node=1, gpu=GPU, cpu_cores=8, memory_gib=64)


def recipe(**data: Any) -> Recipe:
    channels = 1 if data["use"] == "digits" else 3
    model = {"use": "mnist-cnn"} if data["use"] == "mnist" else {"use": "simple-cnn", "channels": channels}
    document = {"name": "small", "model": model, "data": data, "batch": 8, "steps": 3}
    return resolved(Recipe.from_document(document | {"optimizer": {"lr": 0.1}}))


@pytest.fixture
def mnist(tmp_path):
    for prefix, count in (("train", 50), ("t10k", 20)):
        for kind, shape in (("images-idx3", (count, 28, 28)), ("labels-idx1", (count,))):
            header = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
            (tmp_path / f"{prefix}-{kind}-ubyte").write_bytes(header + np.zeros(shape, np.uint8).tobytes())
    return tmp_path


def opened_bytes(of: Recipe) -> int:
    sources = [open_source(of.data.use, data_options(of), split, 0) for split in ("train", "validation")]
    return sum(column.nbytes for source in sources for column in source.columns)


@pytest.mark.parametrize("more", [{}, {"limit": 10}, {"augment": "standard"}])
def test_it_is_what_the_opened_dataset_has(mnist, more) -> None:
    found = recipe(use="mnist", path=str(mnist), **more)
    assert resident_bytes(found) == opened_bytes(found) > 0


def test_digits_are_counted_without_the_package_that_has_them() -> None:
    found = recipe(use="digits", size=32)
    assert resident_bytes(found) == opened_bytes(found)


def test_it_is_in_the_memory_of_a_rank_unless_the_plan_says_no(mnist) -> None:
    predictor = Predictor(recipe(use="mnist", path=str(mnist)), SITE)
    on_device, elsewhere = (
        predictor.memory(Plan(precision="bf16", micro_batch=8, data_on_device=on)).activations for on in (True, False)
    )
    assert on_device - elsewhere == 70 * (28 * 28 + 8)


def test_what_is_made_up_or_read_from_files_is_not() -> None:
    assert resident_bytes(recipe(use="synthetic-images")) == 0


def test_what_is_too_large_for_the_device_is_not(mnist, monkeypatch) -> None:
    monkeypatch.setattr("gradus.planner.resident_data.RESIDENT_BYTES", 100)
    assert resident_bytes(recipe(use="mnist", path=str(mnist))) == 0
