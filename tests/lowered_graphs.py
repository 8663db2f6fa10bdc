"""What the graphs of compiled code look like after our passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from torch import fx
from torch._inductor.utils import fresh_cache

from gradus.training.graph_passes import GraphPasses


@contextmanager
def graphs_looked_at(
    monkeypatch: pytest.MonkeyPatch, kernels: ModuleType, look: Callable[[list[fx.Node]], None]
) -> Iterator[None]:
    """Inside, `look` is given the calls of each graph that is compiled, after our passes, to which a CPU is a device
    with these kernels."""
    original = GraphPasses.__call__

    def looking(self: GraphPasses, graph: fx.Graph) -> None:
        original(self, graph)
        graph.lint()
        look([node for node in graph.nodes if node.op == "call_function"])

    monkeypatch.setattr(GraphPasses, "__call__", looking)
    monkeypatch.setattr(kernels, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch._dynamo.reset()
    with fresh_cache():
        yield
    torch._dynamo.reset()
