"""What Prometheus reads: every number under its name, with its labels, and nothing that was not measured."""

from __future__ import annotations

import math
import re
import shutil
import time
from importlib import resources
from pathlib import Path

import pytest
import real_prometheus
import yaml
from watched_runs import begin, fail, save, say, train

from gradus.diagnosis.live.followed import KEPT_SECONDS, Folder
from gradus.diagnosis.live.prometheus import FAMILIES, exposition, write_textfile
from gradus.record.append_log import AppendLog
from gradus.record.device_log import DeviceLog
from gradus.record.directory import RunDirectory
from gradus.record.timings import TimingLog
from gradus.schema.breakdown import Breakdown
from gradus.schema.device_sample import DeviceSample, GpuSample, HostSample

ALERTS = resources.files("gradus.diagnosis.live").joinpath("alerts.yaml")
LINE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


@pytest.fixture
def whole(tmp_path: Path) -> RunDirectory:
    """A run in its second attempt, on a node with two GPUs, of which one says little."""
    run = RunDirectory.create(tmp_path / "runs", "gpt", "r1")
    train(run, begin(run), 1, 30)
    save(run, 20)
    fail(run, 1, 30, step_saved=20)
    train(run, begin(run, step=20), 21, 40)
    log = AppendLog(run.metrics_path)
    log.write({"step": 40, "attempt": 2, "validation_loss": 4.5, "validation_accuracy": 0.25})
    log.write({"step": 41, "attempt": 2, "loss": 4.0, "lr": 0.001, "grad_norm": 1.5, "mfu": 0.4, "step_seconds": 0.5})
    for rank in (0, 1):
        seconds = {"data": 0.1, "forward": 0.2 + 0.2 * rank, "backward": 0.2 - 0.2 * rank}
        window = {"attempt": 2, "rank": rank, "node": "n1", "steps": 10, "measured_steps": 10, "step_seconds": 0.5}
        for step in (30, 40):
            one = Breakdown(**window, time=1.0, step=step, seconds=seconds, own_seconds=0.3, memory_peak_bytes=2**20)
            TimingLog(run, rank).write(one)
    full = GpuSample(
        index=0,
        utilisation=0.9,
        memory_used_bytes=2**30,
        memory_total_bytes=2**31,
        power_watts=300.5,
        power_limit_watts=700.0,
        temperature_celsius=60.0,
        clock_mhz=1500,
        clock_max_mhz=1980,
        throttle=("software power cap",),
        energy_joules=123456.5,
    )
    host = HostSample(cpu_utilisation=0.5, memory_used_bytes=2**32, memory_total_bytes=2**33)
    sample = DeviceSample(time=time.time(), attempt=2, node="n1", gpus=(full, GpuSample(index=1)), host=host)
    DeviceLog(run, "n1").write(sample)
    say(run, "running", 41, attempt=2)
    return run


