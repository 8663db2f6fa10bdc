"""Building a model of 1 GB: no rank ever holds more of it than its own part."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import model_building_rank
import pytest

pytestmark = pytest.mark.slow  # four processes start torch and draw 260 million weights

LAYERS, WIDTH, RANKS = 21, 1024, 4
ALLOWANCE = 80_000_000  # for one chunk of rows, and what Python and torch take on the way


def built(ranks: int, tmp_path: Path) -> list[dict[str, Any]]:
    processes = [
        subprocess.Popen(
            [sys.executable, model_building_rank.__file__, *map(str, (LAYERS, WIDTH, rank, ranks, tmp_path / "store"))],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=280)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def test_four_ranks_each_hold_their_part_from_the_first_moment_on(tmp_path: Path) -> None:
    for rank in built(RANKS, tmp_path):
        assert rank["whole"] > 1_000_000_000
        assert rank["held"] == pytest.approx(rank["whole"] / RANKS, rel=0.01)
        assert rank["peak"] - rank["before"] <= rank["held"] + ALLOWANCE, rank
        assert rank["deviation"] == pytest.approx(0.02, rel=0.05), "the weights are drawn"
