"""Tokenizers: text comes back, the hash is that of the content, and what a tokenizer lacks is said."""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers
import yaml

from gradus.data.source import open_source
from gradus.data.tokenizer import TIKTOKEN_PATTERNS, Tokenizer, open_tokenizer
from gradus.data.tokenizer_training import train_bpe
from gradus.schema.errors import InputError

LINES = [f"The quick brown fox number {n} can't jump over {n * n} lazy dogs.\n" for n in range(300)]
TEXTS = ["The quick fox can't.", "dogs  dogs\n\n 12345", ""]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "bpe").mkdir()
    train_bpe(LINES, 400, folder / "bpe" / "tokenizer.json")
    (folder / "lines.txt").write_text("".join(LINES))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines.txt"), model_prefix=str(folder / "sp"), vocab_size=120, minloglevel=2
    )
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merged in (b"th", b"he", b" q", b"qu", b"og", b"dog", b" d", b"The"):
        ranks[merged] = len(ranks)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "merges.tiktoken").write_text("\n".join(lines) + "\n")
    return {
        "tokenizers": folder / "bpe" / "tokenizer.json",
        "folder": folder / "bpe",
        "sentencepiece": folder / "sp.model",
        "tiktoken": folder / "merges.tiktoken",
    }


def opened(kind: str, files: dict[str, Path]) -> Tokenizer:
    return open_tokenizer(str(files.get(kind, "bytes")), "gpt2" if kind == "tiktoken" else None)


@pytest.mark.parametrize(
    ("kind", "vocabulary", "end"),
    [("bytes", 256, 0), ("tokenizers", 400, 0), ("folder", 400, 0), ("sentencepiece", 120, 2), ("tiktoken", 265, 264)],
)
def test_text_comes_back(kind: str, vocabulary: int, end: int, files: dict[str, Path]) -> None:
    tokenizer = opened(kind, files)
    assert (tokenizer.vocabulary, tokenizer.end_of_text) == (vocabulary, end)
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert all(0 <= token < vocabulary for token in ids)
        expected = " ".join(text.split()) if kind == "sentencepiece" else text  # which normalises white space
        assert tokenizer.decode(ids.tolist()) == expected


def test_a_tiktoken_file_gives_what_tiktoken_gives(files: dict[str, Path]) -> None:
    ranks = {}
    for line in files["tiktoken"].read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    for name, pattern in TIKTOKEN_PATTERNS.items():
        theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 264})
        ours = open_tokenizer(str(files["tiktoken"]), name)
        assert [ids.tolist() for ids in ours.encode(TEXTS)] == [theirs.encode_ordinary(text) for text in TEXTS]
    hashes = {open_tokenizer(str(files["tiktoken"]), name).hash for name in TIKTOKEN_PATTERNS}
    assert len(hashes) == 2, "another pattern is another tokenizer"


