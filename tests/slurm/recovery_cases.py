"""What is done to runs on a real scheduler, and what has to come of it.

tests/slurm/test_survival.py does each of them, and `benchmarks/recovery_table.py` writes what came of them into
docs/reliability.md. A case returns what was observed and how long it took, and fails if it is not what is promised.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from gradus_command import wait_until
from slurm.jobs import PATIENCE_SECONDS, Jobs, Run, kill, node_of
from slurm.lab import Lab

from gradus.record.append_log import LogTail

STEPS, EVERY = 30, 5
LONGER = 80  # for what is done to a run twice, or while it goes on: Slurm's commands may take seconds to answer
STEP_SECONDS = 0.3
TAKING_ITS_TIME = {"STEP_SECONDS": str(STEP_SECONDS)}
HANGS_AFTER = "15s"
LIMIT_STEPS = 50  # of a second each: with the start of the ranks, more than fit into a job of a minute
NAN_SAMPLE, NAN_STEP = 100, 13
Curve = list[dict[str, Any]]


@dataclass
class Ground:
    """A lab, and a folder for each case in it."""

    lab: Lab
    folder: Path
    _calm: dict[tuple[int, int], Curve] = field(default_factory=dict)

    def jobs(self, name: str) -> Jobs:
        folder = self.folder / name
        folder.mkdir()
        return Jobs(self.lab, folder)

    def calm(self, ranks: int, steps: int = STEPS) -> Curve:
        """The curve of an undisturbed run on this machine, without a scheduler."""
        if (ranks, steps) not in self._calm:
            jobs = self.jobs(f"calm-{ranks}-{steps}")
            self._calm[ranks, steps] = jobs.undisturbed(recipe(jobs, ranks, steps=steps), ranks)
        return self._calm[ranks, steps]


class Outcome(NamedTuple):
    """What came of a case, as it was seen."""

    happened: str
    run: Run
    seconds: float | None = None  # from the fault to the first step after it
    lost: int | None = 0  # steps that were computed again

    @property
    def attempts_and_jobs(self) -> str:
        attempts, jobs = len(self.run.ledger), len(self.run.job_ids)
        return f"{attempts} attempt{'s' if attempts > 1 else ''}, {jobs} job{'s' if jobs > 1 else ''}"


def recipe(jobs: Jobs, ranks: int, **changes: Any) -> str:
    plan = {"workers": 0, "precision": "fp64", "compile": False, "zero": 0}
    return jobs.recipe(
        **{"steps": STEPS, **changes}, plan={**plan, "mesh": {"replicate": ranks}, "micro_batch": 8 // ranks}
    )


@dataclass
class Followed:
    """When each stretch of steps began: that of an attempt, and what came after a rollback; and who asked for stops."""

    first_steps: list[tuple[int, float]]  # of which attempt, and when it was seen
    stops: list[float]

    def first_after(self, moment: float) -> float:
        return next(at for _, at in self.first_steps if at > moment) - moment

    def first_after_stop(self) -> float:
        """From the first request to the next attempt's first step: the one that is to stop makes some more."""
        return next(at for attempt, at in self.first_steps if attempt > 1) - self.stops[0]


def followed(run: Run, seconds: float = 2 * PATIENCE_SECONDS) -> Followed:
    """Look at a run's files ten times a second until none of its jobs is left in the queue."""
    found, tail = Followed([], []), LogTail(run.path / "metrics.jsonl")
    stop_file = run.path / "control" / "stop"
    attempt = max((row["attempt"] for row in tail.poll()), default=None)  # whose first step was seen before
    asked, ask_queue_at = False, 0.0
    give_up_at = time.monotonic() + seconds
    while time.monotonic() < give_up_at:
        for row in tail.poll():
            if "rolled_back_to" in row:
                attempt = None
            elif row.get("loss") is not None and row["attempt"] != attempt:
                attempt = row["attempt"]
                found.first_steps.append((attempt, time.time()))
        if stop_file.exists() != asked:
            asked = not asked
            found.stops += [time.time()] if asked else []
        if time.monotonic() > ask_queue_at:
            if not run.in_queue():
                return found
            ask_queue_at = time.monotonic() + 2
        time.sleep(0.1)
    raise AssertionError(f"still in the queue after {seconds} s: {run.in_queue()}\n{run.output()}")


def finished_as(run: Run, calm: Curve) -> None:
    assert run.status.get("state") == "finished", f"{run.status}\n{run.output()}"
    assert run.curve == calm, f"another curve\n{run.output()}"


