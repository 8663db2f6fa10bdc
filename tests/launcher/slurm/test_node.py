"""A node's task in a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gradus.launcher.script import COMMAND_FILE, Script
from gradus.launcher.slurm.description import DESCRIPTION_FILE, JobDescription
from gradus.launcher.slurm.node import leave_with, ranks_per_node
from gradus.record.directory import RunDirectory
from gradus.schema.errors import DoNotRestart


def test_a_scripts_ranks_are_those_of_its_attempt_and_not_of_an_earlier_job(run: RunDirectory) -> None:
    run.job.mkdir()
    (run.job / DESCRIPTION_FILE).write_text(JobDescription(nodes=4, ranks_per_node=8).to_json())
    script = Script("file", "train.py", (), Path("/x"), ranks=32)
    first = run.new_attempt({COMMAND_FILE: script.to_json()})
    later = run.new_attempt({COMMAND_FILE: replace(script, ranks=4).to_json()})  # `gradus train --resume`, by salloc
    assert (ranks_per_node(run, first, 4), ranks_per_node(run, later, 2)) == (8, 2)


def test_what_a_task_refuses_is_told_without_a_traceback_and_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    def refuses() -> int:
        raise DoNotRestart("it would fail again", hint="mend it")

    with pytest.raises(SystemExit) as left:
        leave_with(refuses)
    assert left.value.code == 93
    assert capsys.readouterr().err == "gradus: error: it would fail again\nhint: mend it\n"
