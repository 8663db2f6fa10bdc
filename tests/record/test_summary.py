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
