"""Packing: every token of every document once, no pack too long, whoever asks; and few packs."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.packing import Packs, packed, ranges
from gradus.data.source import open_source
from gradus.data.sources.packed import PackedTexts
from gradus.data.sources.text import IGNORED
from gradus.schema.errors import InputError

Lengths = st.lists(st.integers(0, 40), max_size=60)
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
END = 0  # that of a text, among bytes
TEXTS = [" ".join(WORDS[number % 7 : number % 7 + number % 11]) for number in range(200)]


def pieces(packs: Packs, lengths: list[int]) -> list[list[tuple[int, int, int]]]:
    """Of each pack: (document, first token, tokens)."""
    every = [
        (int(d), int(b), min(packs.context, lengths[d] - int(b)))
        for d, b in zip(packs.documents, packs.begins, strict=True)
    ]
    return [every[start:end] for start, end in zip(packs.first[:-1], packs.first[1:], strict=True)]


def first_fit_packs(lengths: list[int], context: int) -> int:
    """How many contexts documents fill that are put, as they come, into the first one with room."""
    rooms: list[int] = []
    for length in lengths:
        for size in [context] * (length // context) + [length % context] * (length % context > 0):
            place = next((place for place, room in enumerate(rooms) if room >= size), len(rooms))
            rooms[place:] = rooms[place:] or [context]
            rooms[place] -= size
    return len(rooms)


@given(Lengths, st.integers(1, 25), st.integers(0, 3), st.sampled_from([1, 7, 1000]))
def test_every_token_is_in_one_pack_and_no_pack_is_too_long(
    lengths: list[int], context: int, seed: int, window: int
) -> None:
    packs = packed(np.array(lengths, np.int64), context, seed, window)
    found = pieces(packs, lengths)
    tokens = sorted((d, t) for pack in found for d, b, n in pack for t in range(b, b + n))
    assert tokens == [(d, t) for d, length in enumerate(lengths) for t in range(length)]
    assert all(0 < sum(n for _, _, n in pack) <= context for pack in found)
    assert packs.efficiency == pytest.approx(sum(lengths) / max(len(found) * context, 1))


@given(Lengths, st.integers(1, 25), st.integers(0, 3))
def test_only_documents_that_are_longer_than_a_context_are_cut(lengths: list[int], context: int, seed: int) -> None:
    packs = packed(np.array(lengths, np.int64), context, seed)
    parts = np.bincount(packs.documents, minlength=len(lengths)) if len(lengths) else []
    assert [int(n) for n in parts] == [-(-length // context) for length in lengths]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(5, 60), st.integers(0, 3))
def test_packs_are_at_least_as_full_as_those_of_first_fit(lengths: list[int], context: int, seed: int) -> None:
    assert len(packed(np.array(lengths, np.int64), context, seed)) <= first_fit_packs(lengths, context)


@pytest.mark.parametrize("mean", [3.0, 4.5, 5.5])
def test_many_documents_fill_packs_better_than_first_fit(mean: float) -> None:
    lengths = 1 + np.random.default_rng(1).lognormal(mean, 1.0, 5000).astype(np.int64)  # too many for luck
    packs = packed(lengths, 512, seed=1)
    assert len(packs) <= first_fit_packs(lengths.tolist(), 512)
    assert packs.efficiency > 0.99


def test_where_longest_first_loses_documents_are_taken_as_they_come() -> None:
    assert len(packed(np.array([4, 3, 3, 4, 3, 3]), 10, seed=1)) == 2


def test_a_plan_depends_on_the_seed_alone_and_windows_mix_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 2000)
    one, again, other = packed(lengths, 128, 1, 500), packed(lengths, 128, 1, 500), packed(lengths, 128, 2, 500)
    for name in ("first", "documents", "begins"):
        assert (getattr(one, name) == getattr(again, name)).all()
    assert one.documents.tolist() != other.documents.tolist()
    # In file order, the documents of a pack would be at most 500 apart.
    spread = [np.ptp(one.documents[a:b]) for a, b in zip(one.first[:-1], one.first[1:], strict=True) if b - a > 1]
    assert np.mean(np.array(spread) > 500) > 0.3


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(0, 4)), max_size=6))
def test_ranges_are_those_of_python(given_ranges: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array([pair[i] for pair in given_ranges], np.int64) for i in (0, 1))
    assert ranges(starts, lengths).tolist() == [
        n for start, length in given_ranges for n in range(start, start + length)
    ]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return file


def opened(path: Path, split: Any = "train", seed: int = 1, **options: Any) -> PackedTexts:
    given = {"path": str(path), "context": 48, "packing": True, "validation": 0.0, **options}
    source = open_source("text", given, split, seed)
    assert isinstance(source, PackedTexts)
    return source


def documents_of(batch: dict[str, torch.Tensor]) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each document in a finished batch; the last in a pack is padding, if there is room."""
    found = []
    for tokens, targets, documents in zip(batch["tokens"], batch["targets"], batch["documents"], strict=True):
        for number in documents.unique().tolist():
            inside = documents == number
            found.append((tokens[inside].tolist(), targets[inside].tolist()))
    return found


def finished(source: PackedTexts) -> dict[str, torch.Tensor]:
    return Indexed(source).finish(Indexed(source).fetch(np.arange(len(source))), torch.float32)  # type: ignore[return-value]


