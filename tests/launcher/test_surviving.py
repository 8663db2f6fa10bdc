"""`gradus train --retries`, and fire drills on this machine: real ranks, really killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gradus_command import Gradus, events

from gradus.launcher.drill_request import DrillRequest, DrillWatch, ask_for, done_path
from gradus.record.directory import RunDirectory

LONG = {"steps": 4000, "log_every": 1}


@pytest.mark.slow
def test_an_error_that_comes_again_is_tried_once_more_and_no_more(gradus: Gradus) -> None:
    done = gradus(
        "train", gradus.recipe(), "--nproc", "2", "--retries", "5", "--run-id", "again", "--json", RAISE_ON_RANK="1"
    )
    assert done.code == 93
    assert len(list((gradus.run("again") / "attempts").iterdir())) == 2
    decisions = [event["decision"] for event in events(gradus.run("again")) if "decision" in event]
    assert decisions == ["again", "give-up"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lost"), [("kill-rank", 10), ("timeout", 0)])
def test_a_drill_says_how_it_went(gradus: Gradus, kind: str, lost: int) -> None:
    done = gradus(
        "drill", gradus.recipe(**LONG), "--inject", kind, "--nproc", "2", "--json", STEP_SECONDS="0.5", timeout=300
    )
    assert done.code == 0, done.err
    told = done.json
    assert told["recovered"]
    assert told["lost_steps"] <= lost
    assert told["inject"] == kind
    if kind == "kill-rank":
        assert told["seconds_to_notice"] <= told["seconds_to_first_step"] <= told["seconds_to_catch_up"]


@pytest.mark.slow
def test_a_drill_that_nothing_gets_over_ends_with_1(gradus: Gradus) -> None:
    done = gradus(
        "drill", gradus.recipe(**LONG), "--inject", "nan", "--nproc", "1", "--json", STEP_SECONDS="0.1", timeout=300
    )
    assert done.code == 1, done.out
    assert not done.json["recovered"], "on_nan: stop"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recipe.yaml", "--inject", "kill-rnk"), "did you mean"),
        (("recipe.yaml", "--inject", "hang", "--nodes", "2"), "--nodes"),
        (("nowhere", "--inject", "hang"), "not a run"),
    ],
)
def test_what_cannot_be_drilled_is_refused(gradus: Gradus, arguments: tuple[str, ...], words: str) -> None:
    gradus.recipe()
    done = gradus("drill", *arguments, "--json")
    assert done.code == 2
    error = done.json["error"]
    assert words in error["message"] or words in str(error)


def test_a_request_is_answered_once_and_only_where_the_rank_is(tmp_path: Path, run: RunDirectory) -> None:
    asked: list[int] = []

    def ranks() -> dict[int, int]:
        asked.append(1)
        return {}

    request = DrillRequest("kill-rank", rank=3, attempt=1, id="a")
    ask_for(run, request)
    DrillWatch(run, 2, ranks).poll()
    assert not asked, "of another attempt"
    DrillWatch(run, 1, ranks).poll()
    assert asked
    assert not done_path(run, request).exists(), "the rank is on another node"
    done_path(run, request).write_text("")
    asked.clear()
    DrillWatch(run, 1, ranks).poll()
    assert not asked, "it was done already"
    assert json.loads((run.control / "drill.json").read_text())["harm"] == "kill-rank"
