"""On a login node, `gradus train` tries a few steps at most, and says which command makes a job of the rest."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from gradus_command import Done, Gradus


@pytest.fixture(scope="module")
def at_login(gradus: Gradus) -> Callable[..., Done]:
    """gradus where sbatch is on the PATH, no job is active, and no GPU is to be seen."""
    tools = gradus.folder / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text("#!/bin/sh\nexit 1\n")
    (tools / "sbatch").chmod(0o755)
    (gradus.folder / "script.py").write_text("print('ran')\n")

    def run(*arguments: str, **environment: str) -> Done:
        variables = {"PATH": f"{tools}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "", **environment}
        return gradus(*arguments, **variables)

    return run


def test_more_than_a_few_steps_are_refused_with_the_command_that_submits_them(gradus, at_login):
    recipe = gradus.recipe(steps=21)
    before = sorted(gradus.folder.rglob("*"))
    options = ("--nproc", "2", "--set", "optimizer.lr=1e-2", "--run-id", "x y")
    error = at_login("train", recipe, *options, "--json").json["error"]
    assert "looks like a login node" in error["message"]
    assert "21 steps" in error["message"]
    assert error["submit"] == "gradus submit recipe.yaml --nproc 2 --run-id 'x y' --set optimizer.lr=1e-2"
    assert error["submit"] in error["hint"]
    assert "--here" in error["hint"]
    assert sorted(gradus.folder.rglob("*")) == before


def test_a_budget_of_unknown_length_is_refused(gradus, at_login):
    done = at_login("train", gradus.recipe(steps=None, epochs=1))
    assert done.code == 2
    assert "gradus submit recipe.yaml" in done.err


def test_a_script_is_always_refused(gradus, at_login):
    done = at_login("train", "--nproc", "2", "--json", "--", "script.py", "--lr", "a b")
    assert done.code == 2
    assert done.json["error"]["submit"] == "gradus submit --nproc 2 -- script.py --lr 'a b'"
    assert not (gradus.runs / "script").exists()


def test_here_overrides(gradus, at_login):
    done = at_login("train", "--here", "--", "script.py")
    assert (done.code, done.out) == (0, "ran\n"), done.err


def test_a_few_steps_pass(gradus, at_login):
    assert at_login("train", gradus.recipe(steps=20), "--json").json["step"] == 20


def test_inside_a_job_nothing_is_said(gradus, at_login):
    done = at_login("train", "--", "script.py", SLURM_JOB_ID="7")
    assert (done.code, done.out) == (0, "ran\n"), done.err


def test_slurm_that_is_installed_but_belongs_to_no_cluster_makes_no_login_node(gradus, at_login):
    """As Debian's packages are on a machine of one's own: what sinfo says then, word for word (22.05)."""
    sinfo = gradus.folder / "tools" / "sinfo"
    sinfo.write_text('#!/bin/sh\necho "sinfo: fatal: Could not establish a configuration source" >&2\nexit 1\n')
    sinfo.chmod(0o755)
    try:
        assert at_login("train", "--", "script.py").out == "ran\n"
        sinfo.write_text('#!/bin/sh\necho "slurm_load_partitions: Unable to contact slurm controller" >&2\nexit 1\n')
        assert at_login("train", "--", "script.py").code == 2
    finally:
        sinfo.unlink()