def lost_steps(run: Run) -> int:
    """Steps that an attempt made and the next one had to make again: those since the newest checkpoint."""
    lost = 0
    for one, following in itertools.pairwise(run.ledger):
        assert following["step_begun"] == (one["step_saved"] or 0), "it goes on from what was committed last"
        again = max(0, one["step_reached"] - following["step_begun"])
        assert again <= 2 * EVERY, "twice: the newest may still have been on its way to the disk"
        lost += again
    return lost


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


# ---- what breaks -----------------------------------------------------------------------------------------------------


def killed_rank(ground: Ground) -> Outcome:
    jobs, calm = ground.jobs("rank"), ground.calm(4)
    run = jobs.submit(recipe(jobs, 4), **TAKING_ITS_TIME)
    run.until(lambda: run.saved and run.ranks)
    at = time.time()
    kill(run.ranks[3])
    seen = followed(run)
    finished_as(run, calm)
    assert run.decisions == ["again", "finished"]
    [job] = run.job_ids
    assert {line["job_id"] for line in run.ledger} == {job}, "without a new wait in the queue"
    failed = run.ledger[0]
    assert (failed["rank"], failed["node"]) == (3, "n2")
    assert "SIGKILL" in failed["error_message"]
    happened = "all ranks start again in the same allocation, from the newest checkpoint"
    return Outcome(happened, run, seen.first_after(at), lost_steps(run))


def dead_node(ground: Ground, *, rank: int = 1) -> Outcome:
    jobs, calm = ground.jobs(f"node-{rank}"), ground.calm(2)
    run = jobs.submit(recipe(jobs, 2), ranks=1, **TAKING_ITS_TIME)
    run.until(lambda: run.saved and run.ranks)
    dead, at = node_of(run.ranks[rank]), time.time()
    jobs.lab.kill_node(dead)
    seen = followed(run)
    finished_as(run, calm)
    assert run.ledger[0]["state"] in ("lost", "failed")
    assert dead not in run.ledger[-1]["nodes"]
    jobs.lab.start_node(dead)
    assert len(run.job_ids) == 1, "Slurm itself puts it back; another one would be one too many"
    without = ", which is told to leave out that node" if "exclude" in run.decisions else ""
    happened = f"Slurm requeues the job{without}; it goes on elsewhere from the newest checkpoint"
    return Outcome(happened, run, seen.first_after(at), lost_steps(run))


def dead_first_node(ground: Ground) -> Outcome:
    """It runs the batch script, and the store through which ranks agree."""
    return dead_node(ground, rank=0)


def dead_controller(ground: Ground) -> Outcome:
    jobs, calm = ground.jobs("controller"), ground.calm(2, LONGER)
    run = jobs.submit(recipe(jobs, 2, steps=LONGER), ranks=1, STEP_SECONDS="0.6")
    run.until(lambda: run.saved)
    jobs.lab.kill_controller()
    at, before = time.time(), run.curve[-1]["step"]
    wait_until(lambda: run.curve[-1]["step"] > before, seconds=PATIENCE_SECONDS)
    seconds = time.time() - at
    wait_until(lambda: run.curve[-1]["step"] > before + 2, seconds=PATIENCE_SECONDS)
    jobs.lab.start_controller()
    followed(run)
    finished_as(run, calm)
    assert run.decisions == ["finished"]
    return Outcome("nothing: ranks do not need it; the job ends as ever when it is back", run, seconds)


# ---- what asks a run to stop -----------------------------------------------------------------------------------------


def _stopped_text(run: Run, seen: Followed) -> str:
    """How long it took from the request until everything was saved and had left."""
    took = max(moment(line["ended_at"]) - at for line, at in zip(run.ledger, seen.stops, strict=False))
    return f"saved and gone {took:.0f} s after the request"


def time_limit(ground: Ground) -> Outcome:
    jobs, calm = ground.jobs("limit"), ground.calm(2, LIMIT_STEPS)
    # Slurm may warn a whole minute early: on a slow machine some of the jobs end before their first step.
    options = ("--time", "1", "--retries", "20")
    run = jobs.submit(recipe(jobs, 2, steps=LIMIT_STEPS), *options, ranks=1, STEP_SECONDS="1")
    seen = followed(run, 900)
    finished_as(run, calm)
    assert run.decisions[-1] == "finished"
    assert set(run.decisions[:-1]) == {"requeue"}, "at least one, by the limit"
    assert len(run.job_ids) == 1, "the same job, each time"
    assert lost_steps(run) == 0
    assert all(line["step_saved"] == line["step_reached"] for line in run.ledger), "nothing is computed twice"
    happened = f"the same job goes back into the queue until the run is finished; {_stopped_text(run, seen)}"
    return Outcome(happened, run, seen.first_after_stop())


