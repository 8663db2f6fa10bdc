from gradus.record.append_log import AppendLog, LogTail
from gradus.record.metrics import read_metrics


def test_for_a_repeated_step_the_highest_attempt_wins_whatever_the_order(run):
    log = AppendLog(run.metrics_path)
    log.write({"step": 2, "attempt": 2, "loss": 2.2})
    log.write({"step": 1, "attempt": 1, "loss": 1.1})
    log.write({"step": 2, "attempt": 1, "loss": 2.1})
    assert read_metrics(run) == [{"step": 1, "attempt": 1, "loss": 1.1}, {"step": 2, "attempt": 2, "loss": 2.2}]


def test_an_evaluation_joins_the_row_of_its_step(run):
    log = AppendLog(run.metrics_path)
    log.write({"step": 1, "attempt": 1, "validation_loss": 9.0})
    log.write({"step": 1, "attempt": 2, "loss": 3.0})
    log.write({"step": 2, "attempt": 2, "validation_loss": 8.0, "validation_accuracy": 0.5})
    assert read_metrics(run) == [
        {"step": 1, "attempt": 2, "loss": 3.0, "validation_loss": 9.0},
        {"step": 2, "attempt": 2, "validation_loss": 8.0, "validation_accuracy": 0.5},
    ]


def test_a_run_without_metrics_has_no_rows(run):
    assert read_metrics(run) == []
    assert LogTail(run.metrics_path).poll() == []


def test_the_tail_returns_each_record_once_and_waits_for_the_end_of_a_line(run):
    tail = LogTail(run.metrics_path)
    with run.metrics_path.open("a") as file:
        for piece, steps in [('{"step": 1}\n{"st', [1]), ("", []), ('ep": 2}', []), ('\n{"step": 3}\n', [2, 3])]:
            file.write(piece)
            file.flush()
            assert [record["step"] for record in tail.poll()] == steps
