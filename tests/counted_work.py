"""How much work a call is, in a number that does not depend on how busy the machine is."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Work(NamedTuple):
    lines: int  # of Python that were run
    peak_bytes: int  # that were there at once, numpy's included


def work_of(function: Callable[[], Any]) -> Work:
    """Lines bound the number of operations, and memory bounds how large one of them is: together, the time."""
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    tracemalloc.start()
    sys.settrace(count)
    try:
        function()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    return Work(lines, peak)


class RealNumbers(TorchDispatchMode):
    """Counts what torch does: how many operators are called, and how many bytes they make that are really there."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        made = function(*arguments, **(keywords or {}))
        self.operators += 1
        self.bytes += sum(
            leaf.nbytes for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor) and not leaf.is_meta
        )
        return made
