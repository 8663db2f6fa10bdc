"""`gradus runs` shows what the files say, whatever state a run was left in."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone

from gradus_command import Gradus

from gradus.record.append_log import AppendLog
from gradus.record.directory import RunDirectory
from gradus.record.status import Status, write_status


def test_without_runs_it_says_how_to_start_one(tmp_path):
    gradus = Gradus(tmp_path)
    assert gradus("runs", "--json").json == []
    assert "gradus train" in gradus("runs").out


def test_a_loss_that_is_not_a_number_is_still_strict_json(tmp_path):
    gradus = Gradus(tmp_path)
    run = RunDirectory.create(gradus.runs, "own", "nan")
    log = AppendLog(run.metrics_path)
    log.write({"step": 1, "attempt": 1, "loss": math.nan, "validation_loss": math.inf})
    log.close()
    write_status(run, Status(state="failed", step=1, steps_total=4, attempt=1, last_error="the loss is nan"))
    shown = gradus("runs", "nan", "--json")
    assert shown.code == 0
    assert shown.json["loss"] == "NaN"
    assert shown.json["metrics"][0]["validation_loss"] == "Infinity"
    text = gradus("runs", "nan").out
    assert "last error: the loss is nan" in text
    assert "1 of 4" in text


def test_a_run_without_a_sign_of_life_is_lost(tmp_path):
    gradus = Gradus(tmp_path)
    run = RunDirectory.create(gradus.runs, "own", "old")
    then = datetime.now(timezone.utc) - timedelta(minutes=5)
    write_status(run, Status(state="running", step=7, attempt=1, updated_at=then))
    assert gradus("runs", "--json").json[0]["state"] == "lost"
    assert "lost" in gradus("runs").out


def test_a_run_that_has_only_just_been_made_is_no_crash(tmp_path):
    gradus = Gradus(tmp_path)
    RunDirectory.create(gradus.runs, "own", "new")
    assert gradus("runs", "--json").json[0]["state"] == "unknown"
    assert gradus("runs", "new").code == 0
    refused = gradus("train", "--resume", "new", "--json")
    assert refused.code == 2
    assert "no attempt" in refused.json["error"]["message"]


def test_a_failed_run_says_why_in_the_list(tmp_path):
    gradus = Gradus(tmp_path)
    run = RunDirectory.create(gradus.runs, "own", "bad")
    write_status(run, Status("failed", 3, 9, attempt=1, last_error="ValueError: no\nsecond line"))
    shown = gradus("runs").out
    assert "ValueError: no" in shown
    assert "second line" not in shown


def test_a_long_error_is_shortened_to_the_terminal_but_whole_in_json_and_by_its_run(tmp_path):
    gradus = Gradus(tmp_path)
    message = "ValueError: " + "very " * 80 + "long"
    for name, error in (("bad", message), ("good", None)):
        state = "failed" if error else "finished"
        write_status(RunDirectory.create(gradus.runs, "own", name), Status(state, 3, 9, attempt=1, last_error=error))
    lines = gradus("runs", COLUMNS="140").out.splitlines()
    assert max(map(len, lines)) <= 140
    assert any("ValueError: very" in line and line.rstrip().endswith("…") for line in lines)
    narrow = gradus("runs", COLUMNS="40").out
    assert "own/good" in narrow
    assert "ValueError: very very" in narrow
    assert message in [run["last_error"] for run in gradus("runs", "--json").json]
    assert message in gradus("runs", "bad").out


def test_an_id_is_never_cut_off(tmp_path):
    gradus = Gradus(tmp_path)
    name, run_id = "a-name-that-is-rather-long-for-a-table", "20260101-000000-abcd-and-then-some-more-words"
    write_status(RunDirectory.create(gradus.runs, name, run_id), Status("finished", 100, 100, attempt=1))
    assert f"{name}/{run_id}" in gradus("runs", COLUMNS="60").out


def test_a_near_miss_of_a_run_is_told(tmp_path):
    gradus = Gradus(tmp_path)
    RunDirectory.create(gradus.runs, "own", "first-try")
    done = gradus("runs", "first-tyr", "--json")
    assert done.code == 2
    assert "first-try" in done.json["error"]["hint"]


def test_runs_that_exist_are_listed_nearest_first(tmp_path):
    gradus = Gradus(tmp_path)
    for run_id in ("alpha", "digits-2", "digits-1"):
        RunDirectory.create(gradus.runs, "own", run_id)
    for command in (("runs", "digits-"), ("runs", "stop", "digits-"), ("train", "--resume", "digits-")):
        error = gradus(*command, "--json").json["error"]
        assert sorted(error["allowed"][:2]) == ["own/digits-1", "own/digits-2"]
        assert error["allowed"][2] == "own/alpha"
        assert "own/alpha" in error["hint"]
    assert "no runs" in gradus("runs", "x", "--runs", "elsewhere").err
