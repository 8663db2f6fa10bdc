"""What `explain` says as a whole: the order of findings, and answers to what is hardly a run."""

from __future__ import annotations

import json
import shutil

import pytest
from diagnosis.dead_runs import written_run
from made_up_runs import ON_GPU, STEP, run_with
from typer.testing import CliRunner

from gradus.cli.main import app
from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.explain import explain
from gradus.diagnosis.finding import Finding, ranked
from gradus.record.directory import RunDirectory


def first_of(run: RunDirectory) -> str | None:
    found = explain(Evidence.of_run(run)).findings
    return found[0].id if found else None


def finding(id_: str, gain: float | None, severity: str = "slow", confidence: str = "high") -> Finding:
    return Finding(id_, "it is so", {}, "change it", gain, confidence, severity)  # type: ignore[arg-type]


def test_what_killed_a_run_comes_first_then_the_most_to_gain():
    mixed = [
        finding("small", 0.1),
        finding("guess", 0.9, confidence="low"),
        finding("large", 0.5),
        finding("overfitting", None, "quality"),
        finding("out-of-memory", None, "fatal", "low"),
        finding("headroom", 0.3, "waste"),
    ]
    order = ["out-of-memory", "overfitting", "large", "headroom", "small", "guess"]
    assert [one.id for one in ranked(mixed)] == order


def test_a_sound_run_has_no_finding_and_is_told_so(tmp_path):
    run = run_with(tmp_path, host={"ranks_cpu_seconds": [0.0, 3.0]})
    assert explain(Evidence.of_run(run)).findings == ()
    said = CliRunner().invoke(app, ["explain", str(run.path)])
    assert said.exit_code == 0
    assert "no finding" in said.stdout


def test_a_script_of_which_nothing_was_measured_is_not_called_sound(tmp_path):
    run = written_run(tmp_path, state="finished", script="print('trained')")
    said = CliRunner().invoke(app, ["explain", str(run.path)]).stdout
    headline, *_ = said.splitlines()
    assert "no finding: nothing was measured of the steps of this script" in headline
    assert "`gradus train --nproc 2 --profile steps=5 -- train.py`" in headline
    assert "stands out" not in said


def test_a_sound_run_on_a_gpu_has_no_finding(tmp_path):
    plan = {"precision": "bf16", "compile": True}
    assert first_of(run_with(tmp_path, cluster=ON_GPU, gpu={}, plan=plan)) is None


def test_the_text_has_verdict_evidence_change_gain_and_confidence(tmp_path):
    run = run_with(tmp_path, seconds={**STEP, "data": 0.3}, plan={"workers": 0})
    said = CliRunner().invoke(app, ["explain", str(run.path)]).stdout
    assert "1. data-bound: 75% of a step is waiting for samples" in said
    assert "data 0.3 s" in said
    assert "--set plan.workers=" in said
    assert "at most 75% of the step time" in said
    assert "confidence    high" in said


def test_json_is_one_document_with_everything(tmp_path):
    run = run_with(tmp_path, seconds={**STEP, "data": 0.3}, plan={"workers": 0})
    document = json.loads(CliRunner().invoke(app, ["explain", str(run.path), "--json"]).stdout)
    assert document["run"] == str(run.path)
    [found] = document["findings"]
    assert set(found) == {
        *("id", "verdict", "evidence", "change", "gain_at_most", "confidence", "not_measured", "severity")
    }
    assert found["evidence"]["data_seconds"] == pytest.approx(0.3)
    assert found["gain_at_most"] == pytest.approx(0.75)
    assert {"plan_against_measured", "not_measured"} <= set(document)


def test_a_run_is_found_by_its_name(tmp_path):
    run_with(tmp_path / "runs", seconds={**STEP, "data": 0.3}, plan={"workers": 0})
    said = CliRunner().invoke(app, ["explain", "made-up", "--runs", str(tmp_path / "runs"), "--json"])
    assert json.loads(said.stdout)["findings"][0]["id"] == "data-bound"


def test_few_steps_are_said_to_tell_little(tmp_path):
    run = run_with(tmp_path, steps=8, seconds={**STEP, "data": 0.3}, plan={"workers": 0})
    found = explain(Evidence.of_run(run))
    assert found.findings[0].confidence == "low"
    assert any("only 5 steps" in line for line in found.not_measured)


def test_a_handful_of_steps_is_not_judged_by_time(tmp_path):
    seconds = {0: {**STEP, "data": 0.3, "exposed_communication": 0.5}, 1: {**STEP, "data": 0.3, "forward": 0.6}}
    plan = {"workers": 0, "mesh": {"replicate": 2}, "micro_batch": 16}
    for steps, judged in (
        (3, False),
        (7, False),
        (8, True),
    ):  # three of them are the warm-up, unless there are no others
        run = run_with(tmp_path, steps=steps, seconds=seconds, plan=plan, run_id=f"of-{steps}")
        found = explain(Evidence.of_run(run))
        assert bool(found.findings) == judged
        assert any("too few to judge" in line for line in found.not_measured) != judged


