"""`use: shards`: the same samples as from the files that were packed."""

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

from gradus.data.loader import Indexed
from gradus.data.shards import reading
from gradus.data.shards.origins import ImageFolders, OwnDataset, Records
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.shards.reading import DamagedSample, Shards
from gradus.data.shards.token_stream import TokenStream
from gradus.data.source import Source, open_source, source_options
from gradus.schema.errors import GradusError, InputError

SMALL = HowToPack(shard_bytes=2**16)


def opened(use: str, split: Any = "train", **options: Any) -> Source:
    return open_source(use, options, split, seed=1)


def everything(source: Source) -> Any:
    return source.fetch(np.arange(len(source)))


def equal(one: Source, other: Source) -> bool:
    """Whether all samples of two sources are the same."""
    assert len(one) == len(other)
    first, second = everything(one), everything(other)
    if isinstance(first, dict):
        assert first.keys() == second.keys()
        return all(np.array_equal(first[name], second[name]) for name in first)
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


# --- pictures


@pytest.mark.parametrize("keys", [{"packing": True}, {"objective": "masked"}, {"tokenizer": "gpt2"}, {"context": 8}])
def test_keys_for_texts_are_refused_for_pictures(images: Path, tmp_path: Path, keys: dict[str, Any]) -> None:
    pack(ImageFolders(images), tmp_path / "packed", SMALL, workers=1)
    with pytest.raises(InputError, match=f"data.{next(iter(keys))}: .*this key is for texts"):
        source_options("shards", {"path": str(tmp_path / "packed"), **keys})


@pytest.mark.parametrize("split", ["train", "validation"])
def test_pictures_are_those_of_the_folder(images: Path, tmp_path: Path, split: str) -> None:
    pack(ImageFolders(images), tmp_path / "later", SMALL, workers=1)
    pack(ImageFolders(images, validation=0.2), tmp_path / "now", SMALL, workers=1)
    folder = opened("images", split, path=str(images), size=16, validation=0.2)
    assert equal(folder, opened("shards", split, path=str(tmp_path / "later"), size=16, validation=0.2))
    assert equal(folder, opened("shards", split, path=str(tmp_path / "now"), size=16))
    shards = opened("shards", split, path=str(tmp_path / "now"), size=16, verify=True)
    assert (shards.classes, shards.sample_shape) == (3, (3, 16, 16))
    assert equal(shards, pickle.loads(pickle.dumps(shards)))


def test_a_published_validation_set_stays_one(images: Path, tmp_path: Path) -> None:
    root = tmp_path / "published"
    for split in ("train", "val"):
        (root / split).mkdir(parents=True)
        for name in ("ant", "bee"):
            (root / split / name).symlink_to(images / name)
    pack(ImageFolders(root), tmp_path / "d", SMALL, workers=1)
    for split in ("train", "validation"):
        shards = opened("shards", split, path=str(tmp_path / "d"), size=8)
        assert equal(opened("images", split, path=str(root), size=8), shards)


def test_augmentation_is_for_training_only_and_follows_its_draws(images: Path, tmp_path: Path) -> None:
    pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1)
    options = {"path": str(tmp_path / "d"), "size": 16, "augment": "standard"}
    numbers, draws = np.arange(6), np.arange(6).astype(np.uint64)
    for split, differs in (("train", True), ("validation", False)):
        source = opened("shards", split, **options)
        drawn, again = source.fetch_drawn(numbers, draws), source.fetch_drawn(numbers, draws)
        assert np.array_equal(drawn[0], again[0])
        assert np.array_equal(drawn[0], source.fetch(numbers)[0]) != differs
    folder = opened("images", path=str(images), size=16, augment="standard").fetch_drawn(numbers, draws)
    assert np.array_equal(opened("shards", **options).fetch_drawn(numbers, draws)[0], folder[0])


# --- texts


