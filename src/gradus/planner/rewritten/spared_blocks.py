"""Spared blocks: a profile under a plan that recomputes only its first blocks (`recompute_blocks`). No torch.

Blocks that are alike are one part, called often. Those that a plan spares become a second part like it.
"""

from __future__ import annotations

from dataclasses import replace

from gradus.planner.profile.program import ModelProfile, Part
from gradus.schema.plan import Plan

MOST_REMEMBERED = 256
# By identity, so that what is known of a profile and its parts is found again; they are kept, so that their numbers
# are nobody else's.
_profiles: dict[tuple[int, int], tuple[ModelProfile, ModelProfile]] = {}
_twins: dict[int, tuple[Part, Part]] = {}


def with_spared_blocks(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile in which all blocks but those that the plan recomputes are parts that it does not."""
    first = plan.recompute_blocks
    if plan.recompute == "none" or first is None:
        return profile
    key = (id(profile), first)
    if key not in _profiles:
        if len(_profiles) >= MOST_REMEMBERED:
            _profiles.clear()
        _profiles[key] = (profile, _spared_after(profile, first))
    return _profiles[key][1]


def _spared_after(profile: ModelProfile, first: int) -> ModelProfile:
    parts, calls, twins, blocks = list(profile.parts), list[int](), dict[int, int](), iter(profile.block_numbers)
    for number in profile.calls:
        if profile.parts[number].block and next(blocks) >= first:
            if number not in twins:
                twins[number] = len(parts)
                parts.append(_spared(profile.parts[number]))
            calls.append(twins[number])
        else:
            calls.append(number)
    return replace(profile, parts=tuple(parts), calls=tuple(calls))


def _spared(part: Part) -> Part:
    """One and the same for each number of blocks, so that it is compiled once."""
    if id(part) not in _twins:
        if len(_twins) >= MOST_REMEMBERED:
            _twins.clear()
        _twins[id(part)] = (part, replace(part, spared=True))
    return _twins[id(part)][1]
