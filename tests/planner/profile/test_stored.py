"""A profile as text comes back as it was, whatever fields it has."""

from __future__ import annotations

import dataclasses

from planner_cases import recipe

from gradus.planner.profile.program import Amount, ModelProfile, Operator, Part, Storage, Weights
from gradus.planner.profile.request import ProfileRequest, profile_for
from gradus.planner.profile.stored import from_text, to_text


def test_a_profile_made_by_hand_comes_back() -> None:
    one = Amount(1.5, 2.0)
    operator = Operator("mm", "matmul", one, one, one, "bfloat16", (one, one), 3, (0,), (1, 0), "tensor", True, True)
    storage = Storage(one, -1, 2, "logits", "whole", True)
    part = Part("blocks.0", True, (operator,), (operator,), (storage,), (Weights(7, False, "tensor", True, 2),), one)
    profile = ModelProfile("own", (part, part), (0, 1, 1), "bf16", True, (2, 4), traced=False, notes=("why",))
    profile = dataclasses.replace(profile, sample_bytes=3.5, tied_elements=9, module_parameters=(("blocks.0", 7),))
    assert from_text(to_text(profile)) == profile
    assert from_text(to_text(dataclasses.replace(profile, tokens_per_sample=64))).tokens_per_sample == 64


def test_a_traced_one_comes_back() -> None:
    profile = profile_for(recipe(), ProfileRequest("bf16"))
    assert from_text(to_text(profile)) == profile
    assert profile.traced
    assert len(profile.blocks) == 8
