"""Rewriting: what a part does under a plan that recomputes or compiles it. Remembered, since a search asks again."""

from __future__ import annotations

from functools import lru_cache

from gradus.planner.profile.program import Part
from gradus.planner.rewritten.compiling import compiled as _compile
from gradus.planner.rewritten.recomputing import Policy
from gradus.planner.rewritten.recomputing import recomputed as _recompute

_REMEMBERED = 256


class _Same:
    """A part, by identity: to compare thousands of operators would take longer than to look one up may."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __hash__(self) -> int:
        return id(self.part)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.part is self.part


def recomputed(part: Part, policy: Policy) -> Part:
    """The part with forward computed again for backward; see recomputing.py."""
    return _recomputed(_Same(part), policy)


def compiled(part: Part) -> Part:
    """The part as torch.compile makes it, recomputed or not; see compiling.py."""
    return _compiled(_Same(part))


@lru_cache(_REMEMBERED)
def _recomputed(same: _Same, policy: Policy) -> Part:
    return _recompute(same.part, policy)


@lru_cache(_REMEMBERED)
def _compiled(same: _Same) -> Part:
    return _compile(same.part)
