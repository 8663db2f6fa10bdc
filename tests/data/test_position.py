"""Where in the stream a run is, and whether it is still the same stream."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from gradus.data import fingerprint
from gradus.data.fingerprint import fingerprint_of
from gradus.data.order import AsLaid, Shuffled, past_skipped
from gradus.data.position import (
    DataPosition,
    as_ranges,
    changes_between,
    check_same_data,
    consumed_before,
    requested_of,
    specification_hash,
    specification_of,
    with_skipped,
)
from gradus.data.source import Source, open_source
from gradus.schema.errors import InputError
from gradus.schema.recipe import Recipe
from gradus.training.building import open_data

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda span: (span[0], sum(span))), max_size=6)


@given(SPANS)
def test_ranges_hold_the_same_positions_ascending_and_apart(spans):
    ranges = as_ranges(spans)
    assert {p for first, stop in ranges for p in range(first, stop)} == {p for a, b in spans for p in range(a, b)}
    assert all(first < stop for first, stop in ranges)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(ranges))


@given(SPANS, st.integers(1, 200))
def test_a_run_takes_every_position_that_is_not_skipped_and_no_other(spans, count):
    skipped = as_ranges(spans)
    positions = past_skipped(np.arange(count), skipped)
    out = {position for first, stop in skipped for position in range(first, stop)}
    expected = [position for position in range(count + 200) if position not in out][:count]
    assert positions.tolist() == expected


@given(SPANS, st.integers(0, 200))
def test_the_samples_taken_before_a_position_are_those_before_it_that_are_not_skipped(spans, position):
    skipped = as_ranges(spans)
    out = {place for first, stop in skipped for place in range(first, stop)}
    expected = sum(place not in out for place in range(position))
    assert consumed_before(np.array([position]), skipped).tolist() == [expected]


@given(SPANS, SPANS, st.integers(0, 80))
def test_what_is_left_out_from_now_on_changes_nothing_of_what_was_trained(spans, asked, trained):
    before = as_ranges(spans)
    taken = past_skipped(np.arange(trained), before)
    positions = {position for first, end in asked for position in range(first, end)}
    if positions & set(taken.tolist()):
        with pytest.raises(InputError, match=r"data\.skip: of positions .* the run has trained on .* already"):
            with_skipped(before, asked, trained)
        return
    now = with_skipped(before, asked, trained)
    assert {p for first, end in now for p in range(first, end)} == positions | {
        p for first, end in before for p in range(first, end)
    }
    assert past_skipped(np.arange(trained), now).tolist() == taken.tolist()


def test_ranges_to_leave_out_are_no_other_data_and_must_be_ranges():
    assert requested_of(recipe()) == requested_of(recipe(skip=[[8, 16]]))
    for wrong in ([[8]], [[8, 8]], [[-1, 4]], [[9, 4]], [8, 16], [["a", "b"]]):
        with pytest.raises(InputError, match=r"data\.skip"):
            recipe(skip=wrong)


@given(st.integers(0, 2**60), st.integers(0, 2**60), SPANS)
def test_a_position_survives_being_written_down(seed, samples, spans):
    position = DataPosition(seed, samples, as_ranges(spans), "abc")
    assert DataPosition.from_document(position.document()) == position


class Data:
    """What a specification asks of opened data."""

    def __init__(self, length: int = 100, tokenizer: str | None = None, fingerprint: str | None = None) -> None:
        self.length, self.tokenizer_hash, self.fingerprint = length, tokenizer, fingerprint
        self.source = self.dataset = self


def recipe(**data: Any) -> Recipe:
    return Recipe.from_document({"name": "x", "batch": 8, "steps": 10, "data": {"use": "stdlib-text", **data}})


def specification(recipe: Recipe, data: Data | None = None, order: Any = None) -> dict[str, Any]:
    data = data or Data()
    return specification_of(recipe, data, order or Shuffled(recipe.seed, data.length))  # type: ignore[arg-type]


def test_the_same_data_elsewhere_with_other_ways_of_reading_it_is_the_same():
    before = specification(recipe(use="shards", path="/old/place/web"), Data(fingerprint="f" * 24))
    now = specification(recipe(use="shards", path="/new/job-17/stage"), Data(fingerprint="f" * 24))
    assert specification_hash(before) == specification_hash(now)
    assert check_same_data(before, now, accept=False) is None


def test_a_default_that_is_written_down_is_no_change():
    before, now = recipe(), recipe(validation=0.1)
    assert requested_of(before) == requested_of(now)
    assert requested_of(before) != requested_of(recipe(validation=0.2))


def test_a_callable_may_move_with_its_file(tmp_path: Path):
    one, other = tmp_path / "a", tmp_path / "b"
    for folder in (one, other):
        folder.mkdir()
        (folder / "mine.py").write_text("def build(): ...\ndef another(): ...\n")
    before = requested_of(recipe(use=f"{one}/mine.py:build"))
    assert changes_between(before, requested_of(recipe(use=f"{other}/mine.py:build"))) == []
    assert len(changes_between(before, requested_of(recipe(use=f"{one}/mine.py:another")))) == 1


MIXTURE = {"code": {"use": "text", "path": "/a/code", "weight": 3}, "web": {"use": "text", "path": "/a/web"}}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"batch": 8}, {"batch": 16}, r"batch: the run began with 8, found 16"),
        ({"seed": 1}, {"seed": 2}, r"seed: the run began with 1, found 2"),
        ({"samples": 58}, {"samples": 86}, r"the run began with 58 training samples, found 86"),
        ({"tokenizer": "a" * 20}, {"tokenizer": "b" * 20}, r"data\.tokenizer: .*\(hash a{12}, found b{12}\)"),
        ({"fingerprint": "a" * 20}, {"fingerprint": "b" * 20}, r"other content \(fingerprint a{12}, found b{12}\)"),
        ({"names": ["web"]}, {"names": ["book"]}, r"data\.path: the run began with web, found book"),
        ({"data": {"context": 8}}, {"data": {"context": 9}}, r"data\.context: the run began with 8, found 9"),
        ({"data": {}}, {"data": {"shuffle": "none"}}, r"data\.shuffle: the run began with the default, found 'none'"),
        (
            {"data": {"sources": MIXTURE}},
            {"data": {"sources": {**MIXTURE, "code": {**MIXTURE["code"], "weight": 4}}}},
            r"data\.sources\.code\.weight: the run began with 3, found 4",
        ),
        ({"order": "a"}, {"order": "b"}, r"other samples at the same positions"),
    ],
)
def test_what_changed_is_named_from_what_to_what(before, now, said):
    with pytest.raises(InputError, match=said):
        check_same_data(before, now, accept=False)


def test_a_changed_specification_is_accepted_on_request_with_a_note():
    before, now = {"seed": 1, "samples": 58}, {"seed": 2, "samples": 86}
    with pytest.raises(InputError) as refused:
        check_same_data(before, now, accept=False)
    assert "--accept-changed-data" in str(refused.value.hint)
    note = check_same_data(before, now, accept=True)
    assert note is not None
    assert "seed: the run began with 1, found 2" in note
    assert "58 training samples, found 86" in note


def test_another_batch_is_never_accepted_because_steps_would_be_elsewhere_in_the_stream():
    with pytest.raises(InputError, match="batch: the run began with 8, found 16") as refused:
        check_same_data({"batch": 8}, {"batch": 16}, accept=True)
    assert "--accept-changed-data" not in str(refused.value.hint)


def test_what_one_of_the_two_does_not_know_is_not_compared():
    assert check_same_data({"tokenizer": None, "batch": 8}, {"tokenizer": "a", "batch": 8}, accept=False) is None
    assert check_same_data(requested_of(recipe()), specification(recipe()), accept=False) is None


@given(st.integers(1, 10**9), st.integers(0, 10**6))
def test_another_order_of_the_same_data_is_noticed(length, seed):
    shuffled = specification(recipe(), Data(length), Shuffled(seed, length))
    assert shuffled == specification(recipe(), Data(length), Shuffled(seed, length))
    if length > 20:  # else two may well be the same
        assert shuffled["order"] != specification(recipe(), Data(length), Shuffled(seed + 1, length))["order"]
        assert shuffled["order"] != specification(recipe(), Data(length), AsLaid(length))["order"]


def test_paths_of_data_that_cannot_say_what_it_is_count_by_their_names():
    before = specification(recipe(use="images", path="/a/flowers"), Data())
    assert (
        check_same_data(before, specification(recipe(use="images", path="/b/flowers/"), Data()), accept=False) is None
    )
    with pytest.raises(InputError, match=r"data\.path: the run began with flowers, found birds"):
        check_same_data(before, specification(recipe(use="images", path="/a/birds"), Data()), accept=False)


def opened(path: Path, **options: Any) -> dict[str, Any]:
    given = recipe(**{"use": "text", "path": str(path), "context": 8, **options})
    data = open_data(given, "train")
    assert data is not None
    return specification_of(given, data, Shuffled(1, data.length))


def test_another_text_of_the_same_length_is_noticed_and_the_same_text_elsewhere_is_not(tmp_path: Path):
    (tmp_path / "one.txt").write_text("of cats and dogs " * 50)
    (tmp_path / "same.txt").write_text("of cats and dogs " * 50)
    (tmp_path / "other.txt").write_text("of cows and pigs " * 50)
    before = opened(tmp_path / "one.txt")
    assert check_same_data(before, opened(tmp_path / "same.txt"), accept=False) is None
    with pytest.raises(InputError, match="other content"):
        check_same_data(before, opened(tmp_path / "other.txt"), accept=False)


def test_a_single_other_letter_in_a_long_text_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fingerprint, "READ_WHOLE_BYTES", 0)
    text = "of cats and dogs " * 50_000
    (tmp_path / "one.txt").write_text(text)
    (tmp_path / "other.txt").write_text(f"{text[:400_001]}!{text[400_002:]}")
    before = opened(tmp_path / "one.txt")
    with pytest.raises(InputError, match="other content"):
        check_same_data(before, opened(tmp_path / "other.txt"), accept=False)


@pytest.mark.parametrize("whole", [2**20, 0])
def test_of_a_token_file_all_counts_or_if_it_is_large_its_length_and_some_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int
):
    monkeypatch.setattr(fingerprint, "READ_WHOLE_BYTES", whole)
    tokens = np.arange(5000, dtype=np.uint16)
    for name, content in (("a", tokens), ("b", tokens), ("c", tokens[:-1]), ("d", np.where(tokens == 2500, 0, tokens))):
        content.astype(np.uint16).tofile(tmp_path / f"{name}.bin")
    keys = {"context": 4, "vocabulary": 5000, "dtype": "uint16", "validation": 0}
    a, b, c, d = (
        fingerprint_of(open_source("tokens", {"path": str(tmp_path / f"{n}.bin"), **keys}, "train", 1)) for n in "abcd"
    )
    assert a == b != c
    assert (a == d) is (whole == 0), "of a large file, a token that nobody looked at"


def test_small_numbers_and_their_kinds_count():
    class Fractions(Source):
        def __init__(self, values: list[float], kind: Any) -> None:
            super().__init__(len(values))
            self.values = np.array(values, kind)

        def fetch(self, indices: Any) -> Any:
            return {"x": self.values[indices]}

        def finish(self, batch: Any, dtype: Any) -> Any:
            return batch

    given = [([0.1, 0.2], np.float32), ([0.1, 0.3], np.float32), ([0.0, 0.0], np.float32), ([0.0, 0.0], np.int32)]
    assert len({fingerprint_of(Fractions(*one)) for one in given}) == len(given)


def test_another_seed_of_masks_is_no_other_text():
    masked = {"context": 16, "objective": "masked", "limit": 40}
    one, other = (open_source("stdlib-text", masked, "train", seed) for seed in (1, 2))
    assert not np.array_equal(one.fetch(np.arange(3))["tokens"], other.fetch(np.arange(3))["tokens"])
    assert fingerprint_of(one) == fingerprint_of(other)


def test_other_pictures_in_a_folder_are_noticed_by_their_names_and_sizes(tmp_path: Path):
    for root, names, last in (("a", "xyz", 8), ("b", "xyz", 8), ("c", "xyw", 8), ("d", "xyz", 9)):
        for name in names:
            (tmp_path / root / "cats").mkdir(parents=True, exist_ok=True)
            size = last if name == "z" else 8
            Image.new("RGB", (size, size)).save(tmp_path / root / "cats" / f"{name}.bmp")
    a, b, c, d = (fingerprint_of(open_source("images", {"path": str(tmp_path / r)}, "train", 1)) for r in "abcd")
    assert a == b
    assert len({a, c, d}) == 3


def test_one_other_pixel_of_pictures_in_memory_is_noticed():
    one, other = (open_source("digits", {}, "train", 1) for _ in range(2))
    assert fingerprint_of(one) == fingerprint_of(other)
    other.images[700, 0, 3, 3] ^= 1  # type: ignore[attr-defined]
    assert fingerprint_of(one) != fingerprint_of(other)


def test_a_dataset_of_a_users_own_may_say_what_it_is():
    class Own(list[int]):
        fingerprint = "version 3"

    assert fingerprint_of(Own([1, 2])) == "version 3"
    assert fingerprint_of([1, 2]) is None
