"""Host sync: from the text of a script alone, and together with what a trace measured."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diagnosis.dead_runs import findings, written_run

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.finding import Finding
from gradus.diagnosis.rules.host_sync import host_sync
from gradus.diagnosis.timeline.trace_analysis import SyncPoint, TraceAnalysis
from gradus.diagnosis.user_source.files import user_files
from gradus.diagnosis.user_source.loaders import training_loader
from gradus.record.directory import RunDirectory

WAITS = """
from engine import train_epoch
train_epoch(model, loader)
"""
ENGINE = """
def train_epoch(model, loader):
    for x, y in loader:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        total += loss.item()
        optimizer.zero_grad()
"""
TRACE = TraceAnalysis(
    *("t.json.gz", 0, "cuda", 10, 1.0, 0.7, 0.7, 0.0, 0.0, None, 0.0, 0.3, 0.05, 0.0, 0.2, 0.05, 100, 0, 0.0, 0.5),
    *(0.5, 0.0),
    syncs=(SyncPoint("aten::item", 10, 0.25, "train.py", 99, 1.0),),
    top_kernels=(),
    collectives=(),
    phase_seconds={},
    world_size=1,
    device_name=None,
    median_gap_seconds=None,
    truncated=False,
    not_measured=(),
)


class WithTraces(Evidence):
    """Evidence whose traces have been analysed."""

    traces: Sequence[TraceAnalysis] = ()  # type: ignore[assignment]


def with_trace(run: RunDirectory, **changes: Any) -> Finding | None:
    evidence = WithTraces(run)
    object.__setattr__(evidence, "traces", (replace(TRACE, **changes),))
    return host_sync(evidence)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "engine.py").write_text(ENGINE)
    return written_run(tmp_path, state="finished", script=WAITS, ranks=1)


def test_a_wait_in_a_module_beside_the_script_is_found_with_file_and_line(run: RunDirectory, tmp_path: Path) -> None:
    [found] = findings(run)
    assert found.id == "host-sync"
    assert (found.evidence["file"], found.evidence["line"]) == (str(tmp_path / "engine.py"), 7)
    assert found.gain_at_most is None
    assert found.confidence == "low"  # no GPU: nothing was measured, and little is lost
    assert "`total += loss.detach()`" in found.change


def test_a_trace_gives_the_ceiling_of_the_gain_and_its_own_lines(run: RunDirectory) -> None:
    found = with_trace(run)
    assert found is not None
    assert found.gain_at_most == pytest.approx(0.2)
    assert found.confidence == "high"
    assert found.evidence["line"] == 99  # the line that took most seconds
    assert found.evidence["places_in_all"] == 2


def test_on_a_cpu_a_dataset_may_read_its_numbers(tmp_path: Path) -> None:
    run = written_run(tmp_path, state="finished", ranks=1)
    assert with_trace(run, device="cpu") is None
    assert with_trace(run, syncs=(replace(TRACE.syncs[0], phase="data"),), sync_blocked_seconds=0.0) is None


def test_a_wait_that_a_trace_shows_to_be_harmless_is_not_told(run: RunDirectory) -> None:
    assert with_trace(run, syncs=(), sync_blocked_seconds=0.001, launch_starved_seconds=0.002) is None


def test_a_trace_without_stacks_still_says_that_the_host_waits(tmp_path: Path) -> None:
    run = written_run(tmp_path, state="finished", ranks=1)
    blocked = (SyncPoint("cudaStreamSynchronize", 10, 0.2, per_step=1.0),)
    found = with_trace(run, syncs=blocked)
    assert found is not None
    assert found.gain_at_most == pytest.approx(0.2)
    assert "--profile steps=5,stacks" in found.change
    assert with_trace(run, syncs=(), sync_blocked_seconds=0.0) is None


def test_a_file_that_was_changed_since_the_run_is_told_so(run: RunDirectory, tmp_path: Path) -> None:
    later = (run.attempt_path(1) / "environment.json").stat().st_mtime + 60
    os.utime(tmp_path / "engine.py", (later, later))
    [found] = findings(run)
    assert any("changed after the run began" in line for line in found.not_measured)


def test_a_script_that_is_gone_has_no_finding(run: RunDirectory, tmp_path: Path) -> None:
    (tmp_path / "train.py").unlink()
    assert findings(run) == ()


def test_the_loader_of_training_is_found_with_its_line(tmp_path: Path) -> None:
    text = (
        "val = DataLoader(b, 8)\n"
        "train_loader = torch.utils.data.DataLoader(a, batch_size=64, shuffle=True, num_workers=0)\n"
    )
    found = training_loader(user_files(Evidence.of_run(written_run(tmp_path, state="finished", script=text))))
    assert found is not None
    assert (found.line, found.workers, found.settings["batch_size"]) == (2, 0, "64")
