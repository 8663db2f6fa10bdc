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
    log.write({"step": 1, "attempt": 1, "loss": 3.0})
    log.write({"step": 2, "attempt": 1, "validation_loss": 8.0, "validation_accuracy": 0.5})
    assert read_metrics(run) == [
        {"step": 1, "attempt": 1, "loss": 3.0, "validation_loss": 9.0},
        {"step": 2, "attempt": 1, "validation_loss": 8.0, "validation_accuracy": 0.5},
    ]


def write_attempt(run, attempt, training=(), evaluations=()):
    log = AppendLog(run.metrics_path)
    for step in training:
        log.write({"step": step, "attempt": attempt, "loss": attempt + step / 1000})
    for step in evaluations:
        log.write({"step": step, "attempt": attempt, "validation_loss": attempt + step / 1000})
    log.close()


def test_what_an_attempt_did_after_the_checkpoint_that_a_later_one_went_on_from_is_no_longer_told(run):
    write_attempt(run, 1, training=range(1, 101), evaluations=[50, 51, 100])
    write_attempt(run, 2, training=range(51, 61))
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == list(range(1, 61))
    assert [row["attempt"] for row in rows] == [1] * 50 + [2] * 10
    assert {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row} == {50: 1.05}


def test_an_attempt_that_has_logged_nothing_discards_nothing(run):
    write_attempt(run, 1, training=[10, 20], evaluations=[20])
    write_attempt(run, 2)
    assert [row["step"] for row in read_metrics(run)] == [10, 20]
    assert read_metrics(run)[-1]["validation_loss"] == 1.02


def test_the_latest_attempt_decides_also_when_it_goes_back_furthest(run):
    write_attempt(run, 1, training=range(1, 10))
    write_attempt(run, 2, training=range(8, 20))
    write_attempt(run, 3, training=range(4, 6))
    assert [(row["step"], row["attempt"]) for row in read_metrics(run)] == [(1, 1), (2, 1), (3, 1), (4, 3), (5, 3)]


def test_an_evaluation_done_again_does_not_discard_the_training_before_it(run):
    write_attempt(run, 1, training=range(1, 7), evaluations=[4])
    write_attempt(run, 2, evaluations=[4])
    rows = read_metrics(run)
    assert [(row["step"], row["attempt"]) for row in rows] == [(1, 1), (2, 1), (3, 1), (4, 1)]
    assert rows[-1]["validation_loss"] == 2.004


def test_a_file_that_cannot_be_read_now_is_read_at_a_later_poll(run):
    tail = LogTail(run.metrics_path)
    run.metrics_path.mkdir()  # as good an OSError as a stale handle
    assert tail.poll() == []
    run.metrics_path.rmdir()
    write_attempt(run, 1, training=[1])
    assert [record["step"] for record in tail.poll()] == [1]


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
