"""Training inside a Jupyter kernel: progress in place, and an interrupt of the kernel is a stop request."""

from __future__ import annotations

import queue
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

FILE = """
import os, time
import torch
from torch import nn


class Slow(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)

    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


def points():
    return [(torch.full((4,), i / 64), torch.ones(1)) for i in range(64)]
"""

TRAIN = """
import gradus
result = gradus.train({
    "name": "cell", "model": {"use": "own.py:Slow"}, "data": {"use": "own.py:points"}, "loss": "mse",
    "batch": 8, "steps": STEPS, "optimizer": {"lr": 1e-3}, "plan": {"workers": 0},
})
"""


class Kernel:
    def __init__(self, folder: Path) -> None:
        self._manager = KernelManager()
        self._manager.start_kernel(cwd=str(folder))
        self._client = self._manager.client()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=60)

    def start(self, code: str) -> str:
        return self._client.execute(code)

    def messages(self, cell: str, seconds: float = 90) -> Iterator[tuple[str, dict[str, Any]]]:
        """What the kernel sends for a cell, until the cell is done."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                message = self._client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != cell:
                continue
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                return
            yield message["msg_type"], message["content"]
        raise AssertionError(f"the cell is not done after {seconds} s")

    def value(self, expression: str) -> str:
        """What a cell with this expression shows."""
        found = dict(self.messages(self.start(expression)))
        assert "error" not in found, found["error"]["traceback"]
        return found["execute_result"]["data"]["text/plain"]

    def interrupt(self) -> None:
        self._manager.interrupt_kernel()

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    folder = tmp_path_factory.mktemp("kernel")
    (folder / "own.py").write_text(FILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("OMP_NUM_THREADS", "1")
        kernel = Kernel(folder)
        yield kernel
        kernel.close()


def test_progress_is_one_output_that_is_replaced(kernel):
    began = time.monotonic()
    found = list(kernel.messages(kernel.start(TRAIN.replace("STEPS", "150"))))
    seconds = time.monotonic() - began
    kinds = [kind for kind, _ in found]
    assert kinds.count("display_data") == 1
    assert "stream" not in kinds, [content for kind, content in found if kind == "stream"]
    updates = [content for kind, content in found if kind == "update_display_data"]
    assert {update["transient"]["display_id"] for update in updates} == {
        content["transient"]["display_id"] for kind, content in found if kind == "display_data"
    }
    texts = [update["data"]["text/plain"] for update in updates]
    assert any("starting" in text for text in texts)
    assert "cell: 1 rank, run " in texts[-1]
    assert "step 150/150  loss " in texts[-1]
    assert '<progress value="150" max="150"></progress>' in updates[-1]["data"]["text/html"]
    assert len(texts) == len(set(texts)), "nothing is sent twice"
    assert len(texts) <= 2 * seconds + 3, "twice a second, and the first and last words"
    assert kernel.value("result").startswith("<run cell/")
    assert kernel.value("result.state") == "'finished'"


def interrupted(kernel: Kernel, times: int) -> list[tuple[str, dict[str, Any]]]:
    """Train for a long time, and interrupt when it is under way."""
    found = []
    sent = 0
    for kind, content in kernel.messages(kernel.start(TRAIN.replace("STEPS", "100_000"))):
        found.append((kind, content))
        text = content.get("data", {}).get("text/plain", "")
        if sent == 0 and re.search(r"step \d+/", text):
            kernel.interrupt()
            sent = 1
        elif sent == 1 and times == 2 and "stopping: " in text:
            kernel.interrupt()
            sent = 2
    assert sent == times
    return found


def test_an_interrupt_of_the_kernel_saves_and_returns_the_run(kernel):
    found = interrupted(kernel, times=1)
    assert not [content for kind, content in found if kind == "error"]
    assert "stopping: the run saves after a few more steps" in found[-1][1]["data"]["text/plain"]
    assert kernel.value("result.state, result.exit_code") == "('stopped', 75)"
    assert kernel.value("result.checkpoints[-1].step == result.step > 0") == "True"
    assert kernel.value("result.load_model().training") == "False"


def test_a_second_interrupt_ends_at_once(kernel):
    interrupted(kernel, times=2)
    assert kernel.value("result.state, result.error['kind']") == "('failed', 'interrupted')"
    assert kernel.value("gradus.load_run(result.run.path) == result") == "True"


def test_a_class_of_a_cell_is_refused_with_the_way_out(kernel):
    code = "from torch import nn\nclass Net(nn.Module): pass\ngradus.train({'model': {'use': Net}})"
    [error] = [content for kind, content in kernel.messages(kernel.start(code)) if kind == "error"]
    assert error["ename"] == "InputError"
    assert "found the class Net itself" in error["evalue"]
    if sys.version_info >= (3, 11):  # from there on exceptions have notes
        assert "hint: put `%%writefile model.py`" in "\n".join(error["traceback"])
