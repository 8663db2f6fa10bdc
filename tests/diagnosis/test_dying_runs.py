"""Real runs with one fault each, and their clean twins: the planted fault is the first finding, the twins have none."""

from __future__ import annotations

from pathlib import Path

import pytest
from diagnosis.dead_runs import findings
from diagnosis.dying import RECIPES, SCRIPTS, Case, killed_run, run_case

from gradus.record.directory import RunDirectory

CASES = {case.name: case for case in (*RECIPES, *SCRIPTS)}
# All ways to die of one script have the same twin.
TWINS = {str(case.mended) if case in SCRIPTS else case.name: case for case in CASES.values()}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_planted_fault_is_the_first_finding(case: Case, tmp_path: Path) -> None:
    found = findings(RunDirectory(run_case(case, tmp_path, clean=False)))
    assert [one.id for one in found][:1] == [case.finding]
    assert (found[0].severity == "fatal") == case.dies
    assert found[0].change
    for name, value in case.evidence.items():
        assert found[0].evidence[name] == value


@pytest.mark.slow
@pytest.mark.parametrize("case", TWINS.values(), ids=[case.name for case in TWINS.values()])
def test_the_clean_twin_has_no_finding(case: Case, tmp_path: Path) -> None:
    assert findings(RunDirectory(run_case(case, tmp_path, clean=True))) == ()


@pytest.mark.slow
def test_a_run_whose_launcher_was_killed_is_lost_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = RunDirectory(killed_run(tmp_path))
    [found, *_] = findings(run)
    assert found.id == "lost"
    assert f"gradus train --resume {run.name}/{run.id}" in found.change
