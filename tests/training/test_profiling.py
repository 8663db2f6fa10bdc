"""Traces of some steps of a run: recorded where they were asked for, and nothing anywhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pool import Pool
from training_cases import recipe_for, trained
from user_runs import line_recipe

from gradus.diagnosis.timeline.analysis import analyse, skew
from gradus.parallel.world import alone
from gradus.record.directory import RunDirectory
from gradus.record.events import read_events
from gradus.schema.profile_request import PROFILE_FILE, ProfileRequest
from gradus.training.memory_snapshot import snapshot_at_out_of_memory
from gradus.training.profiling import Bystander, Profiling

CPU = torch.device("cpu")


def asked(run: RunDirectory, text: str) -> None:
    run.new_attempt({PROFILE_FILE: ProfileRequest.parse(text).to_json()})


def traces(run: RunDirectory) -> list[str]:
    return sorted(path.name for path in run.path.glob("traces/*"))


def profile_events(run: RunDirectory) -> list[dict[str, object]]:
    return [event for event in read_events(run) if event["event"] == "profile"]


def test_the_steps_that_were_asked_for_are_recorded_with_their_phases(run: RunDirectory) -> None:
    asked(run, "steps=3,from=4")
    trained(alone(CPU), str(run.path), line_recipe(plan={"workers": 0}))
    assert traces(run) == ["attempt-1-rank-0-steps-4-6.json.gz"]
    found = analyse(run.path / "traces" / traces(run)[0])
    assert (found.steps, found.rank, found.world_size) == (3, 0, 1)
    assert {"data", "forward", "backward", "optimizer", "other"} <= set(found.phase_seconds)
    assert sum(found.phase_seconds.values()) == pytest.approx(found.span_seconds, rel=0.2)
    (event,) = profile_events(run)
    assert (event["first_step"], event["last_step"], event["rank"]) == (4, 6, 0)
    assert (run.path / str(event["path"])).exists()


def test_without_a_request_nothing_is_recorded(run: RunDirectory) -> None:
    run.new_attempt()
    trained(alone(CPU), str(run.path), line_recipe(steps=2))
    assert not (run.path / "traces").exists()
    assert not profile_events(run)


def test_the_first_step_of_all_can_be_recorded(run: RunDirectory) -> None:
    asked(run, "steps=1,from=1")
    trained(alone(CPU), str(run.path), line_recipe(steps=3))
    assert traces(run) == ["attempt-1-rank-0-steps-1-1.json.gz"]


def test_a_run_that_ends_earlier_leaves_what_it_has_and_says_so(run: RunDirectory) -> None:
    asked(run, "steps=50,from=4")
    last = trained(alone(CPU), str(run.path), line_recipe(steps=100), 1, 6)["step"]
    assert traces(run) == [f"attempt-1-rank-0-steps-4-{last}.json.gz"]
    assert analyse(run.path / "traces" / traces(run)[0]).steps == last - 3
    assert f"{50 - (last - 3)} fewer than asked for" in str(profile_events(run)[0]["message"])


def test_a_run_that_ends_before_the_steps_says_that_nothing_was_recorded(run: RunDirectory) -> None:
    asked(run, "steps=5,from=90")
    trained(alone(CPU), str(run.path), line_recipe(steps=100), 1, 3)
    assert not traces(run)
    assert "nothing was recorded" in str(profile_events(run)[0]["message"])


def refuse(*arguments: object, **named: object) -> None:
    raise AssertionError("another profiler is at work")


@pytest.mark.parametrize("at", ["start", "step", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_ends_the_recording_and_not_the_run(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    asked(run, "steps=2,from=3")
    monkeypatch.setattr(torch.profiler.profile, at, refuse)
    assert trained(alone(CPU), str(run.path), line_recipe(steps=8))["step"] == 8
    assert not traces(run)
    (event,) = profile_events(run)
    assert event["message"] == "profile: nothing could be recorded: AssertionError: another profiler is at work"


def test_a_profile_changes_no_number(run: RunDirectory, tmp_path: Path) -> None:
    asked(run, "steps=3,from=2,stacks")
    other = RunDirectory.create(tmp_path, "plain")
    other.new_attempt()
    ends = [trained(alone(CPU), str(one.path), line_recipe(steps=6))["weights"] for one in (run, other)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_each_of_two_ranks_has_its_trace_and_they_can_be_compared(run: RunDirectory, pool: Pool) -> None:
    asked(run, "steps=2,from=3")
    recipe = recipe_for("gpt", steps=5)
    pool.run(2, trained, str(run.path), recipe)
    names = traces(run)
    assert names == ["attempt-1-rank-0-steps-3-4.json.gz", "attempt-1-rank-1-steps-3-4.json.gz"]
    found = [analyse(run.path / "traces" / name) for name in names]
    assert [one.rank for one in found] == [0, 1]
    assert all(one.communication_seconds > 0 and one.world_size == 2 for one in found)
    compared = skew(found)
    assert compared.collectives > 0
    assert compared.transfer_seconds > 0
    assert {event["rank"] for event in profile_events(run)} == {0, 1}


def test_memory_of_a_cpu_has_no_snapshot_and_that_is_said(run: RunDirectory) -> None:
    asked(run, "steps=1,from=2,memory")
    trained(alone(CPU), str(run.path), line_recipe(steps=3))
    assert "unavailable" in str(profile_events(run)[0]["memory"])
    assert snapshot_at_out_of_memory(run, 1, 0, CPU) is None


def test_a_rank_that_records_nothing_takes_in_its_numbers_where_the_others_do(run: RunDirectory) -> None:
    """Going back while the others record ends that for all; so does its last step."""
    for steps in ([*range(12)], [*range(6), *range(3, 12)], [8, 9, 10]):
        request = ProfileRequest.parse("steps=3,from=5")
        recording = Profiling(
            request, range(5, 8), run.path / "traces", attempt=1, rank=0, world_size=1, device=CPU, tell=lambda _: None
        )
        other = Bystander(range(5, 8))
        for done in steps:
            assert recording.interrupts(done) == other.interrupts(done), (steps, done)
            recording.at(done)
            other.at(done)
        recording.close()
