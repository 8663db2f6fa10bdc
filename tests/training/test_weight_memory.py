"""Loading 1 GB of weights: no rank ever holds more than its part of them and one tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import weight_loading_rank

from gradus.checkpoint.writing import Writable, write_tensors

pytestmark = pytest.mark.slow  # 1 GB is written, and five processes start torch

LAYERS, WIDTH = 16, 4096
TENSOR_BYTES = WIDTH * WIDTH * 4
WHOLE_BYTES = LAYERS * TENSOR_BYTES
ALLOWANCE = 40_000_000  # besides what torch, and Triton where it is installed, take before


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.07 GB, each row of each tensor with a number of its own."""
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"

    def rows(layer: int) -> torch.Tensor:
        first = weight_loading_rank.expected(layer, 0)
        return (first + torch.arange(WIDTH, dtype=torch.float32))[:, None].expand(WIDTH, WIDTH).contiguous()

    write_tensors(
        path,
        {f"{n}.weight": Writable("F32", (WIDTH, WIDTH), partial(rows, n)) for n in range(LAYERS)},
    )
    assert path.stat().st_size > 1_000_000_000
    return path


def loaded(file: Path, ranks: int, tmp_path: Path) -> list[dict[str, Any]]:
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                weight_loading_rank.__file__,
                *map(str, (file, LAYERS, WIDTH, rank, ranks, tmp_path / "store")),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_four_ranks_each_hold_their_part_and_one_tensor(file: Path, tmp_path: Path) -> None:
    for rank in loaded(file, 4, tmp_path):
        assert rank["wrong"] == 0
        assert rank["held"] == WHOLE_BYTES // 4
        assert rank["peak"] - rank["before"] <= rank["held"] + TENSOR_BYTES + ALLOWANCE, rank


def test_a_replica_holds_the_model_once_and_one_tensor(file: Path, tmp_path: Path) -> None:
    (rank,) = loaded(file, 1, tmp_path)
    assert rank["wrong"] == 0
    assert rank["held"] == WHOLE_BYTES
    assert rank["peak"] - rank["before"] <= rank["held"] + TENSOR_BYTES + ALLOWANCE, rank
