"""Patterns over names of parameters and layers."""

from __future__ import annotations

import pytest

from gradus.schema.errors import InputError
from gradus.schema.patterns import matching

NAMES = ["embedding.weight", "blocks.0.qkv.weight", "blocks.0.qkv.bias", "blocks.1.qkv.weight", "head.weight"]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["blocks.0.*"], ["blocks.0.qkv.weight", "blocks.0.qkv.bias"]),
        (["*.bias"], ["blocks.0.qkv.bias"]),
        (["head.weight", "embedding.*"], ["embedding.weight", "head.weight"]),
        (["*"], NAMES),
        ([], []),
    ],
)
def test_names_match_in_their_own_order(patterns: list[str], expected: list[str]) -> None:
    assert matching(NAMES, patterns, "freeze") == expected


def test_a_pattern_that_matches_nothing_is_a_mistake() -> None:
    with pytest.raises(InputError, match=r"freeze: 'heads.weight' matches none of 5 names; did you mean 'head.weight'"):
        matching(NAMES, ["embedding.*", "heads.weight"], "freeze")


def test_case_counts() -> None:
    with pytest.raises(InputError):
        matching(NAMES, ["Head.*"], "freeze")
