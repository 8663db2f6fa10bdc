"""Big traces: memory is bounded. The figures for a gigabyte are benchmarks/timeline_speed.py's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "timeline_speed.py"


@pytest.mark.slow
def test_a_big_trace_takes_a_fraction_of_its_size_in_memory(tmp_path: Path) -> None:
    """20 MB and 200 MB: what the larger takes above the smaller is what the events take, and not the text."""
    peaks = {}
    for megabytes in (20, 200):
        command = [sys.executable, str(BENCHMARK), "--out", str(tmp_path), "--megabytes", str(megabytes)]
        subprocess.run(command, check=True, capture_output=True)
        found = json.loads((tmp_path / "timeline_speed.json").read_text())
        assert found["steps"] * 2000 == found["kernels"]
        peaks[megabytes] = found["peak_bytes"]
    assert peaks[200] - peaks[20] < 180e6
