"""`gradus submit` on a real Slurm: what is printed is what is submitted, and what the queue has can be steered."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from gradus_command import Done, wait_until
from slurm.jobs import Jobs, Run
from slurm.lab import Lab

import gradus
from gradus.launcher.slurm.queue import queue

LATER = ("--begin", "now+1hour")
SECRETS = {"HF_TOKEN": "hf_3f9a1c77", "WANDB_API_KEY": "k-7d20b1", "PASSWORD": "correct-horse-battery"}
# A folder whose name would do harm wherever a shell saw it.
NASTY = "a b $(touch canary) `touch canary2` 'c' \"d\" #e; touch canary3 & 100%j"


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path) -> Jobs:
    return Jobs(lab, tmp_path)


def submitted(jobs: Jobs, *options: str, nodes: int = 2, ranks: int = 2, **environment: str) -> Run:
    return jobs.submit(jobs.recipe(), *options, nodes=nodes, ranks=ranks, **environment)


def typed(jobs: Jobs, *options: str, **environment: str) -> Done:
    """`gradus submit` for two nodes of two ranks."""
    shape = ("--cluster", str(jobs.cluster), "--nodes", "2", "--nproc", "2")
    return jobs.gradus("submit", jobs.recipe(), *shape, *options, **environment)


def why(jobs: Jobs, run: Run) -> dict[str, Any]:
    return jobs.gradus("runs", "why", str(run.path), "--json").json


def test_a_dry_run_prints_byte_for_byte_what_is_submitted_and_leaves_nothing(jobs: Jobs) -> None:
    options = ("--run-id", "same", "--time", "20m", "--sbatch", "--comment=two words", *LATER)
    before = sorted(jobs.folder.iterdir())
    dry = typed(jobs, *options, "--dry-run")
    assert (dry.code, sorted(jobs.folder.iterdir())) == (0, [*before, jobs.folder / "recipe.yaml"]), dry.err
    run = submitted(jobs, *options)
    [job] = run.job_ids
    assert jobs.lab.run("scontrol", "write", "batch_script", job, "-").removesuffix("\n") == dry.out.removesuffix("\n")
    assert (run.path / "job" / "script.sh").read_text() == dry.out
    assert "#SBATCH --begin=now+1hour" in dry.out
    assert '#SBATCH --comment="two words"' in dry.out


def test_a_submitted_run_waits_with_its_reason_is_held_released_and_cancelled(jobs: Jobs) -> None:
    run = submitted(jobs, *LATER)
    [job] = run.job_ids
    assert run.status["state"] == "queued"
    assert [event["job_id"] for event in run.events("submit")] == [job]
    [listed] = jobs.gradus("runs", "--json").json
    assert (listed["state"], listed["job_id"]) == ("queued", job)
    assert "earliest start" in listed["reason"]
    assert listed["starts_at"] is not None
    assert "earliest start" in jobs.gradus("runs").out

    assert jobs.gradus("runs", "stop", str(run.path), "--json").json["requested"] == "held"
    held = why(jobs, run)
    assert (held["state"], held["reason"]["slurm"]) == ("queued", "JobHeldUser")
    assert any("gradus runs release" in line for line in held["next"])
    assert jobs.gradus("runs", "release", str(run.path), "--json").json["requested"] == "released"
    wait_until(lambda: why(jobs, run)["reason"]["slurm"] == "BeginTime")  # at first Slurm has no reason
    assert jobs.gradus("runs", "release", str(run.path)).code == 2, "it is not held any more"

    again = jobs.gradus("train", "--resume", str(run.path), "--here", "--json")
    assert (again.code, "in the queue" in again.json["error"]["message"]) == (2, True)
    assert jobs.gradus("runs", "cancel", str(run.path), "--json").json["requested"] == "cancelled"
    assert jobs.lab.job(job)["JobState"] == "CANCELLED"
    assert (run.status["state"], why(jobs, run)["state"]) == ("stopped", "stopped")
    assert "cancel" in [event["event"] for event in run.events("cancel")]


def test_a_job_that_somebody_else_took_away_leaves_a_run_that_is_lost_and_says_so(jobs: Jobs) -> None:
    run = submitted(jobs, *LATER)
    [job] = run.job_ids
    jobs.lab.run("scancel", job)
    told = why(jobs, run)
    assert told["state"] == "lost"
    assert "somebody took it out of the queue" in "\n".join(told["story"])
    assert any("gradus submit --resume" in line for line in told["next"])
    again = jobs.gradus("submit", "--resume", str(run.path), *LATER, "--json")
    assert again.code == 0, again.err
    assert len(run.job_ids) == 2
    assert why(jobs, run)["state"] == "queued"


def test_what_slurm_refuses_is_explained_and_nothing_is_left_behind(jobs: Jobs) -> None:
    before = sorted(jobs.folder.iterdir())
    refused = typed(jobs, "--sbatch", "--licenses=unobtainium:1", "--json")
    assert refused.code == 2
    assert "licences" in refused.json["error"]["message"]
    assert sorted(jobs.folder.iterdir()) == [*before, jobs.folder / "recipe.yaml"]
    assert jobs.lab.run("squeue", "-h") == ""


def test_a_refused_continuation_leaves_the_run_as_it_was(jobs: Jobs) -> None:
    run = submitted(jobs, *LATER)
    jobs.gradus("runs", "cancel", str(run.path))

    def files() -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in sorted((run.path / "job").iterdir())}

    before, status = files(), run.status
    refused = jobs.gradus("submit", "--resume", str(run.path), "--sbatch", "--licenses=unobtainium:1", "--json")
    assert refused.code == 2
    assert (files(), run.status) == (before, status)


def test_a_run_may_wait_for_another_one(jobs: Jobs) -> None:
    first = submitted(jobs, *LATER)
    second = submitted(jobs, "--after", str(first.path))
    [job] = second.job_ids
    assert jobs.lab.job(job)["Dependency"] == f"afterok:{first.job_ids[0]}(unfulfilled)"
    assert why(jobs, second)["reason"]["words"] == "it waits for another job to end"
    assert f"Dependency): job {first.job_ids[0]}" in "\n".join(why(jobs, second)["story"])


def test_a_sweep_is_one_array_with_a_run_for_each_combination(jobs: Jobs) -> None:
    done = typed(jobs, *LATER, "--sweep", "optimizer.lr=1e-2,3e-2", "--sweep", "seed=1,2", "--json")
    assert done.code == 0, done.err
    runs = [Path(path) for path in done.json["runs"]]
    recipes = [yaml.safe_load((run / "job" / "recipe.yaml").read_text()) for run in runs]
    assert [(r["optimizer"]["lr"], r["seed"]) for r in recipes] == [(1e-2, 1), (1e-2, 2), (3e-2, 1), (3e-2, 2)]
    job = done.json["job_id"]
    assert [Run(jobs.lab, run).job_ids for run in runs] == [[f"{job}_{number}"] for number in range(4)]
    listed = {Path(one["run"]): one for one in jobs.gradus("runs", "--json").json}
    assert {listed[run]["state"] for run in runs} == {"queued"}
    assert jobs.gradus("runs", "cancel", str(runs[1]), "--json").json["requested"] == "cancelled"
    states = {Path(one["run"]): one["state"] for one in jobs.gradus("runs", "--json").json}
    assert [states[run] for run in runs] == ["queued", "stopped", "queued", "queued"]


def test_without_a_word_about_nodes_a_cluster_without_gpus_gives_one(jobs: Jobs) -> None:
    recipe = jobs.recipe(plan={"workers": 0})
    done = jobs.gradus("submit", recipe, "--cluster", str(jobs.cluster), "--dry-run", "--json")
    assert (done.json["nodes"], done.json["ranks"]) == (1, 1)
    done = jobs.gradus("submit", recipe, "--cluster", str(jobs.cluster), "--nodes", "4", "--dry-run", "--json")
    assert (done.json["nodes"], done.json["ranks"]) == (4, 4)


def test_submitting_from_python(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(jobs.folder)
    monkeypatch.setenv("SLURM_CONF", jobs.lab.environment["SLURM_CONF"])
    jobs.recipe()
    job = gradus.submit("recipe.yaml", jobs.cluster, nodes=2, nproc=2, sbatch=["--begin=now+1hour"], quiet=True)
    assert job.job_id in queue(0).jobs
    assert (job.result.state, job.result.exit_code) == ("queued", None)
    assert job.run.path.parent == jobs.runs / "own"
    with pytest.raises(gradus.GradusError, match="unknown partition 'mian'; did you mean 'main'"):
        gradus.submit("recipe.yaml", jobs.cluster, nodes=2, nproc=2, partition="mian", quiet=True)


def test_the_cluster_is_shown_with_what_is_free_and_when_a_job_would_start(jobs: Jobs) -> None:
    lab = jobs.lab
    running = lab.sbatch("-N1", "--gres=gpu:1", "-c1", "--time=5", wrap="sleep 300")
    lab.wait_for_state(running, "RUNNING")
    lab.sbatch("--begin=now+1hour", wrap="true")
    document = jobs.gradus("cluster", "show", "--nodes", "4", "--gpus", "2", "--time", "10m", "--json").json
    main = next(one for one in document["partitions"] if one["name"] == "main")
    assert (main["nodes"], main["nodes_free"], main["gpus"], main["gpus_free"]) == (4, 3, 8, 7)
    assert (main["cpus"], main["is_default"], main["state"]) == (8, True, "UP")
    assert document["jobs"] == {"running": 1, "queued": 1}
    starts = {one["partition"]: one["starts_at"] for one in document["earliest"]}
    assert starts["main"] is not None
    text = jobs.gradus("cluster", "show", "--cluster", str(lab.cluster_file), "--nodes", "9").out
    assert "7/8" in text
    assert "4 nodes at most" in text
    assert "low" not in text, "a cluster file names its partition"


@pytest.mark.slow
def test_a_run_with_nasty_names_and_secrets_around_it_ends_well_and_nothing_leaks(jobs: Jobs) -> None:
    runs = jobs.folder / NASTY
    recipe = jobs.recipe(steps=3, plan={"workers": 0})
    cluster = yaml.safe_load(jobs.cluster.read_text())
    cluster["name"] = "$(touch canary4)"
    cluster["scheduler"] |= {"comment": NASTY, "job_name": NASTY, "account": "`touch canary5`"}
    cluster["network"] = {"variables": {"NCCL_DEBUG": "$(touch canary6)"}}
    jobs.cluster.write_text(yaml.safe_dump(cluster))
    done = jobs.gradus(
        *("submit", recipe, "--cluster", str(jobs.cluster), "--nodes", "2", "--nproc", "1", "--wait", "--json"),
        *("--runs", str(runs), "--run-id", "r1"),
        **SECRETS,
    )
    assert done.code == 0, done.err
    assert (done.json["state"], done.json["step"], done.json["exit_code"]) == ("finished", 3, 0)
    assert "loss" in done.json
    assert not list(jobs.folder.rglob("canary*")), "a name was run as a command"
    run = Path(done.json["run"])
    assert run == runs / "own" / "r1"
    for folder in (run, run / "job", run / "control", run / "attempts", run / "events"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700, f"others may look into {folder}"
    for path in run.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(secret.encode() in content for secret in SECRETS.values()), f"a secret is in {path}"


def _all_logs(run: Run) -> str:
    return "".join(log.read_text() for log in run.path.glob("attempts/1/logs/*.log"))


@pytest.mark.slow
def test_a_script_is_submitted_watched_and_cancelled_with_its_save(jobs: Jobs) -> None:
    (jobs.folder / "script.py").write_text(
        "import os, signal, sys, time\n"
        "def leave(*_):\n    open(f'saved-{os.environ[\"RANK\"]}', 'w').close(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "print('began', os.environ['RANK'], sys.argv[1:], flush=True)\n"
        "time.sleep(600)\n"
    )
    shape = ("--cluster", str(jobs.cluster), "--nodes", "2", "--nproc", "1")
    done = jobs.gradus("submit", *shape, "--json", "--", "script.py", "--lr", "a b")
    assert done.code == 0, done.err
    run = Run(jobs.lab, Path(done.json["run"]))
    run.until(lambda: all(f"began {rank} " in _all_logs(run) for rank in (0, 1)))
    logs = jobs.gradus("runs", "logs", str(run.path), "--rank", "1").out
    assert "began 1 ['--lr', 'a b']" in logs
    assert "began 0" not in logs
    assert why(jobs, run)["state"] == "running"
    cancelled = jobs.gradus("runs", "cancel", str(run.path), "--json")
    assert cancelled.json["requested"] == "cancelled", cancelled.out
    assert {path.name for path in jobs.folder.glob("saved-*")} == {"saved-0", "saved-1"}
    assert run.in_queue() == ""
    assert run.status["state"] == "stopped"


@pytest.mark.slow
def test_a_run_that_is_cancelled_at_once_is_not_saved_and_says_who_ended_it(jobs: Jobs) -> None:
    run = submitted(jobs, "--set", "steps=1000", "--set", "checkpoint.every=1000", STEP_SECONDS="1")
    run.until_step(1)
    assert jobs.gradus("runs", "cancel", str(run.path), "--now", "--json").json["requested"] == "killed"
    assert run.in_queue() == ""
    told = why(jobs, run)
    assert told["state"] == "failed"
    assert "ended at once by gradus runs cancel" in "\n".join(told["story"])
    assert run.saved == []


@pytest.mark.slow
def test_waiting_for_a_run_that_fails_gives_its_error_and_its_code(jobs: Jobs) -> None:
    done = typed(jobs, "--wait", "--json", "--retries", "0", MISBEHAVE="crash:2:1")
    assert done.code in (1, 93)
    assert (done.json["state"], done.json["exit_code"]) == ("failed", done.code)
    assert "the cat is on the keyboard" in done.json["error"]["message"]


@pytest.mark.slow
def test_the_runs_of_a_sweep_each_train_their_own_recipe_and_are_stopped_and_released_alone(jobs: Jobs) -> None:
    recipe = jobs.recipe(steps=60, plan={"workers": 0})
    done = jobs.gradus(
        *("submit", recipe, "--cluster", str(jobs.cluster), "--nodes", "1", "--sweep", "seed=1,2", "--json"),
        STEP_SECONDS="0.3",
    )
    assert done.code == 0, done.err
    first, second = (Run(jobs.lab, Path(path)) for path in done.json["runs"])
    first.until_step(2)
    assert jobs.gradus("runs", "stop", str(first.path), "--json").json["requested"] == "stop"
    first.until(lambda: first.decisions == ["hold"] and "PENDING" in first.in_queue())
    assert why(jobs, first)["state"] == "queued"
    assert jobs.gradus("runs", "release", str(first.path), "--json").json["requested"] == "released"
    for run, seed in ((first, 1), (second, 2)):
        assert run.finished()[-1]["step"] == 60
        assert yaml.safe_load((run.path / "attempts" / "1" / "recipe.yaml").read_text())["seed"] == seed
    assert (first.decisions, second.decisions) == (["hold", "finished"], ["finished"])
    assert first.curve[0]["loss"] != second.curve[0]["loss"]
