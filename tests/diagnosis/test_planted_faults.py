"""Real runs with one thing wrong each: it is the first finding, and the same run without it has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import planted_faults
import pytest
from planted_faults import FAULTS, Planted, explained, train

QUICK = ("slow-dataset",)
NAMED = {fault.name: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    """What is found in a quick one and its twin, trained one after the other in one process."""
    folder = tmp_path_factory.mktemp("planted")
    command = [sys.executable, planted_faults.__file__, str(folder), *QUICK]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("name", QUICK)
def test_the_planted_fault_is_the_first_finding(found, name):
    assert found[f"{name} wrong"]["findings"][0]["id"] == NAMED[name].finding


@pytest.mark.parametrize("name", QUICK)
def test_the_clean_twin_has_no_finding(found, name):
    assert found[f"{name} clean"]["findings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_planted_fault_is_named_and_its_twin_is_clean(tmp_path, fault: Planted):
    (tmp_path / "wrong").mkdir()
    (tmp_path / "clean").mkdir()
    wrong = explained(train(fault, tmp_path / "wrong", clean=False))
    assert [one["id"] for one in wrong["findings"]][:1] == [fault.finding], wrong
    clean = explained(train(fault, tmp_path / "clean", clean=True))
    assert clean["findings"] == [], clean


LOOP = Path(__file__).parent / "faulty" / "own_loop.py"


@pytest.mark.slow
def test_a_loop_of_ones_own_that_dawdles_between_steps_is_named_and_its_twin_is_clean(tmp_path):
    found = {}
    for seconds in ("0.05", "0"):
        command = [sys.executable, str(LOOP), seconds]
        variables = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        [run] = [path for path in (tmp_path / "runs" / "dawdles").iterdir() if path not in found]
        found[run] = explained(run)["findings"]
    wrong, clean = found.values()
    assert [one["id"] for one in wrong] == ["work-beside-steps"]
    assert "the loop's own code" in wrong[0]["verdict"]
    assert 0.03 < wrong[0]["evidence"]["other_seconds"] < 0.1
    assert str(LOOP) in wrong[0]["change"]
    assert clean == []
