"""Untraced: what torch.compile gave up on in the first step, and why. The compiler itself goes on without a word."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from gradus.record.format import count_text

_WHY = re.compile(r"Explanation: (.*)")
_AT = re.compile(r"Developer debug context: (.*)")
_LEFT_OUT = "torch.compiler.disable"  # by us, or by who wrote the model: as it is meant
_LONGEST, _SHOWN = 100, 3


class Untraced:
    """What the compiler counts, from when this is made."""

    def __init__(self) -> None:
        self._before = _counted()

    def told(self) -> str | None:
        """None where all that was to be compiled is."""
        now, before = _counted(), self._before
        new = {kind: {what for what in now[kind] if now[kind][what] > before[kind].get(what, 0)} for kind in now}
        cuts = {what for what in new["graph_break"] if _LEFT_OUT not in what}
        frames, traced = (now["frames"].get(key, 0) - before["frames"].get(key, 0) for key in ("total", "ok"))
        if frames > traced and new["unimplemented"]:
            given_up = count_text(frames - traced, "function")
            return f"torch.compile gave up on {given_up} of the model, which run as they are written: " + _reasons(
                new["unimplemented"] | cuts
            )
        if cuts:
            return f"torch.compile leaves out of its graphs what it cannot trace: {_reasons(cuts)}"
        return None


def _counted() -> dict[str, dict[str, int]]:
    """By the compiler, in this process, if it has been used at all: loading it takes seconds."""
    module: Any = sys.modules.get("torch._dynamo.utils")
    counters: Mapping[str, Mapping[str, int]] = module.counters if module is not None else {}
    return {kind: dict(counters.get(kind, {})) for kind in ("frames", "unimplemented", "graph_break")}


def _reasons(found: set[str]) -> str:
    told = sorted({_reason(text) for text in found})
    more = [f"and {len(told) - _SHOWN} more"] if len(told) > _SHOWN else []
    return "; ".join([*told[:_SHOWN], *more])


def _reason(text: str) -> str:
    why, at = _WHY.search(text), _AT.search(text)
    reason = (why[1] if why is not None else text.partition("\n")[0]).strip().rstrip(".")
    return f"{reason} ({at[1][:_LONGEST]})" if at is not None and at[1] else reason
