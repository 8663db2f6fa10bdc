"""The preflight on a real scheduler: by itself, inside of an allocation, and before the first attempt of a job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from slurm.jobs import Jobs
from slurm.lab import Lab

pytestmark = pytest.mark.slow


def test_by_itself_it_submits_a_small_job_and_leaves_nothing_behind(lab: Lab, tmp_path: Path):
    jobs = Jobs(lab, tmp_path)
    done = jobs.gradus("preflight", "--cluster", str(jobs.cluster), "--nodes", "2", "--json")
    assert done.code == 0, done.err + done.out
    assert done.json["fit"]
    assert len(done.json["nodes"]) == 2
    checks = {finding["check"] for finding in done.json["findings"]}
    assert checks >= {"nodes", "clocks", "versions", "shared folder", "connections", "pairs", "all-reduce"}
    assert not jobs.runs.exists()
    assert lab.run("squeue", "--noheader") == ""


def test_inside_of_an_allocation_it_looks_at_its_nodes(lab: Lab, tmp_path: Path):
    command = [sys.executable, "-m", "gradus", "preflight", "--json", "--runs", str(tmp_path / "runs")]
    out = lab.run("salloc", "--quiet", "-N2", "-n2", *command, timeout=300, cwd=tmp_path)
    assert json.loads(out)["nodes"] == ["n1", "n2"]
    assert json.loads(out)["fit"]


def test_more_nodes_than_there_are_is_bad_input(lab: Lab, tmp_path: Path):
    jobs = Jobs(lab, tmp_path)
    done = jobs.gradus("preflight", "--cluster", str(jobs.cluster), "--nodes", "9", "--json")
    assert done.code == 2
    assert done.json["error"]["allowed"] == 4
    assert not jobs.runs.exists()


def test_a_job_that_asks_for_it_starts_after_it_and_keeps_the_report(lab: Lab, tmp_path: Path):
    jobs = Jobs(lab, tmp_path)
    run = jobs.submit(jobs.recipe(steps=3), "--preflight")
    run.finished()
    report = run.path / "job" / "preflight.json"
    assert json.loads(report.read_text())["fit"]
    assert report.stat().st_mode & 0o077 == 0
    assert "preflight: 2 nodes fit" in run.output()


def test_a_node_that_is_not_fit_is_named_and_the_job_goes_on_without_it(tmp_path: Path):
    prolog = tmp_path / "prolog.sh"
    # On one node the network interface has another name.
    prolog.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != n2 ] || echo "export GLOO_SOCKET_IFNAME=missing0"\n')
    prolog.chmod(0o755)
    with Lab(nodes=3, settings={"TaskProlog": str(prolog)}) as lab:
        jobs = Jobs(lab, tmp_path)
        run = jobs.submit(jobs.recipe(steps=3), "--preflight")
        run.finished()
        assert len(run.job_ids) == 2, run.output()
        assert "missing0" in run.output()
        attempt = json.loads((run.path / "attempts" / "1" / "job.json").read_text())
        assert attempt["nodes"] == ["n1", "n3"]