def test_texts_are_cut_into_the_windows_of_the_text_source(jsonl: Path, tmp_path: Path) -> None:
    tokens = HowToPack(shard_bytes=2**16, tokenizer="bytes")
    pack(Records(str(jsonl)), tmp_path / "text", SMALL, workers=1)
    pack(Records(str(jsonl)), tmp_path / "tokens", tokens, workers=1)
    pack(Records(str(jsonl), validation=0.1), tmp_path / "held", tokens, workers=1)
    for options in ({}, {"packing": True}, {"objective": "masked"}, {"validation": 0.0}, {"validation": 0.001}):
        for split in ("train", "validation"):
            if split == "validation" and options.get("validation") == 0.0:
                continue
            wanted = opened("text", split, path=str(jsonl), context=48, **options)
            for packed in ("text", "tokens") if "validation" in options else ("text", "tokens", "held"):
                found = opened("shards", split, path=str(tmp_path / packed), context=48, verify=True, **options)
                if "packing" in options:  # packs are planned by the documents, which are the same
                    assert (len(found), found.note is not None) == (len(wanted), True)
                assert equal(wanted, found), (options, split, packed)
                assert (found.vocabulary, found.tokenizer_hash) == (256, "bytes-1")


def test_long_text_files_have_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text("\ufeff" + f"line {number} é\n" * (2_000 + number))
    tokens = HowToPack(shard_bytes=2**16, tokenizer="bytes", keep_text=True)
    packed = pack(Records(str(tmp_path / "texts")), tmp_path / "d", tokens, workers=1)
    assert [part.name for part in packed.description.parts] == ["text", "tokens"]
    wanted = opened("text", path=str(tmp_path / "texts"), context=100)
    assert equal(wanted, opened("shards", path=str(tmp_path / "d"), context=100))
    assert opened("shards", path=str(tmp_path / "d"), context=100).fingerprint == packed.description.fingerprint


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> tuple[TokenStream, TokenStream, np.ndarray, list[int]]:
    """Documents of many lengths in shards, all and some of them, and the same as one array."""
    folder = tmp_path_factory.mktemp("stream")
    texts = ["x" * (37 * number % 600) + chr(65 + number % 26) for number in range(300)]
    (folder / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    pack(Records(str(folder / "a.jsonl")), folder / "d", HowToPack(2**16, tokenizer="bytes", keep_text=True), workers=1)
    shards = Shards(str(folder / "d"), verify=False)
    assert len(shards.description.shards) > 2
    whole = TokenStream(shards, 0, len(shards))
    some = TokenStream(shards, 0, 0, np.arange(0, 300, 3))
    flat = np.frombuffer("\0".join([*texts, ""]).encode(), np.uint8)
    return whole, some, flat, [len(text) + 1 for text in texts]


@given(st.lists(st.tuples(st.integers(0, 2**31), st.integers(0, 3000)), min_size=1, max_size=5))
def test_any_stretches_of_the_stream_are_what_one_long_array_has(stream: Any, wanted: list[tuple[int, int]]) -> None:
    whole, _, flat, lengths = stream
    assert len(whole) == len(flat)
    assert whole.document_lengths.tolist() == lengths
    starts = np.array([start % len(flat) for start, _ in wanted])
    counts = np.array([min(count, len(flat) - start) for start, (_, count) in zip(starts, wanted, strict=True)])
    expected = np.concatenate([flat[start : start + count] for start, count in zip(starts, counts, strict=True)])
    assert np.array_equal(whole.runs(starts, counts), expected)
    places = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    assert np.array_equal(whole[places], flat[places])


def test_a_long_document_is_compared_once_and_then_read_in_windows(stream: Any, monkeypatch: Any) -> None:
    _, _, flat, lengths = stream
    monkeypatch.setattr(reading, "LONG_BYTES", 300)
    shards = Shards(stream[0]._shards.storage.folder)
    whole, read = TokenStream(shards, 0, len(shards)), []
    plain = shards.read_span
    monkeypatch.setattr(shards, "read_span", lambda *span: read.append(span[2] - span[1]) or plain(*span))
    for number in (5, 16):  # 186 and 593 bytes: a short one is compared every time
        for _ in range(2):
            start = int(whole.starts[number]) + 100
            assert np.array_equal(whole.runs(np.array([start]), np.array([20])), flat[start : start + 20])
    assert read == [lengths[5], lengths[5], lengths[16], 20]
    for start in range(0, len(flat), 997):  # some of each kind behind each other
        end = min(start + 2000, len(flat))
        assert np.array_equal(whole.runs(np.array([start]), np.array([end - start])), flat[start:end])


def test_some_documents_form_a_stream_of_their_own(stream: Any) -> None:
    whole, some, _, lengths = stream
    assert some.document_lengths.tolist() == lengths[::3]
    expected = whole.runs(whole.starts[:-1:3], np.array(lengths[::3]))
    assert np.array_equal(some.runs(np.array([0]), np.array([len(some)])), expected)


def test_another_tokenizer_than_the_packed_one_is_refused(jsonl: Path, tmp_path: Path) -> None:
    import tokenizers

    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    other.save(str(tmp_path / "tokenizer.json"))
    pack(Records(str(jsonl)), tmp_path / "d", HowToPack(2**16, tokenizer="bytes"), workers=1)
    with pytest.raises(InputError, match=r"data.tokenizer: .* holds tokens of bytes .* is another tokenizer"):
        opened("shards", path=str(tmp_path / "d"), context=8, tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=r"data.context: missing"):
        opened("shards", path=str(tmp_path / "d"))


# --- samples of several parts


def own(split: str) -> Any:
    if split == "validation":
        return None
    return [
        {
            "picture": image,
            "caption": "ab" * number,
            "box": np.full(4, number / 2),
            "label": number % 3,
            "flags": [1, 2],
        }
        for number, image in enumerate(PICTURES)
    ]


PICTURES: list[bytes] = []


def test_samples_of_several_parts_are_dicts_for_a_users_model(images: Path, tmp_path: Path) -> None:
    PICTURES[:] = [file.read_bytes() for file in sorted((images / "bee").iterdir())]
    packed = pack(OwnDataset("own", own), tmp_path / "d", SMALL, workers=1)
    assert packed.description.content == "samples"
    source = opened("shards", path=str(tmp_path / "d"), size=8, context=6, validation=0.0)
    data = Indexed(source)
    order = source.part.locate(np.arange(20))  # type: ignore[attr-defined]
    batch = data.finish(data.fetch(np.argsort(order)), torch.float32)
    assert isinstance(batch, dict)
    assert {name: (list(value.shape), value.dtype) for name, value in batch.items()} == {
        "picture": ([20, 3, 8, 8], torch.float32),
        "caption": ([20, 6], torch.int64),
        "caption_length": ([20], torch.int64),
        "box": ([20, 4], torch.float32),
        "label": ([20], torch.int64),
        "flags": ([20, 2], torch.int64),
    }
    assert batch["caption"][1].tolist() == [97, 98, 0, 0, 0, 0]
    assert batch["caption_length"].tolist() == [min(2 * number, 6) for number in range(20)]
    assert batch["box"][5].tolist() == [2.5] * 4
    assert batch["label"].tolist() == [number % 3 for number in range(20)]
    with pytest.raises(InputError, match=r"data.context: missing: the samples have a text, 'caption'"):
        opened("shards", path=str(tmp_path / "d"))


def test_samples_packed_from_tuples_are_tuples(tmp_path: Path) -> None:
    pairs = [(np.full(2, number, np.float32), number % 2, 0.5) for number in range(6)]
    pack(OwnDataset("own", lambda split: pairs if split == "train" else None), tmp_path / "d", SMALL, workers=1)
    data = Indexed(opened("shards", path=str(tmp_path / "d"), validation=0.0))
    batch = data.finish(data.fetch(np.arange(6)), torch.float64)
    assert isinstance(batch, tuple)
    assert [(list(part.shape), part.dtype) for part in batch] == [
        ([6, 2], torch.float64),
        ([6], torch.int64),
        ([6], torch.float64),
    ]
    assert (batch[0][:, 0] % 2).tolist() == batch[1].tolist()


def test_parts_that_some_samples_lack_and_shapes_that_differ_are_refused(tmp_path: Path) -> None:
    lacking = [{"x": 1, "y": 1.0}, {"x": 2}]
    pack(OwnDataset("a", lambda split: lacking if split == "train" else None), tmp_path / "a", SMALL, workers=1)
    with pytest.raises(InputError, match=r"not every sample has each part: y \(1 of 2\)"):
        opened("shards", path=str(tmp_path / "a"), validation=0.0)
    ragged = [{"x": np.zeros(2)}, {"x": np.zeros(3)}]
    pack(OwnDataset("b", lambda split: ragged if split == "train" else None), tmp_path / "b", SMALL, workers=1)
    with pytest.raises(InputError, match=r"part 'x' has the shapes \[2\] and \[3\]"):
        everything(opened("shards", path=str(tmp_path / "b"), validation=0.0))


# --- damage


def damage(folder: Path, number: int, part: int) -> Path:
    """Flip a bit of a sample."""
    shards = Shards(str(folder))
    places = shards.index.places(np.array([number]), part)
    file = folder / shards.description.shards[places.shards[0]].file
    data = bytearray(file.read_bytes())
    data[places.offsets[0] + places.lengths[0] // 2] ^= 4
    file.write_bytes(data)
    return file


def test_a_damaged_sample_is_named_as_it_is_read(images: Path, tmp_path: Path) -> None:
    pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1)
    file = damage(tmp_path / "d", 25, 0)
    checked = opened("shards", path=str(tmp_path / "d"), size=8, validation=0.0)
    with pytest.raises(DamagedSample, match=r"shard-000001.tar, sample 'bee/img_04' \(number 25\), part 'image'"):
        everything(checked)
    places = checked.shards.index.places(np.array([25]), 0)
    file.write_bytes(file.read_bytes()[: places.offsets[0] + 1])
    with pytest.raises(GradusError, match=r"shard-000001.tar ends too early"):
        everything(opened("shards", path=str(tmp_path / "d"), size=8, validation=0.0))
    file.unlink()
    with pytest.raises(InputError, match=r"shard-000001.tar does not exist"):
        everything(opened("shards", path=str(tmp_path / "d"), size=8, validation=0.0))


@pytest.mark.parametrize("keys", [{}, {"packing": True}])
def test_damaged_tokens_are_named_as_they_are_read(jsonl: Path, tmp_path: Path, keys: dict[str, bool]) -> None:
    pack(Records(str(jsonl)), tmp_path / "d", HowToPack(2**16, tokenizer="bytes"), workers=1)
    damage(tmp_path / "d", 7, 0)
    with pytest.raises(DamagedSample, match=r"\(number 7\), part 'tokens'"):
        everything(opened("shards", path=str(tmp_path / "d"), context=16, validation=0.0, **keys))


def test_damaged_text_is_never_kept_as_tokens(jsonl: Path, tmp_path: Path) -> None:
    pack(Records(str(jsonl)), tmp_path / "d", HowToPack(2**16), workers=1)
    damage(tmp_path / "d", 7, 0)
    keys = {"path": str(tmp_path / "d"), "context": 16, "cache": str(tmp_path / "cache")}
    for verify in (True, False):
        with pytest.raises(DamagedSample, match=r"\(number 7\), part 'text'"):
            opened("shards", verify=verify, **keys)
    assert list((tmp_path / "cache").rglob("*.bin")) == []


def test_a_damaged_or_foreign_index_is_refused(images: Path, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    pack(ImageFolders(images), folder, SMALL, workers=1)
    data = bytearray((folder / "index").read_bytes())
    data[-200] ^= 1
    (folder / "index").write_bytes(data)
    with pytest.raises(GradusError, match="index is not as it was written"):
        opened("shards", path=str(folder))
    (folder / "index").write_bytes(data[:-1])
    with pytest.raises(GradusError, match="is not the index of"):
        opened("shards", path=str(folder))
    later = json.dumps({**json.loads((folder / "dataset.json").read_text()), "version": 2})
    for content in ("{", "[]", '{"format": "other"}', '{"format": "gradus-shards", "version": 1}', later):
        (folder / "dataset.json").write_text(content)
        with pytest.raises(InputError, match="does not describe shards"):
            source_options("shards", {"path": str(folder)})
    with pytest.raises(InputError, match=r"has no dataset.json; allowed: a folder that `gradus data pack` wrote"):
        source_options("shards", {"path": str(tmp_path)})
