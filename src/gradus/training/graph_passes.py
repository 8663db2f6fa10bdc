"""Graph passes: what we change in the graphs of code that we compile, before torch's compiler lowers them.

They are for what is compiled by us alone: a user's own torch.compile is left as it is.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import fx

from gradus.training import graph_editing
from gradus.training.cheap_functions import use_cheap_functions
from gradus.training.max_pooling import use_max_pool_kernel
from gradus.training.thin_convolution import use_thin_convolutions

PASSES = (use_cheap_functions, use_max_pool_kernel, use_thin_convolutions)


class GraphPasses:
    """All of them, as one for torch's compiler, which asks for its `uuid` so as to know code that it has compiled."""

    def __init__(self) -> None:
        self._uuid = fingerprint(Path(inspect.getfile(one)) for one in (*PASSES, graph_editing))

    def uuid(self) -> str:
        return self._uuid

    def __call__(self, graph: fx.Graph) -> None:
        for one in PASSES:
            one(graph)


def fingerprint(files: Iterable[Path]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def with_graph_passes(**how: Any) -> dict[str, Any]:
    """`how`, for torch.compile, with our passes for what is compiled by this call, and for nothing else.

    Left as it is where the compiler has no such passes, or a pass of somebody else for all that is compiled.
    """
    try:
        # As late as this: it takes seconds to import, and is imported by torch.compile.
        from torch._inductor import config, list_mode_options
        from torch._inductor.custom_graph_pass import CustomGraphPass

        taken = config.post_grad_custom_pre_pass is not None
    except (ImportError, AttributeError):
        return how
    if taken:
        return how
    CustomGraphPass.register(GraphPasses)
    options = how.pop("options", None) or {}
    mode = how.pop("mode", None)  # torch.compile takes either
    chosen = list_mode_options(mode, how.get("dynamic")) if mode else {}
    return {**how, "options": {"post_grad_custom_pre_pass": _the_passes(), **chosen, **options}}


@functools.cache
def _the_passes() -> GraphPasses:
    """One for all: blocks share code only if they are compiled with options that are equal."""
    return GraphPasses()
