"""What may be typed after --profile, and which steps it stands for."""

from __future__ import annotations

import pytest

from gradus.schema.errors import InputError
from gradus.schema.profile_request import ProfileRequest


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("steps=5", ProfileRequest(5)),
        ("3", ProfileRequest(3)),
        ("steps=2,from=30,stacks,memory", ProfileRequest(2, 30, stacks=True, memory=True)),
        ("steps=2,ranks=0,3,stacks", ProfileRequest(2, ranks=(0, 3), stacks=True)),
        ("ranks=3+1+3", ProfileRequest(5, ranks=(1, 3))),
        ("steps=1, ranks=all", ProfileRequest(1, ranks=())),
    ],
)
def test_a_request_is_what_was_typed_and_survives_its_file(text: str, expected: ProfileRequest) -> None:
    assert ProfileRequest.parse(text) == expected
    assert ProfileRequest.from_json(expected.to_json()) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step=5", "did you mean 'steps'"),
        ("steps=0", "from 1 to 1000"),
        ("steps=many", "found 'many'"),
        ("steps=5,steps=6", "given twice"),
        ("from=-1", "from 1"),
        ("ranks=first", "allowed: all, or numbers"),
        ("stacks=yes", "takes no value"),
        ("", "unknown setting ''"),
    ],
)
def test_what_is_no_request_is_refused_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as refused:
        ProfileRequest.parse(text)
    assert refused.value.details["field"] == "--profile"


@pytest.mark.parametrize(
    ("text", "done", "total", "expected"),
    [
        ("steps=5", 0, 100, range(11, 16)),  # after the warm-up
        ("steps=5", 0, 12, range(8, 13)),  # as late as a short run allows
        ("steps=5", 0, 4, range(2, 5)),  # the first step of all is no example
        ("steps=5", 0, 1, range(1, 2)),
        ("steps=5", 40, 100, range(51, 56)),
        ("steps=5,from=1", 0, 100, range(1, 6)),
        ("steps=5,from=98", 0, 100, range(98, 101)),
        ("steps=5,from=8", 10, 100, range(11, 13)),  # the rest of them
        ("steps=5,from=3", 10, 100, None),  # which an earlier attempt has done
        ("steps=5,from=200", 0, 100, None),
        ("steps=5", 0, None, range(6, 11)),
    ],
)
def test_the_steps_are_after_the_warm_up_or_where_they_fit(
    text: str, done: int, total: int | None, expected: range | None
) -> None:
    assert ProfileRequest.parse(text).window(done, total) == expected


def test_of_few_ranks_all_are_recorded_and_of_many_the_first() -> None:
    request = ProfileRequest()
    assert [rank for rank in range(4) if request.wants(rank, 4)] == [0, 1, 2, 3]
    assert [rank for rank in range(8) if request.wants(rank, 8)] == [0]
    assert [rank for rank in range(8) if ProfileRequest.parse("ranks=all").wants(rank, 8)] == list(range(8))


def test_a_rank_or_step_that_will_never_be_is_refused() -> None:
    with pytest.raises(InputError, match="ranks names rank 4, but there are 2"):
        ProfileRequest.parse("ranks=0,4").check_ranks(2)
    with pytest.raises(InputError, match="from=50 is after the last of 20 steps"):
        ProfileRequest.parse("from=50").check_steps(20)
