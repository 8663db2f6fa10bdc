"""History: what a run kept, followed as it grows, in memory that does not grow with it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from report_runs import made_up_run

from gradus.record.device_log import energy_of, read_device_samples
from gradus.record.directory import RunDirectory
from gradus.record.history import History, LogStream
from gradus.record.metrics import read_metrics
from gradus.record.timings import mean_seconds, read_timings


def history_of(run: RunDirectory) -> History:
    found = History(run)
    found.poll()
    return found


def points(history: History, name: str) -> list[tuple[float, float]]:
    return history.metrics[name].points


@pytest.mark.parametrize("attempts", [((1, 60),), ((1, 45), (41, 60)), ((1, 30), (21, 50), (41, 60))])
def test_it_is_what_reading_all_of_the_metrics_gives(tmp_path, attempts):
    run = made_up_run(tmp_path, attempts=attempts)
    rows = read_metrics(run)
    found = history_of(run)
    for name in ("loss", "tokens_per_second", "validation_loss"):
        assert points(found, name) == [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def test_what_was_rolled_back_is_no_part_of_it(tmp_path):
    run = made_up_run(tmp_path)
    with run.metrics_path.open("a") as file:
        for record in ({"rolled_back_to": 40, "attempt": 1}, {"step": 41, "attempt": 1, "loss": 9.0}):
            file.write(json.dumps(record) + "\n")
    found = history_of(run)
    assert points(found, "loss")[-2:] == [(40, pytest.approx(2.2, abs=0.1)), (41, 9.0)]
    assert found.last_step == 41
    assert len(found.rates["tokens_per_second"].values) == 40


def test_a_file_that_grows_is_read_on_where_it_ended(tmp_path):
    path = tmp_path / "log.jsonl"
    stream = LogStream(path)
    assert list(stream) == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(stream) == [{"a": 1}]
    path.write_text('{"a": 1}\n{"a": 2}\nno record\n[1]\n{"a": 3}\n')
    assert list(stream) == [{"a": 2}, {"a": 3}]
    assert stream.broken == 2
    assert list(stream) == []


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"x" * (9 << 20) + b'\n{"a": 1}\n')
    assert list(LogStream(path)) == [{"a": 1}]


def test_poll_says_whether_there_was_anything(tmp_path):
    run = made_up_run(tmp_path)
    found = History(run)
    assert found.poll()
    assert not found.poll()


def test_time_by_kind_is_what_the_timings_say_of_the_steps_that_were_kept(tmp_path):
    run = made_up_run(tmp_path, attempts=((1, 45), (41, 60)), ranks=3, slow_rank=1)
    xs, kinds = history_of(run).kept_kinds()
    assert xs == sorted(set(xs))
    assert set(kinds) == {"data", "forward", "backward", "optimizer", "other", "exposed_communication"}
    expected = mean_seconds(read_timings(run))
    for kind, column in kinds.items():
        assert len(column) == len(xs)
        assert sum(column) / len(column) == pytest.approx(expected[kind], rel=1e-6)


def test_a_later_line_of_the_same_step_replaces_the_earlier_one(tmp_path):
    run = made_up_run(tmp_path, steps=4, ranks=1)
    [path] = (run.path / "timings").iterdir()
    last = json.loads(path.read_text().splitlines()[-1])
    last["seconds"] |= {"checkpoint": 1.0, "forward": 0.07}
    with path.open("a") as file:
        file.write(json.dumps(last) + "\n")
    windows = history_of(run).kinds[1]
    assert windows.mean("forward") == pytest.approx(0.04)
    assert windows.means("checkpoint")[-1] == pytest.approx(1.0)


def test_a_rank_has_its_own_time(tmp_path):
    found = history_of(made_up_run(tmp_path, ranks=3, slow_rank=1))
    assert {rank: found.own[1].mean(rank) for rank in "012"} == pytest.approx({"0": 0.1, "1": 0.13, "2": 0.1})


def test_energy_is_that_of_all_samples(tmp_path):
    run = made_up_run(tmp_path, attempts=((1, 45), (41, 60)))
    assert history_of(run).energy() == energy_of(read_device_samples(run))


def test_energy_survives_a_counter_that_was_set_back(tmp_path):
    run = made_up_run(tmp_path)
    [path] = (run.path / "devices").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines[30:]:
        for gpu in line["gpus"]:
            gpu["energy_joules"] -= 25_000.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert history_of(run).energy().joules == energy_of(read_device_samples(run)).joules


def test_a_moment_is_the_step_that_was_made_then(tmp_path):
    found = history_of(made_up_run(tmp_path))
    begin = found.times.points[0][1]
    assert found.step_at(begin - 100) == 1
    assert found.step_at(begin + 1.0) == 11
    assert found.step_at(begin + 1e6) == 60


def _long_run(folder: Path, lines: int) -> RunDirectory:
    run = RunDirectory.create(folder, "long", "one")
    run.new_attempt()
    with run.metrics_path.open("w") as file:
        for step in range(1, lines + 1):
            file.write(
                f'{{"step": {step}, "attempt": 1, "samples": {step * 8}, "tokens": {step * 2048}, '
                f'"loss": {3 + 1 / step + (step % 97) / 1000:.6f}, "lr": 0.001, "grad_norm": {1 + (step % 13) / 10}, '
                f'"step_seconds": 0.1, "data_seconds": 0.001, "samples_per_second": 80.0, '
                f'"tokens_per_second": {20480 + step % 7}, "mfu": 0.4, "memory_peak_bytes": 477192192}}\n'
            )
    return run


def test_many_lines_become_few_points(tmp_path):
    found = history_of(_long_run(tmp_path, 20_000))
    assert found.logged_lines == 20_000
    assert all(len(series) <= 3004 for series in found.metrics.values())
    assert found.rates["tokens_per_second"].median == 20483


@pytest.mark.slow
@pytest.mark.long
def test_a_million_lines_are_read_in_little_memory_and_make_a_small_page(tmp_path):
    run = _long_run(tmp_path, 1_000_000)
    script = f"""
import resource
from pathlib import Path
from gradus.diagnosis.report.run_report import RunReport
from gradus.record.directory import RunDirectory
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
report = RunReport(RunDirectory(Path({str(run.path)!r})))
page = report.page()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, len(page), report.history.logged_lines)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    mebibytes, size, lines = map(float, done.stdout.split())
    assert lines == 1_000_000
    assert mebibytes < 250
    assert size < 1_000_000
