import sys

import pytest

from gradus.record.append_log import AppendLog
from gradus.record.tensorboard import TensorBoardExporter, export_tensorboard
from gradus.schema.errors import InputError


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [(point.step, round(point.value, 4)) for point in accumulator.Scalars(tag)]


def test_tensorboard_reads_the_metrics_back(run):
    log = AppendLog(run.metrics_path)
    for step in (1, 2, 3):
        log.write({"step": step, "attempt": 1, "loss": 1 / step})
    log.write({"step": 3, "attempt": 1, "validation_loss": 0.25})
    folder = export_tensorboard(run)
    assert folder == run.path / "tensorboard"
    assert scalars(folder, "train/loss") == [(1, 1.0), (2, 0.5), (3, 0.3333)]
    assert scalars(folder, "validation/loss") == [(3, 0.25)]


def test_exporting_twice_changes_nothing(run, tmp_path):
    AppendLog(run.metrics_path).write({"step": 1, "attempt": 1, "loss": 1.0})
    folder = export_tensorboard(run, tmp_path / "board")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    export_tensorboard(run, tmp_path / "board")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_live_export_follows_and_a_later_attempt_replaces_the_steps_of_an_earlier_one(run):
    log = AppendLog(run.metrics_path)
    exporter = TensorBoardExporter(run)
    for step in (1, 2, 3):
        log.write({"step": step, "attempt": 1, "loss": 1.0})
    exporter.poll()
    assert scalars(exporter.target, "train/loss") == [(1, 1.0), (2, 1.0), (3, 1.0)]
    for step in (2, 3, 4):
        log.write({"step": step, "attempt": 2, "loss": 2.0})
    exporter.poll()
    exporter.close()
    assert scalars(exporter.target, "train/loss") == [(1, 1.0), (2, 2.0), (3, 2.0), (4, 2.0)]


def test_a_full_disk_ends_the_live_export_with_one_word_and_no_exception(run, tmp_path):
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "events.out.tfevents.0.gradus").symlink_to("/dev/full")
    problems: list[str] = []
    exporter = TensorBoardExporter(run, tmp_path / "board", problems.append)
    AppendLog(run.metrics_path).write({"step": 1, "attempt": 1, "loss": 1.0})
    exporter.poll()
    exporter.poll()
    exporter.close()
    assert "No space left on device" in problems[0]


def test_without_the_package_the_hint_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary.writer.record_writer", None)
    with pytest.raises(InputError) as refusal:
        export_tensorboard(run)
    assert "gradus[tensorboard]" in refusal.value.hint


def test_metrics_that_cannot_be_read_are_told_and_not_exported_as_nothing(run):
    run.metrics_path.mkdir()
    with pytest.raises(InputError, match="cannot read"):
        export_tensorboard(run)
