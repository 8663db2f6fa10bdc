"""`text`: every kind of file gives the same documents, each ended by its token, split by document."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard

from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.source import Source, open_source, source_options
from gradus.data.sources.text_files import IN_MEMORY_BYTES, CachedWindows
from gradus.schema.errors import InputError

TEXTS = [f"Document {number} says {'ja ' * (number % 5)}ünd nein." for number in range(40)]


def opened(path: Path | str, split: Any = "train", **options: Any) -> CachedWindows:
    source = open_source("text", {"path": str(path), "context": 8, **options}, split, 1)
    assert isinstance(source, CachedWindows)
    return source


def all_tokens(source: Source) -> bytes:
    """The text behind the windows: each begins with the last token of the one before."""
    windows = source.fetch(np.arange(len(source)))["tokens"]  # type: ignore[index,call-overload]
    return bytes(windows[0, :1].tolist() + windows[:, 1:].ravel().tolist())


def write_jsonl(file: Path) -> Path:
    file.write_text("".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(TEXTS)))
    return file


def write_gzip(folder: Path) -> Path:
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(write_jsonl(folder / "a.jsonl").read_bytes()))
    (folder / "a.jsonl").unlink()
    return folder


def write_zstandard(folder: Path) -> Path:
    content = zstandard.ZstdCompressor().compress(write_jsonl(folder / "a.jsonl").read_bytes())
    (folder / "b.jsonl.zst").write_bytes(content)
    return folder / "b.jsonl.zst"


def write_parquet(folder: Path) -> Path:
    for part, texts in enumerate((TEXTS[:13], TEXTS[13:])):
        table = pyarrow.table({"id": range(len(texts)), "text": texts})
        pyarrow.parquet.write_table(table, folder / f"part-{part}.parquet", row_group_size=5)
    (folder / "README.md").write_text("not data")
    return folder


def write_saved_dataset(folder: Path, texts: list[str] = TEXTS) -> Path:
    """As Hugging Face's `Dataset.save_to_disk` leaves it: Arrow streams, and a state that lists them."""
    folder.mkdir(exist_ok=True)
    names = []
    for part, chunk in enumerate((texts[:20], texts[20:])):
        table = pyarrow.table({"text": chunk})
        names.append(f"data-{part:05}-of-00002.arrow")
        with pyarrow.OSFile(str(folder / names[-1]), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table, max_chunksize=7)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def write_plain(folder: Path) -> Path:
    for number, text in enumerate(TEXTS):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


@pytest.mark.parametrize(
    "write",
    [
        lambda f: write_jsonl(f / "a.jsonl"),
        write_gzip,
        write_zstandard,
        write_parquet,
        write_saved_dataset,
        write_plain,
    ],
    ids=["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "save_to_disk", "plain"],
)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    expected = "".join(text + "\0" for text in TEXTS).encode()
    found = all_tokens(opened(write(tmp_path), validation=0))
    assert found == expected[: len(found)]
    assert len(expected) - len(found) < 8


def test_a_wildcard_means_the_files_that_match(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "never"}\n')
    source = opened(tmp_path / "a*.jsonl", validation=0)
    assert b"Document 39" in all_tokens(source)
    assert b"never" not in all_tokens(source)


def test_a_pattern_chooses_files_of_any_ending(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.rst").write_text("a text to be learnt " * 5)
    (tmp_path / "b.txt").write_text("not this one")
    assert b"learnt" in all_tokens(opened(tmp_path, validation=0, pattern="*.rst"))
    with pytest.raises(InputError, match=r"has no files that match '\*.tex'"):
        opened(tmp_path, pattern="*.tex")


def test_validation_is_by_document_and_no_document_is_on_both_sides(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl")
    train, validation = opened(file, context=1), opened(file, "validation", context=1)
    sides = [set(all_tokens(source).decode().split("\0")) & set(TEXTS) for source in (train, validation)]
    assert (len(sides[0]), len(sides[1])) == (36, 4)
    assert not sides[0] & sides[1]
    assert train.note == "4 of 40 documents are for validation"
    again = opened(file, "validation", context=1, tokenizer={"train": "bpe", "vocabulary": 300})
    assert len(again) < len(validation)  # the same documents in fewer tokens


def test_too_few_documents_are_held_out_in_stretches(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {n}\n" for n in range(500)))
    train, validation = opened(tmp_path / "book.txt"), opened(tmp_path / "book.txt", "validation")
    assert len(validation) == pytest.approx(0.1 * (len(train) + len(validation)), rel=0.05)
    assert train.note is not None
    assert "1 documents are too few to hold out 0.1 of them" in train.note


@pytest.mark.parametrize("names", [("train.jsonl", "validation.jsonl"), ("train-0.jsonl", "test-0.jsonl")])
def test_files_named_after_their_split_are_that_split(tmp_path: Path, names: tuple[str, str]) -> None:
    for name, word in zip(names, ("learn ", "check "), strict=True):
        (tmp_path / name).write_text(json.dumps({"text": word * 20}) + "\n")
    assert b"check" not in all_tokens(opened(tmp_path))
    assert b"learn" not in all_tokens(opened(tmp_path, "validation"))
    (tmp_path / "other.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(InputError, match=r"others that say neither: other.jsonl"):
        opened(tmp_path)


def test_a_dictionary_of_saved_datasets_brings_its_splits(tmp_path: Path) -> None:
    for split, word in (("train", "learn"), ("validation", "check"), ("test", "never")):
        write_saved_dataset(tmp_path / split, [f"{word} {n}" for n in range(30)])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation", "test"]}))
    found = [all_tokens(opened(tmp_path, split)) for split in ("train", "validation")]
    assert b"learn 27" in found[0]
    assert b"check 27" in found[1]
    assert not any(b"never" in text for text in found)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "good"}\n{"text": bad}\n', r"a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"text": "good"}\n\n["text"]\n', r"a.jsonl, line 3: found a list, allowed: one JSON object"),
        ("a.jsonl", b'{"txt": "x"}\n', r"a.jsonl, line 1: no key 'text'; did you mean 'txt'\? Found: txt"),
        ("a.jsonl", b'{"text": null}\n', r"a.jsonl, line 1: 'text' is null, allowed: text"),
        ("a.json", b'[\n{"text": "x"}\n]\n', r"a.json, line 1: not valid JSON"),
        ("a.txt", b"good\nbad \xff\n", r"a.txt, line 2: not UTF-8"),
        ("a.jsonl.gz", b"no gzip", r"a.jsonl.gz: cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-9], r"a.jsonl.gz: cannot be read"),
        ("a.jsonl.zst", b"no zstandard", r"a.jsonl.zst: cannot be unpacked"),
        ("a.parquet", b"no parquet", r"a.parquet: not a readable parquet file"),
    ],
)
def test_what_is_broken_is_named_with_file_and_line(
    tmp_path: Path, cache: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        opened(tmp_path / name)
    assert caught.value.details["field"] == "data.path"
    assert not list(cache.iterdir()), "nothing half-made is left"


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    with pytest.raises(InputError, match=r"part-0.parquet: no key 'txet'; did you mean 'text'\? Found: id, text"):
        opened(tmp_path, field="txet")
    with pytest.raises(InputError, match=r"row 1: no key 'txet'"):
        opened(write_saved_dataset(tmp_path / "saved"), field="txet")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "/no/such.jsonl"}, r"data.path: /no/such.jsonl does not exist"),
        ({"path": "/no/*.jsonl"}, r"data.path: /no/\*.jsonl matches no file"),
        (
            {"tokenizer": "byts"},
            r"data.tokenizer: .*does not exist; did you mean 'bytes'\? Allowed: bytes, a tok",
        ),
        ({"tokenizer": {"train": "bpe"}}, r"data.tokenizer: vocabulary: found None"),
        ({"tokenizer": {"train": "bpe", "vocabulary": 100}}, r"at least 257"),
        ({"tokenizer": {"train": "unigram", "vocabulary": 999}}, r"train: found 'unigram', allowed: bpe"),
        ({"tokenizer": {"train": "bpe", "vocab": 999}}, r"did you mean 'vocabulary'"),
        ({"form": "hf"}, r"data.form: found 'hf'"),
    ],
)
def test_a_mistake_is_found_before_anything_is_read(tmp_path: Path, cache: Path, options: Any, message: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=message):
        source_options("text", {"path": str(file), "context": 8, **options})
    assert not cache.exists()


