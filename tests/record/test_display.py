import io
import os
import pty
import subprocess
import sys

import pytest

from gradus.record import display as display_module
from gradus.record.append_log import AppendLog
from gradus.record.display import Display
from gradus.record.status import Status, write_status


@pytest.fixture
def clock(monkeypatch):
    """The ten seconds between two plain lines, without waiting for them."""
    now = [1000.0]
    monkeypatch.setattr(display_module.time, "monotonic", lambda: now[0])
    return now


def train(run, *steps, **more):
    log = AppendLog(run.metrics_path)
    for step in steps:
        log.write(
            {"step": step, "attempt": 1, "loss": 5 / step, "tokens_per_second": 41234, "step_seconds": 0.5, **more}
        )
    log.close()


def test_elsewhere_there_is_a_first_line_then_one_every_ten_seconds_then_the_last(run, clock):
    stream = io.StringIO()
    display = Display(run, 200, stream)
    display.poll()
    assert stream.getvalue() == ""
    for second in range(25):
        clock[0] += 1
        train(run, second + 1)
        display.poll()
    display.close()
    lines = stream.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 1/200", "step 11/200", "step 21/200", "step 25/200"]
    assert lines[1] == "step 11/200  loss 0.4545  41.2 k tok/s  ETA 1:34"


def test_a_number_of_steps_that_comes_late_is_shown_at_last(run, clock):
    """Rank 0 counts the data, and its status is written shortly after: in a short run, after all records."""
    stream = io.StringIO()
    display = Display(run, None, stream)
    train(run, 12)
    display.poll()
    write_status(run, Status("finished", step=12, steps_total=12))
    display.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 12", "step 12/12"]


def test_a_step_beyond_a_budget_that_was_cut_is_not_one_of_so_many(run, clock):
    stream = io.StringIO()
    train(run, 55)
    display = Display(run, 10, stream)
    display.poll()
    display.close()
    assert [line.split("  ")[0] for line in stream.getvalue().splitlines()] == ["step 55"]


def test_nothing_new_is_not_repeated(run, clock):
    stream = io.StringIO()
    display = Display(run, None, stream)
    train(run, 1)
    for _ in range(3):
        display.poll()
        clock[0] += 60
    display.close()
    assert stream.getvalue() == "step 1  loss 5  41.2 k tok/s\n"


def test_validation_loss_and_samples_are_shown_where_there_are_some(run, clock):
    stream = io.StringIO()
    train(run, 200, tokens_per_second=None, samples_per_second=12.0)
    AppendLog(run.metrics_path).write({"step": 200, "attempt": 1, "validation_loss": 1.5})
    Display(run, 200, stream).close()
    assert stream.getvalue() == "step 200/200  loss 0.025  validation loss 1.5  12 samples/s\n"


def test_a_users_own_metrics_are_shown_beside_the_validation_loss(run, clock):
    stream = io.StringIO()
    train(run, 200)
    evaluation = {"validation_top5": 0.5, "validation_loss": 1.5, "validation_accuracy": 0.875}
    AppendLog(run.metrics_path).write({"step": 200, "attempt": 1, **evaluation})
    Display(run, 200, stream).close()
    assert "  validation loss 1.5, top5 0.5, accuracy 87.5%  " in stream.getvalue()


def test_lines_of_hooks_and_of_ema_do_not_hide_the_losses(run, clock):
    stream = io.StringIO()
    log = AppendLog(run.metrics_path)
    train(run, 200)
    log.write({"step": 200, "attempt": 1, "validation_loss": 1.5, "validation_accuracy": 0.5})
    log.write({"step": 200, "attempt": 1, "validation_ema_loss": 1.25, "validation_ema_accuracy": 0.875})
    log.write({"step": 200, "attempt": 1, "own": 1.0})
    log.write({"step": 201, "attempt": 1, "own": 2.0})  # the loss of its step has not arrived yet
    Display(run, 300, stream).close()
    shown = "validation loss 1.5, accuracy 50.0%, ema_loss 1.25, ema_accuracy 87.5%"
    assert stream.getvalue() == f"step 200/300  loss 0.025  {shown}  41.2 k tok/s  ETA 0:50\n"


def test_numbers_that_were_written_before_those_of_their_step_do_not_hide_them(run, clock):
    stream = io.StringIO()
    log = AppendLog(run.metrics_path)
    log.write({"step": 1, "attempt": 1, "own": 1.0})
    log.write({"step": 2, "attempt": 1, "own": 1.0})
    train(run, 1, 2)
    Display(run, 300, stream).close()
    assert stream.getvalue().startswith("step 2/300  loss 2.5  ")


def test_a_validation_loss_of_discarded_work_is_not_shown(run, clock):
    stream = io.StringIO()
    train(run, 200)
    AppendLog(run.metrics_path).write({"step": 200, "attempt": 1, "validation_loss": 1.5})
    train(run, 50, attempt=2)
    Display(run, None, stream).close()
    assert stream.getvalue() == "step 50  loss 0.1  41.2 k tok/s\n"


def test_a_reader_that_went_away_silences_the_display_and_nothing_else(run):
    read_end, write_end = os.pipe()
    os.close(read_end)
    with open(write_end, "w", closefd=True) as stream:
        display = Display(run, 10, stream, plain=True)
        train(run, 1)
        display.poll()
        display.say("still here")
        display.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write_end)


ON_A_TERMINAL = """
import sys
from pathlib import Path
from gradus.record.directory import RunDirectory
from gradus.record.display import Display
from gradus.record.status import Status, write_status

display = Display(RunDirectory(Path(sys.argv[1])), 200)
display.poll()
display.say("a word [above] the bar")
display.close()
"""


def test_on_a_terminal_there_is_a_bar(run):
    train(run, 1, 120)
    AppendLog(run.metrics_path).write({"step": 120, "attempt": 1, "validation_loss": 2.5})
    controller, terminal = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if key != "CI"}
    subprocess.run(
        [sys.executable, "-c", ON_A_TERMINAL, str(run.path)],
        stderr=terminal,
        check=True,
        env={**environment, "TERM": "xterm", "COLUMNS": "120"},
    )
    shown = os.read(controller, 100_000).decode()
    for handle in (controller, terminal):
        os.close(handle)
    assert "━" in shown
    assert "a word [above] the bar" in shown
    assert "step 120/200  loss 0.04167  validation loss 2.5  41.2 k tok/s  ETA 0:40  elapsed 0:00" in shown


def test_importing_the_display_imports_neither_rich_nor_torch():
    code = (
        "import sys, gradus.record.display, gradus.record.tensorboard; assert not {'rich', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
