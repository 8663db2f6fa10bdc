"""The stable hash: it keeps everything apart, and never changes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gradus.schema.stable_hash import stable_hash


def test_the_hash_is_the_one_of_all_versions() -> None:
    """Frozen: orders of samples, splits and dropout hang on it."""
    assert stable_hash("dropout", 1, 2) == 8713145693854617313


@settings(max_examples=200)
@given(
    one=st.lists(st.integers() | st.text(), max_size=4),
    other=st.lists(st.integers() | st.text(), max_size=4),
)
def test_different_parts_have_different_hashes(one: list[int | str], other: list[int | str]) -> None:
    assert (stable_hash(*one) == stable_hash(*other)) == (one == other)
    assert 0 <= stable_hash(*one) < 2**64


def test_a_hash_keeps_borders_and_kinds_apart() -> None:
    parts: list[tuple[int | str, ...]] = [("ab", "c"), ("a", "bc"), ("abc",), (1,), ("1",), (-1,), (1, 1), (11,), ()]
    assert len({stable_hash(*each) for each in parts}) == len(parts)