def test_the_hash_is_that_of_the_content(files: dict[str, Path], tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.json"
    copy.write_bytes(files["tokenizers"].read_bytes())
    assert open_tokenizer(str(copy)).hash == opened("tokenizers", files).hash == opened("folder", files).hash
    copy.write_bytes(copy.read_bytes().replace(b"<|endoftext|>", b"<|end_of_text|>"))
    assert open_tokenizer(str(copy)).hash != opened("tokenizers", files).hash
    assert len({opened(kind, files).hash for kind in ("bytes", "tokenizers", "sentencepiece", "tiktoken")}) == 4


def test_the_end_of_a_text_is_configured_or_named(files: dict[str, Path], tmp_path: Path) -> None:
    document = json.loads(files["tokenizers"].read_text())
    document["added_tokens"][0]["content"] = "<odd>"
    document["model"]["vocab"] = {
        token.replace("<|endoftext|>", "<odd>"): i for token, i in document["model"]["vocab"].items()
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"data.end_of_text: missing, and .* has none of <\|endoftext\|>"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(InputError, match=r"data.end_of_text: found '<eos>', which is no token of"):
        open_tokenizer(str(tmp_path), end_of_text="<eos>")
    assert open_tokenizer(str(tmp_path), end_of_text="<odd>").end_of_text == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<odd>"}}))
    assert open_tokenizer(str(tmp_path)).end_of_text == 0


def words(folder: Path, *special: str) -> str:
    """A tokenizer.json with these special tokens and one word."""
    vocabulary = {name: i for i, name in enumerate([*special, "word"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=special[0]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize("end", ["[EOS]", "</s>", "<|endoftext|>", "<eos>", "<|im_end|>", "<|eos|>", "[SEP]"])
def test_the_usual_names_of_the_end_of_a_text_are_known(end: str, tmp_path: Path) -> None:
    assert open_tokenizer(words(tmp_path, "[UNK]", "[PAD]", end)).end_of_text == 2


def test_where_both_stand_the_end_of_a_text_is_not_what_separates_sentences(tmp_path: Path) -> None:
    assert open_tokenizer(words(tmp_path, "[UNK]", "[SEP]", "[EOS]")).end_of_text == 2


@pytest.mark.parametrize("wanted", [None, "[SEP]"])
def test_the_hint_for_the_end_of_a_text_can_be_pasted(wanted: str | None, tmp_path: Path) -> None:
    folder = words(tmp_path, "[UNK]", "[PAD]", "[DOC_END]")
    with pytest.raises(InputError, match=r"data\.end_of_text") as caught:
        open_tokenizer(folder, end_of_text=wanted)
    hint = str(caught.value.hint)
    assert "others that look special: [UNK], [PAD]" in hint
    option, change = shlex.split(hint[hint.index("--set") : hint.index(";")])
    key, _, value = change.partition("=")
    assert (option, key) == ("--set", "data.end_of_text")
    assert open_tokenizer(folder, end_of_text=yaml.safe_load(value)).end_of_text == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{}", "is no tokenizer.json"),
        ("a.model", b"nothing", "is no sentencepiece model"),
        ("a.tiktoken", b"IQ== 0\nIg== x\n", "line 2: not a token and its rank"),
        ("a.tiktoken", b"", "is empty"),
        ("a.bin", b"", "is no tokenizer file"),
    ],
)
def test_a_broken_tokenizer_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        open_tokenizer(str(tmp_path / name), "gpt2")
    assert caught.value.details["field"] == "data.tokenizer"


def test_a_tiktoken_file_needs_to_know_how_texts_are_cut(files: dict[str, Path]) -> None:
    with pytest.raises(InputError, match=r"data.tiktoken_pattern: missing.*Allowed: gpt2, cl100k"):
        open_tokenizer(str(files["tiktoken"]))


@pytest.mark.parametrize("package", ["tokenizers", "sentencepiece", "tiktoken"])
def test_a_missing_package_is_named_with_the_way_to_get_it(
    package: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf"needs the package {package}; it is not installed") as caught:
        opened(package, files)
    assert caught.value.hint == 'pip install "gradus[text]"'


def bpe(path: Path, split: Any = "train", **options: Any) -> Any:
    block = {"path": str(path), "context": 8, "tokenizer": {"train": "bpe", "vocabulary": 330}, **options}
    return open_source("text", block, split, 1)


def test_a_trained_tokenizer_is_the_same_in_every_process(tmp_path: Path, files: dict[str, Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from gradus.data.tokenizer_training import train_bpe\n"
        f"train_bpe({LINES!r}, 400, Path(sys.argv[1]))"
    )
    for number in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / f"{number}.json")], check=True)
    contents = {(tmp_path / f"{number}.json").read_bytes() for number in range(2)}
    assert contents == {files["tokenizers"].read_bytes()}


def test_a_tokenizer_is_trained_on_the_training_documents_only(tmp_path: Path) -> None:
    """Held-out documents consist of one word each that no other has; had they been read, it would be a token."""
    file = tmp_path / "a.jsonl"

    def write(word_for_held_out: str, held_out: set[int]) -> None:
        texts = [word_for_held_out * 50 if n in held_out else LINES[n] for n in range(100)]
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    write("", set())
    texts = [line.rstrip("\0") for line in LINES[:100]]
    source = bpe(file, "validation", tokenizer="bytes", context=1)
    windows = source.fetch(np.arange(len(source)))["tokens"]
    shown = bytes([*windows[0, :1].tolist(), *windows[:, 1].tolist()]).decode()
    held_out = {number for number, text in enumerate(texts) if text in shown}
    assert len(held_out) == 10
    write("zzzyyyxxx", held_out)
    one = bpe(file)
    write("wwwvvvuuu", held_out)
    two = bpe(file)
    assert one.tokenizer_hash == two.tokenizer_hash
    assert bpe(file, validation=0).tokenizer_hash != one.tokenizer_hash