def lines_of(text: str) -> dict[str, float]:
    """By name and labels; each is there once."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match is not None, line
        key = f"{match[1]}{{{match[2]}}}"
        assert key not in found, f"twice: {key}"
        found[key] = float(match[3])
    return found


def scraped(run: RunDirectory) -> dict[str, float]:
    return lines_of(exposition(Folder(run.path.parents[1]).snapshots(), 1))


def test_every_number_of_a_run_is_there(whole):
    found = scraped(whole)
    run = 'run="r1",name="gpt"'
    gpu = f'{run},node="n1",gpu="0"'
    expected = {
        f'gradus_run_state{{{run},state="running"}}': 1,
        f'gradus_run_state{{{run},state="lost"}}': 0,
        f"gradus_run_step{{{run}}}": 41,
        f"gradus_run_steps_planned{{{run}}}": 100,
        f"gradus_run_loss{{{run}}}": 4.0,
        f'gradus_run_validation{{{run},metric="loss"}}': 4.5,
        f'gradus_run_validation{{{run},metric="accuracy"}}': 0.25,
        f"gradus_run_learning_rate{{{run}}}": 0.001,
        f"gradus_run_gradient_norm{{{run}}}": 1.5,
        f"gradus_run_tokens_per_second{{{run}}}": 2000.0,
        f"gradus_run_mfu{{{run}}}": 0.4,
        f'gradus_run_step_seconds{{{run},kind="data"}}': 0.1,
        f'gradus_run_step_seconds{{{run},kind="forward"}}': pytest.approx(0.3),
        f'gradus_run_step_seconds{{{run},kind="backward"}}': pytest.approx(0.1),
        f"gradus_run_step_duration_seconds{{{run}}}": 0.5,
        f'gradus_run_rank_own_seconds{{{run},node="n1",rank="1"}}': 0.3,
        f'gradus_run_rank_memory_peak_bytes{{{run},node="n1",rank="0"}}': 2**20,
        f"gradus_run_restarts_total{{{run}}}": 1,
        f"gradus_run_lost_steps_total{{{run}}}": 10,
        f"gradus_run_saved_step{{{run}}}": 20,
        f"gradus_gpu_utilisation_ratio{{{gpu}}}": 0.9,
        f"gradus_gpu_memory_used_bytes{{{gpu}}}": 2**30,
        f"gradus_gpu_power_watts{{{gpu}}}": 300.5,
        f"gradus_gpu_temperature_celsius{{{gpu}}}": 60.0,
        f"gradus_gpu_clock_hertz{{{gpu}}}": 1.5e9,
        f'gradus_gpu_throttled{{{gpu},reason="software power cap"}}': 1,
        f"gradus_gpu_energy_joules_total{{{gpu}}}": 123456.5,
        f'gradus_host_cpu_utilisation_ratio{{{run},node="n1"}}': 0.5,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert 0 < found[f"gradus_run_goodput{{{run}}}"] <= 1
    assert abs(found[f"gradus_run_last_update_timestamp_seconds{{{run}}}"] - time.time()) < 600


def test_what_a_gpu_does_not_say_is_not_there(whole):
    assert not [key for key in scraped(whole) if 'gpu="1"' in key]


def test_a_run_of_an_older_version_has_what_it_has(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "old", "r1")
    train(run, begin(run), 1, 30)
    found = scraped(run)
    assert found['gradus_run_step_duration_seconds{run="r1",name="old"}'] == 0.5
    assert not [key for key in found if "kind=" in key or "gpu" in key]


def test_a_loss_that_is_no_number_is_told(whole):
    AppendLog(whole.metrics_path).write({"step": 42, "attempt": 2, "loss": math.nan, "grad_norm": math.inf})
    text = exposition(Folder(whole.path.parents[1]).snapshots())
    assert 'gradus_run_loss{run="r1",name="gpt"} NaN\n' in text
    assert 'gradus_run_gradient_norm{run="r1",name="gpt"} +Inf\n' in text


def test_labels_may_have_anything_in_them(whole):
    odd = DeviceSample(time=time.time(), attempt=2, node='n"2\\\n', host=HostSample(cpu_utilisation=1.0))
    DeviceLog(whole, "n2").write(odd)
    text = exposition(Folder(whole.path.parents[1]).snapshots())
    assert r'node="n\"2\\\n"' in text


def test_a_run_that_is_over_has_no_speed_and_no_gpu(whole):
    say(whole, "finished", 100, attempt=2)
    found = scraped(whole)
    assert found['gradus_run_state{run="r1",name="gpt",state="finished"}'] == 1
    assert not [key for key in found if "per_second" in key or "gpu" in key or "step_seconds" in key]


def test_a_node_that_fell_silent_has_no_utilisation(whole):
    text = exposition(Folder(whole.path.parents[1]).snapshots(), now=time.time() + 61)
    assert "gradus_gpu" not in text
    assert "gradus_run_loss" in text


@pytest.mark.parametrize(("state", "kept"), [("finished", 3600.0), ("failed", 86400.0)])
def test_runs_that_ended_long_ago_drop_out(tmp_path, state, kept):
    from datetime import datetime, timedelta, timezone

    folder = Folder(tmp_path / "runs")
    assert KEPT_SECONDS[state] == kept
    for name, age in (("new", kept - 60), ("old", kept + 60)):
        run = RunDirectory.create(tmp_path / "runs", name, "r1")
        begin(run)
        say(run, state, 1, updated_at=datetime.now(timezone.utc) - timedelta(seconds=age))
    assert [run.name for run in folder.that_matter()] == ["new"]


def test_a_text_file_is_whole_or_not_there_and_others_may_read_it(tmp_path):
    path = tmp_path / "gradus.prom"
    write_textfile(path, "gradus_runs 1\n")
    write_textfile(path, "gradus_runs 2\n")
    assert path.read_text() == "gradus_runs 2\n"
    assert path.stat().st_mode & 0o777 == 0o644
    assert [one.name for one in tmp_path.iterdir()] == ["gradus.prom"]
    with pytest.raises(OSError, match="No such file"):
        write_textfile(tmp_path / "nowhere" / "gradus.prom", "")


def test_alerts_speak_only_of_metrics_that_there_are():
    rules = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    named = {name for rule in rules for name in re.findall(r"gradus_\w+", rule["expr"])}
    assert named <= set(FAMILIES)
    assert len(rules) >= 8


@real_prometheus.needed
def test_promtool_finds_no_fault_with_the_metrics(whole):
    text = exposition(Folder(whole.path.parents[1]).snapshots(), 1)
    assert not real_prometheus.promtool("check", "metrics", given=text)


@real_prometheus.needed
def test_alerts_are_up_when_they_should_be_and_only_then(tmp_path):
    (tmp_path / "alerts.yaml").write_text(ALERTS.read_text())
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)
    assert "SUCCESS" in real_prometheus.promtool("check", "rules", tmp_path / "alerts.yaml")
    assert "SUCCESS" in real_prometheus.promtool("test", "rules", tmp_path / "alerts_test.yaml")
