"""The job that a process is part of: which nodes it and those after it are to do without."""

from __future__ import annotations

import json

import pytest

from gradus.launcher.ledger import settle
from gradus.launcher.slurm.description import PREFLIGHT_FILE
from gradus.launcher.slurm.own_job import excluded, nodes_left_out, note_job
from gradus.launcher.slurm.refusal import refused_nodes
from gradus.launcher.verdict import Ended
from gradus.record.directory import RunDirectory


@pytest.fixture
def job(run: RunDirectory) -> RunDirectory:
    run.job.mkdir()
    return run


def blame(run: RunDirectory, *nodes: str) -> None:
    (run.job / PREFLIGHT_FILE).write_text(json.dumps({"exclude": nodes}))


def test_nodes_that_preflights_refuse_add_up_with_those_of_verdicts(job):
    settle(job, Ended(1, "failed", 1, error_kind="node-lost", node="n9", nodes=("n8", "n9")), retries=3)
    blame(job, "n1")
    assert refused_nodes(job, 1).exclude == ("n9", "n1")
    note_job(job, "78", 77, exclude=["n9", "n1"])
    assert excluded(job) == ["n9", "n1"]
    blame(job, "n2")
    assert refused_nodes(job, 1).exclude == ("n9", "n1", "n2"), "n1 is no better than it was"


def test_preflights_do_not_go_from_node_to_node_for_ever(job):
    for number, name in enumerate(["n1", "n2", "n3", "n4"]):
        blame(job, name)
        verdict = refused_nodes(job, 1)
        assert verdict.decision == "exclude"
        note_job(job, str(78 + number), 77 + number, exclude=verdict.exclude)
    blame(job, "n5")
    assert refused_nodes(job, 1).decision == "give-up"
    blame(job, "n4")
    assert refused_nodes(job, 1).decision == "give-up", "a job that has it all the same"


def test_nodes_that_the_header_leaves_out_are_left_out_still():
    assert nodes_left_out(["--time=1", "--exclude=n[7-8]"], ["n1", "n2", "n1"]) == "n[7-8],n1,n2"
