"""Where the host reads values of the device: file and line, from traces that were really recorded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gradus.diagnosis.timeline.analysis import TraceAnalysis, analyse

USER_FILE = """\
import torch

weight = torch.ones(4, requires_grad=True)
optimizer = torch.optim.AdamW([weight], foreach=False)


def step(x):
    loss = (weight * x).sum()
    first = loss.item()
    if loss > 1000:
        raise ValueError(first)
    seen = float(loss.detach())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return first + seen + loss.item()
"""


@pytest.fixture
def user(tmp_path: Path) -> ModuleType:
    (tmp_path / "loop_of_mine.py").write_text(USER_FILE)
    spec = importlib.util.spec_from_file_location("loop_of_mine", tmp_path / "loop_of_mine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(user: ModuleType, path: Path, *, stacks: bool) -> TraceAnalysis:
    user.step(torch.ones(4))
    with profile(activities=[ProfilerActivity.CPU], with_stack=stacks) as profiler:
        profiler.add_metadata_json("gradus", json.dumps({"paths": [str(path.parent)]}))
        for _ in range(3):
            with record_function("gradus:step"):
                user.step(torch.ones(4))
    profiler.export_chrome_trace(str(path))
    return analyse(path)


def test_each_sync_is_named_with_its_line(user: ModuleType, tmp_path: Path) -> None:
    found = recorded(user, tmp_path / "trace.json", stacks=True)
    assert found.steps == 3
    mine = {(sync.name, sync.line, sync.count) for sync in found.syncs if not sync.by_library}
    assert mine == {("aten::item", 9, 3), ("aten::is_nonzero", 10, 3), ("aten::item", 12, 3), ("aten::item", 16, 3)}
    assert {sync.file for sync in found.syncs if not sync.by_library} == {str(tmp_path / "loop_of_mine.py")}


def test_what_torchs_optimizer_reads_is_not_laid_at_the_users_door(user: ModuleType, tmp_path: Path) -> None:
    found = recorded(user, tmp_path / "trace.json", stacks=True)
    (inside,) = [sync for sync in found.syncs if sync.by_library]
    assert (inside.phase, inside.count) == ("optimizer", 3)


def test_without_stacks_syncs_are_counted_and_the_missing_lines_are_said_to_be_so(
    user: ModuleType, tmp_path: Path
) -> None:
    found = recorded(user, tmp_path / "trace.json", stacks=False)
    assert sum(sync.count for sync in found.syncs if sync.phase is None) == 12
    assert all(sync.file is None for sync in found.syncs)
    assert any("stacks" in line for line in found.not_measured)


def test_a_real_trace_is_consistent(user: ModuleType, tmp_path: Path) -> None:
    found = recorded(user, tmp_path / "trace.json", stacks=False)
    assert found.device == "cpu"
    assert 0 < found.compute_seconds == found.busy_seconds < found.span_seconds
    assert found.busy_seconds + found.idle_seconds == pytest.approx(found.span_seconds)
    assert sum(kernel.seconds for kernel in found.top_kernels) <= found.busy_seconds * 1.0001