def test_the_first_steps_do_not_count(tmp_path):
    run = run_with(tmp_path, steps=20)
    slow = json.dumps({"attempt": 1, "rank": 0, "node": "n1", "steps": 1, "measured_steps": 1, "time": 0.0})
    lines = (run.path / "timings" / "rank-0.jsonl").read_text().splitlines()
    for at in range(3):  # as if they had compiled, and filled caches
        first = {**json.loads(slow), "step": at + 1, "step_seconds": 60.0, "seconds": {"data": 60.0}}
        lines[at] = json.dumps(first)
    (run.path / "timings" / "rank-0.jsonl").write_text("\n".join(lines) + "\n")
    assert first_of(run) is None


def test_what_the_end_of_a_run_took_does_not_count(tmp_path):
    run = run_with(tmp_path, steps=20, seconds={**STEP, "data": 0.3}, plan={"workers": 0})
    path = run.path / "timings" / "rank-0.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    last |= {"step_seconds": 500.4, "seconds": {**last["seconds"], "evaluation": 400.0, "checkpoint": 100.0}}
    with path.open("a") as file:
        file.write(json.dumps(last) + "\n")  # the last line once more, as ranks write it when they end
    [one] = explain(Evidence.of_run(run)).findings
    assert one.gain_at_most == pytest.approx(0.75)


def test_steps_under_a_profiler_do_not_count(tmp_path):
    traced = {"event": "profile", "rank": 0, "first_step": 10, "last_step": 14}
    run = run_with(tmp_path, steps=20, events=[traced])
    path = run.path / "timings" / "rank-0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[9:15]:  # the last one wrote the trace
        line.update(step_seconds=9.0, seconds={"data": 9.0})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert first_of(run) is None
    (run.events / "rank-0-attempt-1.jsonl").unlink()
    assert first_of(run) == "data-bound"


def test_a_broken_last_line_is_no_obstacle(tmp_path):
    run = run_with(tmp_path, seconds={**STEP, "data": 0.3}, plan={"workers": 0})
    for path in (run.metrics_path, run.path / "timings" / "rank-0.jsonl", run.path / "devices" / "n1.jsonl"):
        with path.open("a") as file:
            file.write('{"step": 41, "loss": 0.')
    assert first_of(run) == "data-bound"


def test_a_run_of_an_older_version_has_no_timings_and_no_devices(tmp_path):
    run = run_with(tmp_path)
    shutil.rmtree(run.path / "timings")
    shutil.rmtree(run.path / "devices")
    found = explain(Evidence.of_run(run))
    assert found.findings == ()
    assert any("no timings" in line for line in found.not_measured)


def test_metrics_alone_say_that_an_older_run_waited_for_samples(tmp_path):
    rows = [{"step": n, "loss": 2.0, "step_seconds": 0.1, "data_seconds": 0.06} for n in range(1, 41)]
    run = run_with(tmp_path, rows=rows)
    shutil.rmtree(run.path / "timings")
    shutil.rmtree(run.path / "devices")
    [one] = explain(Evidence.of_run(run)).findings
    assert (one.id, one.gain_at_most) == ("data-bound", pytest.approx(0.6))


def test_a_run_that_is_alive_is_judged_by_what_there_is(tmp_path):
    run = run_with(tmp_path, seconds={**STEP, "data": 0.3}, plan={"workers": 0}, state="running")
    document = json.loads(CliRunner().invoke(app, ["explain", str(run.path), "--json"]).stdout)
    assert document["state"] == "running"
    assert document["findings"][0]["id"] == "data-bound"


def test_what_is_not_known_is_no_evidence():
    found = Finding("x", "it is so", {"cores": 2, "reason": None}, "change it", None, "high")
    assert found.document()["evidence"] == {"cores": 2}


def test_a_run_that_has_nothing_but_an_attempt(tmp_path):
    run = RunDirectory.create(tmp_path, "bare", "x")
    run.new_attempt({"recipe.yaml": "name: [half"})
    assert explain(Evidence.of_run(run)).plan_against_measured == ()


@pytest.mark.parametrize(
    ("folders", "why"),
    [
        ([], "no such run directory"),
        (["x"], "it is a folder, but has no attempts/ and control/ in it"),
        (["x", "x/attempts"], "it is a folder, but has no control/ in it"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, folders, why):
    for folder in folders:
        (tmp_path / folder).mkdir()
    said = CliRunner().invoke(app, ["explain", str(tmp_path / "x"), "--json"])
    assert said.exit_code == 2
    assert f"is not a run: {why}" in json.loads(said.stdout)["error"]["message"]


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "notes.json").write_text("these are notes")
    said = CliRunner().invoke(app, ["explain", str(tmp_path / "notes.json"), "--json"])
    assert said.exit_code == 2
    assert "notes.json" in json.loads(said.stdout)["error"]["message"]


def test_a_run_is_judged_without_a_trace_that_cannot_be_read(tmp_path):
    run = run_with(tmp_path, seconds={**STEP, "data": 0.3}, plan={"workers": 0})
    (run.path / "traces").mkdir()
    (run.path / "traces" / "attempt-1-rank-0-steps-1-2.json.gz").write_bytes(b"no gzip")
    found = explain(Evidence.of_run(run))
    assert found.findings[0].id == "data-bound"
    assert any("cannot be read" in line for line in found.not_measured)