def preemption(ground: Ground) -> Outcome:
    jobs, calm = ground.jobs("preempted"), ground.calm(2)
    run = jobs.submit(recipe(jobs, 2), "--partition", "low", ranks=1, **TAKING_ITS_TIME)
    run.until(lambda: run.saved and run.ranks)
    jobs.lab.sbatch("--partition=high", "--nodes=4", "--exclusive", "--time=5", wrap="sleep 5")
    seen = followed(run)
    finished_as(run, calm)
    assert run.decisions == ["requeue", "finished"]
    stopped = run.ledger[0]
    assert (stopped["state"], stopped["step_saved"]) == ("stopped", stopped["step_reached"])
    assert "SIGTERM" in stopped["stop_reason"]
    happened = f"the job goes back into the queue, and on when the nodes are free again; {_stopped_text(run, seen)}"
    return Outcome(happened, run, seen.first_after_stop(), lost_steps(run))


def requeue_forbidden(ground: Ground) -> Outcome:
    """What a site's submission filter does: the job may not be requeued, whatever its script asks for."""
    jobs, calm = ground.jobs("chained"), ground.calm(2)
    run = jobs.submit(recipe(jobs, 2), ranks=1, **TAKING_ITS_TIME)
    jobs.lab.run("scontrol", "update", f"JobId={run.job_ids[0]}", "Requeue=0")
    run.until(lambda: run.saved and run.ranks)
    jobs.lab.run("scancel", "--signal=USR1", "--batch", run.job_ids[0])
    seen = followed(run)
    finished_as(run, calm)
    assert run.decisions == ["requeue", "finished"]
    first, second = run.job_ids
    assert jobs.lab.job(first)["Restarts"] == jobs.lab.job(second)["Restarts"] == "0"
    assert [line["job_id"] for line in run.ledger] == [first, second]
    return Outcome(
        f"another job, which waits for this one, is submitted and goes on; {_stopped_text(run, seen)}",
        run,
        seen.first_after_stop(),
        lost_steps(run),
    )


# ---- what goes wrong in a run ----------------------------------------------------------------------------------------


def hang(ground: Ground) -> Outcome:
    jobs, calm, mark = ground.jobs("hang"), ground.calm(2), ground.folder / "hang" / "once"
    run = jobs.submit(
        recipe(jobs, 2, watchdog={"at_least": HANGS_AFTER}), ranks=1, MISBEHAVE="hang:12:1", ONCE=str(mark)
    )
    seen = followed(run)
    finished_as(run, calm)
    [found] = [event for event in run.events("fault") if event.get("kind") == "hang"]
    assert (found["rank"], found["node"]) == (1, "n2")
    assert run.decisions[-1] == "finished"
    began = mark.stat().st_mtime
    happened = (
        f"found and named, with rank, node and line, {moment(found['time']) - began:.0f} s after it began; "
        "ranks start again without that node"
    )
    assert "n2" not in run.ledger[-1]["nodes"]
    return Outcome(happened, run, seen.first_after(began), lost_steps(run))


def slow_rank(ground: Ground) -> Outcome:
    jobs, mark = ground.jobs("slow"), ground.folder / "slow" / "once"
    run = jobs.submit(recipe(jobs, 2, steps=40), ranks=1, MISBEHAVE="slow:8:1", ONCE=str(mark), **TAKING_ITS_TIME)
    followed(run)
    assert run.status["state"] == "finished"
    named = run.events("straggler")
    assert named
    assert {(event["rank"], event["node"]) for event in named} == {(1, "n2")}
    after = moment(named[0]["time"]) - mark.stat().st_mtime
    return Outcome(f"rank and node are named {after:.0f} s after it became slow; the run goes on", run)


