"""Python imports this by itself in each process of a script that is to be profiled: it is on PYTHONPATH only then.

Nothing happens until the script has imported torch's optimizers. A sitecustomize that is hidden by this one is run.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_AWAITED = "torch.optim"


class _Awaiting:
    """Finds nothing; but of the awaited module, it sees to it that it is followed by ours."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _AWAITED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            _when_torch_is_there()

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010
        return spec


def _when_torch_is_there() -> None:
    # torch itself is not complete yet: its last lines import what hooks need. The first call of an optimizer's
    # constructor comes after them.
    from torch.optim import Optimizer

    optimizer: Any = Optimizer
    made = optimizer.__init__

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        optimizer.__init__ = made
        try:
            from gradus.training.script_profiling import begin

            begin()
        except Exception as error:
            print(f"gradus: --profile has no effect here: {error}", file=sys.stderr)
        made(self, *arguments, **named)

    optimizer.__init__ = __init__


def _run_hidden() -> None:
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


_run_hidden()
if "RANK" in os.environ and "GRADUS_RUN" in os.environ:
    sys.meta_path.insert(0, _Awaiting())
