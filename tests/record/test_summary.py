import json

from gradus.record.append_log import AppendLog
from gradus.record.summary import summarize, summary_text


def test_the_summary_says_what_came_of_the_run(run):
    log = AppendLog(run.metrics_path)
    speeds = [1, 1, 1, 40_000, 41_000, 42_000]
    for step, speed in enumerate(speeds, start=1):
        log.write(
            {
                "step": step,
                "attempt": 1,
                "loss": 5.0 - step / 2,
                "tokens_per_second": speed,
                "memory_peak_bytes": step * 2**30,
            }
        )
    log.write({"step": 6, "attempt": 1, "validation_loss": 2.25, "validation_accuracy": 0.875})
    (run.events / "launcher.jsonl").write_text(
        '{"time": "2026-01-01T00:00:00.000+00:00", "event": "start"}\n'
        '{"time": "2026-01-01T00:01:30.000+00:00", "event": "finish"}\n'
    )
    assert summary_text(run, ["gradus explain quickstart"]).splitlines() == [
        "loss                 4.5 → 2",
        "validation loss      2.25",
        "validation accuracy  87.5%",
        "speed                41 k tok/s (median)",
        "peak memory          6 GiB on rank 0",
        "steps                6 in 1:30",
        f"run                  {run.path}",
        "",
        "try next",
        "  gradus explain quickstart",
    ]


def test_a_run_that_never_trained_still_has_a_summary(run):
    assert summarize(run).last_loss is None
    assert summary_text(run) == f"steps  0\nrun    {run.path}"


def test_steps_of_a_script_are_not_said_to_be_none(run):
    run.new_attempt({"command.json": "{}"})
    assert lines_about(run, "steps") == ["– (those of a script are not counted)"]
    log = AppendLog(run.metrics_path)
    log.write({"step": 3, "attempt": 1, "loss": 1.0})
    log.close()
    assert lines_about(run, "steps") == ["3"], "a loop of its own tells them"


def evaluated(run, *values, name="loss"):
    log = AppendLog(run.metrics_path)
    for step, value in enumerate(values, start=1):
        log.write({"step": step, "attempt": 1, "loss": 1.0})
        log.write({"step": step, "attempt": 1, "validation_loss": 2.0, f"validation_{name}": value})
    log.close()


def lines_about(run, label):
    return [line.removeprefix(label).strip() for line in summary_text(run).splitlines() if line.startswith(label)]


def test_the_best_evaluation_is_told_with_its_step(run):
    evaluated(run, 3.0, 1.5, 1.75)
    assert lines_about(run, "validation loss") == ["1.75 (best 1.5 at step 2)"]


def test_what_is_best_is_as_the_recipe_says(run):
    run.new_attempt()
    recipe = {"name": "own", "batch": 1, "steps": 1, "evaluate": {"metric": "error", "better": "lower"}}
    (run.attempt_path(1) / "recipe.yaml").write_text(json.dumps(recipe))
    evaluated(run, 0.5, 0.25, 0.25, 0.75, name="error")
    assert lines_about(run, "validation error") == ["0.75 (best 0.25 at step 2)"]
    assert lines_about(run, "validation loss") == ["2"], "another metric counts"


def test_a_users_own_metric_is_told_beside_the_loss(run):
    evaluated(run, 0.125, name="top5")
    assert lines_about(run, "validation top5") == ["0.125"]
    assert [line.split("  ")[0] for line in summary_text(run).splitlines()][1:3] == [
        "validation loss",
        "validation top5",
    ]


def test_an_evaluation_that_was_no_number_is_not_the_best(run):
    evaluated(run, float("nan"), 2.5, 3.5)
    assert summarize(run).best == (2, 2.5)


def test_the_time_between_attempts_does_not_count(run):
    for attempt, (start, end) in enumerate([("00:00", "01:00"), ("30:00", "30:30")], start=1):
        writer = f"launcher-attempt-{attempt}"
        lines = [{"time": f"2026-01-01T00:{at}.000+00:00", "writer": writer, "event": "x"} for at in (start, end)]
        (run.events / f"{writer}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(run).wall_seconds == 90
