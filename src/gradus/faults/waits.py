"""Waits: where torch waits for other ranks, whoever is measuring is told before and after.

`Work.wait` and `wait_tensor`, which all of torch's own collectives in Python end in (FSDP2, DTensor, pipeline stages,
`torch.distributed` itself), are replaced by functions that call them; and on a GPU what FSDP2 calls to make a stream
wait for another. DDP waits in C++: `own_time` finds that by its last gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional


class Measuring(Protocol):
    def wait_begins(self) -> Any: ...

    def wait_ends(self, begun: Any) -> None:
        """`begun` is what `wait_begins` returned."""


_measuring: list[Measuring] = []  # that of the run which is alive in this process; the last one counts
_originals: list[tuple[Any, str, Any]] = []


def tell_of_waits(measuring: Measuring, *, on_gpu: bool) -> Callable[[], None]:
    """From now on, until what is returned is called."""
    _measuring.append(measuring)
    if not _originals:
        _replace(dist.Work, "wait", _timed)
        _replace(functional, "wait_tensor", _timed_unless_compiling)
        if on_gpu:
            for name in ("wait_for_unshard", "finalize_backward"):
                _replace(_fsdp_group(), name, _timed)

    def no_more() -> None:
        if measuring in _measuring:
            _measuring.remove(measuring)
        if not _measuring:
            while _originals:
                owner, name, original = _originals.pop()
                setattr(owner, name, original)

    return no_more


def _replace(owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    original = getattr(owner, name, None)
    if original is not None:  # a later torch may do without it
        _originals.append((owner, name, original))
        setattr(owner, name, around(original))


def _fsdp_group() -> Any:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group.FSDPParamGroup


def _timed(original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(*arguments: Any, **named: Any) -> Any:
        if not _measuring:
            return original(*arguments, **named)
        measuring = _measuring[-1]
        begun = measuring.wait_begins()
        try:
            return original(*arguments, **named)
        finally:
            measuring.wait_ends(begun)

    return wait


def _timed_unless_compiling(original: Callable[..., Any]) -> Callable[..., Any]:
    timed = _timed(original)

    def wait(tensor: Any) -> Any:
        return original(tensor) if torch.compiler.is_compiling() else timed(tensor)

    return wait
