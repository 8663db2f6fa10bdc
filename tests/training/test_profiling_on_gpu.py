"""A trace and a memory snapshot of a real GPU.

Also to be run without pytest: PYTHONPATH=src python tests/training/test_profiling_on_gpu.py
"""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

from gradus.diagnosis.timeline.analysis import TraceAnalysis, analyse
from gradus.schema.profile_request import ProfileRequest
from gradus.training.profiling import Profiling

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def recorded(folder: Path, text: str, *, sync: bool = False, precision: torch.dtype = torch.bfloat16) -> TraceAnalysis:
    """Five steps of a few matrix products, recorded as a run would."""
    told: list[dict[str, object]] = []
    device = torch.device("cuda")
    request = ProfileRequest.parse(text)
    profiling = Profiling(
        request,
        range(3, 3 + request.steps),
        folder / "traces",
        attempt=1,
        rank=0,
        world_size=1,
        device=device,
        tell=told.append,
        listen=lambda to: None,
    )
    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).to(device, precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(4096, 2048, device=device, dtype=precision)
    for step in range(1, 10):
        profiling.phase("forward")
        loss = model(x).float().pow(2).mean()
        if sync:
            loss.item()
        profiling.phase("backward")
        loss.backward()
        profiling.phase("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        profiling.at(step)
    profiling.close()
    assert told, "the trace was told of"
    print(told[-1]["message"])
    return analyse(folder / str(told[-1]["path"]))


def test_a_busy_gpu_is_found_busy_on_its_tensor_cores(tmp_path: Path) -> None:
    found = recorded(tmp_path, "steps=5")
    assert found.device == "cuda"
    assert found.steps == 5
    assert found.kernels > 5 * 6
    assert found.busy_seconds > 0.5 * found.span_seconds
    assert found.matmul_seconds > 0.5 * found.busy_seconds
    assert found.tensor_core_seconds == pytest.approx(found.matmul_seconds, rel=0.01)
    assert {"forward", "backward", "optimizer"} <= set(found.phase_seconds)


def test_products_in_fp32_are_found_off_the_tensor_cores(tmp_path: Path) -> None:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        found = recorded(tmp_path, "steps=3", precision=torch.float32)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert found.matmul_off_tensor_cores_seconds is not None
    assert found.matmul_off_tensor_cores_seconds > 0.9 * found.matmul_seconds


def test_a_sync_is_named_with_its_line(tmp_path: Path) -> None:
    found = recorded(tmp_path, "steps=3,stacks", sync=True)
    syncs = [one for one in found.syncs if one.name == "aten::item" and one.by_library is False]
    assert [one.count for one in syncs] == [3]
    assert syncs[0].file is not None
    line = Path(syncs[0].file).read_text().splitlines()[(syncs[0].line or 0) - 1]
    assert "loss.item()" in line


def test_a_memory_snapshot_lies_beside_the_trace(tmp_path: Path) -> None:
    recorded(tmp_path, "steps=2,memory")
    snapshot = tmp_path / "traces" / "attempt-1-rank-0-memory.pickle"
    assert snapshot.stat().st_size > 1000


if __name__ == "__main__":
    failed = 0
    for test in (
        test_a_busy_gpu_is_found_busy_on_its_tensor_cores,
        test_products_in_fp32_are_found_off_the_tensor_cores,
        test_a_sync_is_named_with_its_line,
        test_a_memory_snapshot_lies_beside_the_trace,
    ):
        with tempfile.TemporaryDirectory() as folder:
            try:
                test(Path(folder))
                print(f"passed: {test.__name__}")
            except Exception:
                failed += 1
                print(f"FAILED: {test.__name__}")
                traceback.print_exc()
            for trace in Path(folder).glob("traces/*.json.gz"):
                print(json.dumps({**analyse(trace).document(), "path": trace.name}, indent=1))
    sys.exit(failed > 0)