def test_a_folder_of_several_kinds_asks_for_a_pattern(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "b.txt").write_text("text")
    with pytest.raises(InputError, match=r"several kinds: jsonl \(a.jsonl\) and text \(b.txt\)"):
        opened(tmp_path)
    assert len(opened(tmp_path, pattern="*.jsonl")) > 10


def test_a_validation_set_shorter_than_a_window_says_what_to_change(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=r"4 documents for validation have \d+ tokens, fewer than a window") as caught:
        opened(file, "validation", context=500)
    assert caught.value.hint is not None
    assert "context + 1 = 501" in caught.value.hint


def test_a_long_text_is_read_in_pieces_and_stays_one_document(tmp_path: Path) -> None:
    text = "".join(f"{number} über alles\n" for number in range(200_000))
    (tmp_path / "long.txt").write_text(text)
    source = opened(tmp_path / "long.txt", validation=0)
    found = all_tokens(source)
    assert found == (text + "\0").encode()[: len(found)]
    assert len(text.encode()) > 2 * 2**20


def test_words_are_masked_for_bert_with_the_tokenizers_mask(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl")
    batch = opened(file, objective="masked").fetch(np.arange(20))
    assert isinstance(batch, dict)
    assert (batch["tokens"] == 1).any()
    with pytest.raises(InputError, match=r"data.mask_token: .*names none"):
        opened(file, objective="masked", tokenizer={"train": "bpe", "vocabulary": 300})


def test_huggingface_models_get_the_keys_they_expect(tmp_path: Path) -> None:
    source = opened(write_jsonl(tmp_path / "a.jsonl"), form="huggingface")
    raw = source.fetch(np.arange(2))
    assert isinstance(raw, dict)
    batch = source.finish({name: torch.from_numpy(column) for name, column in raw.items()}, torch.float32)
    assert batch.keys() == {"input_ids", "labels"}
    assert torch.equal(batch["input_ids"], batch["labels"])  # the model shifts them
    assert batch["labels"].shape == (2, 8)


def test_workers_and_the_device_see_the_same_samples(tmp_path: Path) -> None:
    source = opened(write_jsonl(tmp_path / "a.jsonl"), tokenizer={"train": "bpe", "vocabulary": 300})
    assert source.text.dtype == np.uint16
    assert source.text.nbytes < IN_MEMORY_BYTES
    assert len(pickle.dumps(source)) < 2000
    found = []
    for workers, on_device in ((0, True), (0, False), (2, False)):
        loader = Loader(
            Indexed(source),
            Slices(4, 4, 1, 0, 12),
            torch.device("cpu"),
            torch.float32,
            seed=3,
            workers=workers,
            on_device=on_device,
        )
        found.append([batch.inputs["targets"] for batch in loader.micro_batches(0, 3)])  # type: ignore[index]
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))