def test_a_sample_has_whole_documents_and_targets_that_stay_inside_them(corpus: Path) -> None:
    batch = finished(opened(corpus))
    assert {name: (value.dtype, value.shape[1]) for name, value in batch.items()} == {
        "tokens": (torch.int64, 48),
        "targets": (torch.int64, 48),
        "documents": (torch.int32, 48),
    }
    texts = []
    for tokens, targets in documents_of(batch):
        if set(tokens) != {END}:  # padding, or an empty text
            assert targets[:-1] == tokens[1:]
            texts.append(bytes(tokens).decode())
            assert (targets[-1] == IGNORED) == texts[-1].endswith("\0")
    assert sorted(text for text in texts if text.endswith("\0")) == sorted(
        f"{text}\0" for text in TEXTS if 0 < len(text) < 48
    )


def test_what_a_cut_document_goes_on_with_is_the_target_of_its_last_token(tmp_path: Path) -> None:
    text = "".join(chr(ord("a") + n % 26) for n in range(100))
    (tmp_path / "long.txt").write_text(text)
    batch = finished(opened(tmp_path / "long.txt"))
    pairs = {
        (t, y) for tokens, targets in documents_of(batch) for t, y in zip(tokens, targets, strict=True) if y != IGNORED
    }
    assert sum(int((targets != IGNORED).sum()) for targets in batch["targets"]) == 100  # 99 letters, and the end
    assert (ord(text[47]), ord(text[48])) in pairs


def test_masks_leave_padding_alone_and_choose_a_share_of_the_rest(corpus: Path) -> None:
    source, plain = opened(corpus, objective="masked", mask_token=1, context=400), finished(opened(corpus, context=400))
    batch = finished(source)
    chosen = batch["targets"] != IGNORED
    pieces_of = np.diff(source.plan.first.array)[source.part.locate(np.arange(len(source)))]
    real = batch["documents"] < torch.from_numpy(pieces_of)[:, None]
    assert not real.all()
    assert not chosen[~real].any()
    assert (chosen.sum(1) == (0.15 * real.sum(1)).round()).all()
    assert batch["targets"][chosen].equal(plain["tokens"][chosen])
    assert batch["tokens"][~chosen].equal(plain["tokens"][~chosen])
    with pytest.raises(InputError, match=r"data\.packing: found true, but masked models of Hugging Face"):
        opened(corpus, objective="masked", mask_token=1, form="huggingface")


def test_for_hugging_face_positions_begin_anew_and_first_tokens_have_no_label(corpus: Path) -> None:
    own, theirs = finished(opened(corpus)), finished(opened(corpus, form="huggingface"))
    assert set(theirs) == {"input_ids", "labels", "position_ids"}
    begins = torch.nn.functional.pad(own["documents"][:, 1:] != own["documents"][:, :-1], (1, 0), value=True)
    assert ((theirs["position_ids"] == 0) == begins).all()
    assert (theirs["position_ids"][:, 1:] - theirs["position_ids"][:, :-1])[~begins[:, 1:]].unique().tolist() == [1]
    labels = theirs["labels"]
    assert (labels[begins] == IGNORED).all()
    # They compare each label with the token before it: all pairs within a document, as our targets have them.
    assert (labels[:, 1:] != IGNORED).equal((own["targets"][:, :-1] != IGNORED) & ~begins[:, 1:])


def test_the_stream_does_not_depend_on_ranks_and_workers(corpus: Path) -> None:
    def stream(ranks: int, workers: int) -> list[Any]:
        shares = []
        for rank in range(ranks):
            slices = Slices(batch=4, micro_batch=4 // ranks, accumulate=1, data_rank=rank, total_samples=24)
            loader = Loader(
                Indexed(opened(corpus)), slices, torch.device("cpu"), torch.float32, seed=1, workers=workers
            )
            shares.append([micro.inputs for micro in loader.micro_batches(0, 6)])
        return [
            {name: torch.cat([inputs[name] for inputs in step]).tolist() for name in step[0]}  # type: ignore[index,call-overload]
            for step in zip(*shares, strict=True)
        ]

    alone = stream(1, 0)
    assert alone == stream(2, 0) == stream(4, 0) == stream(2, 1)


def test_a_plan_is_made_once_and_kept_beside_the_tokens(
    corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = opened(corpus).note
    assert note is not None
    assert "200 documents are packed into" in note
    assert "% full" in note
    monkeypatch.setattr("gradus.data.sources.packed.packed", None)  # not called again
    again = opened(corpus)
    assert again.note == note
    monkeypatch.undo()
    assert opened(corpus, seed=2).plan.first.file != again.plan.first.file
    assert again.plan.first.file.is_relative_to(cache)


def test_a_packed_source_travels_to_workers_by_the_names_of_its_files(corpus: Path) -> None:
    source = opened(corpus)
    copy = pickle.dumps(source)
    assert len(copy) < 4000
    everything = np.arange(len(source))
    for name, column in pickle.loads(copy).fetch(everything).items():
        assert (column == source.fetch(everything)[name]).all()


def test_validation_holds_out_documents_or_packs_where_these_are_few(corpus: Path, tmp_path: Path) -> None:
    train, held = (finished(opened(corpus, split, validation=0.1)) for split in ("train", "validation"))
    assert not train["tokens"].equal(held["tokens"])
    (tmp_path / "few.txt").write_text("abc " * 500)
    few = [opened(tmp_path / "few.txt", split, validation=0.1) for split in ("train", "validation")]
    packs = [int(n) for source in few for n in source.part.locate(np.arange(len(source)))]
    assert sorted(packs) == list(range(few[0].plan.packs))
    assert "held out" in str(few[0].note)