def damaged_checkpoint(ground: Ground) -> Outcome:
    jobs, calm = ground.jobs("damaged"), ground.calm(2)
    # So many steps apart that no third one is on its way while the second is damaged.
    run = jobs.submit(recipe(jobs, 2, checkpoint={"every": 2 * EVERY}), ranks=1, STEP_SECONDS="1")
    run.until(lambda: len(run.saved) >= 2 and run.ranks)
    newest = run.saved[-1]
    part = next((run.path / "checkpoints" / f"step-{newest:08d}").glob("*.safetensors"))
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    at = time.time()
    kill(run.ranks[1])
    seen = followed(run)
    finished_as(run, calm)
    begun = run.ledger[1]["step_begun"]
    assert begun == newest - 2 * EVERY, "the one before"
    happened = "the damaged one is named and passed over; it goes on from the one before"
    return Outcome(happened, run, seen.first_after(at), run.ledger[0]["step_reached"] - begun)


def nan_batch(ground: Ground) -> Outcome:
    jobs = ground.jobs("nan")
    data = {"use": "own.py:Data", "shuffle": "none", "validation": 0, "nan_at": NAN_SAMPLE}
    run = jobs.submit(recipe(jobs, 2, data=data, on_nan="rollback"), ranks=1, **TAKING_ITS_TIME)
    seen = followed(run)
    assert run.status["state"] == "finished", run.output()
    assert run.curve[-1]["step"] == STEPS
    assert all(row["loss"] == row["loss"] for row in run.curve)
    [back] = run.events("rollback")
    assert NAN_SAMPLE in back["sample_indices"]
    fault = next(event for event in run.events("fault") if event.get("kind") == "not-a-number")
    lost = NAN_STEP - 1 - back["to_step"]
    happened = "goes back to the last good checkpoint, leaves out that step's samples, in the same attempt"
    return Outcome(happened, run, seen.first_after(moment(fault["time"])), lost)


def bad_node(ground: Ground) -> Outcome:
    jobs, calm = ground.jobs("bad-node"), ground.calm(2)
    run = jobs.submit(recipe(jobs, 2), ranks=1, MISBEHAVE="crash:0:n1")
    seen = followed(run)
    finished_as(run, calm)
    assert run.decisions == ["again", "exclude", "finished"]
    assert "n1" not in run.ledger[-1]["nodes"]
    assert len(run.job_ids) == 2
    assert jobs.lab.job(run.job_ids[1])["ExcNodeList"] == "n1"
    failed = moment(run.ledger[0]["ended_at"])
    happened = "the second time, a new job without that node is chained"
    return Outcome(happened, run, seen.first_after(failed), lost_steps(run))


def crash_at_step_7(ground: Ground) -> Outcome:
    jobs = ground.jobs("crash")
    run = jobs.submit(recipe(jobs, 2), ranks=1, MISBEHAVE="crash:7:1")
    followed(run)
    assert run.status["state"] == "failed"
    assert run.decisions == ["again", "give-up"]
    assert jobs.lab.job(run.job_ids[0])["ExitCode"].startswith("93:")
    assert "the cat is on the keyboard" in run.ledger[-1]["error_message"]
    assert "step 7" in run.ledger[-1]["reason"]
    return Outcome("tried once more; the same error at the same step ends it for good, exit code 93", run, None, None)


class Case(NamedTuple):
    done: str
    case: Callable[[Ground], Outcome]


CASES: dict[str, Case] = {
    "a rank dies": Case("SIGKILL of one of four ranks on two nodes", killed_rank),
    "a node dies": Case("SIGKILL of everything on the second of two nodes, its `slurmd` too", dead_node),
    "the first node dies": Case("the same on the first, which runs the batch script", dead_first_node),
    "the controller dies": Case("SIGKILL of `slurmctld`; started again some steps later", dead_controller),
    "the time limit": Case(f"{LIMIT_STEPS} steps of a second in a job of one minute", time_limit),
    "preemption": Case("a job of a partition with higher priority wants all nodes for 5 s", preemption),
    "no requeue at this site": Case("the job has `Requeue=0` and gets SIGUSR1", requeue_forbidden),
    "a hang": Case(f"a rank sleeps for ever; `watchdog.at_least: {HANGS_AFTER}`", hang),
    "a slow rank": Case("a rank becomes three times as slow", slow_rank),
    "a damaged checkpoint": Case("one bit in the newest, then SIGKILL of a rank", damaged_checkpoint),
    "a NaN batch": Case("one sample is NaN; `on_nan: rollback`", nan_batch),
    "a node that always fails": Case("ranks raise on one node, in the first step", bad_node),
    "a crash at step 7": Case("a rank raises at step 7, each time", crash_at_step_7),
}
