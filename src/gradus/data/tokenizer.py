"""Tokenizers: bytes, or files of `tokenizers`, `sentencepiece` and `tiktoken`. Each has a hash of its content."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.records import needed_package
from gradus.schema.errors import InputError, nearest

BYTES = "bytes"
ALLOWED = "bytes, a tokenizer.json, .model or .tiktoken file, a folder with one, or {train: bpe, vocabulary: 8192}"
# How a text is cut before pairs are merged: a .tiktoken file holds the merges only, so the recipe has to say.
TIKTOKEN_PATTERNS = {
    "gpt2": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Published ids that do not simply follow the merges: cl100k_base leaves 100256 free.
TIKTOKEN_ENDS = {("cl100k", 100_256): 100_257}
END_OF_TEXT = "<|endoftext|>"
# What well-known tokenizers call it; a tokenizer_config.json beside the file goes before.
ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "<|eos|>", "[EOS]", "[SEP]")
MASKS = ("[MASK]", "<mask>")
_SPECIAL = re.compile(r"\[[A-Za-z_]\w*\]|</?[^<>\s'\"]+>")  # what is mostly written in brackets: [CLS], <s>, <|pad|>
_LIKE_AN_END = re.compile(r"end|eo[stdm]|sep|/s", re.IGNORECASE)
_SPECIAL_SHOWN = 5

Ids = NDArray[Any]


class Tokenizer(ABC):
    """Text to numbers and back."""

    name: str  # for people: where it comes from
    hash: str  # of its content: the same file has the same hash anywhere
    vocabulary: int  # one more than the largest id
    end_of_text: int
    mask_token: int | None = None

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, with nothing added at either end."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...


def open_tokenizer(name: str, tiktoken_pattern: str | None = None, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names."""
    if name == BYTES:
        return Bytes()
    file = tokenizer_file(name)
    if file.suffix == ".tiktoken":
        return TiktokenFile(file, tiktoken_pattern, end_of_text)
    kind = SentencePieceFile if file.suffix == ".model" else TokenizersFile
    return kind(file, end_of_text)


def tokenizer_file(name: str) -> Path:
    """The file behind a name that is not `bytes`; refused if there is none."""
    path = Path(name)
    if path.is_file() and path.suffix in (".json", ".model", ".tiktoken"):
        return path
    if path.is_dir():
        inside = [path / "tokenizer.json", path / "tokenizer.model", *sorted(path.glob("*.model"))]
        inside += sorted(path.glob("*.tiktoken"))
        found = next((file for file in inside if file.is_file()), None)
        if found is not None:
            return found
    problem = f"{path.absolute()} " + (
        "has no tokenizer in it" if path.is_dir() else "is no tokenizer file" if path.exists() else "does not exist"
    )
    close = nearest(path.name, [BYTES])
    raise refused(f"{problem}{f'; did you mean {close!r}?' if close else ''} Allowed: {ALLOWED}", name, ALLOWED)


def refused(message: str, found: Any, allowed: Any, hint: str | None = None, key: str = "tokenizer") -> InputError:
    return InputError(f"data.{key}: {message}", hint=hint, field=f"data.{key}", found=found, allowed=allowed)


class Bytes(Tokenizer):
    """Each byte of UTF-8 is a token. Byte 0, which no text contains, ends a document, so 256 tokens are enough."""

    name = BYTES
    hash = f"{BYTES}-1"
    vocabulary = 256
    end_of_text = 0
    mask_token = 1

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        # JSON may hold half of a surrogate pair, which has no bytes of its own.
        return [np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class TokenizersFile(Tokenizer):
    """A `tokenizer.json`, as Hugging Face models bring it."""

    def __init__(self, file: Path, end_of_text: str | None) -> None:
        library = needed_package("tokenizers", f"data.tokenizer: {file}")
        content = file.read_bytes()
        try:
            self._tokenizer = library.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare exceptions
            raise refused(f"{file} is no tokenizer.json: {error}", str(file), ALLOWED) from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # It starts threads; without this word it warns about every loader worker that is forked afterwards.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = str(file)
        self.hash = content_hash("tokenizers", content)
        self.vocabulary = max(vocabulary.values()) + 1
        configured = special_tokens(file.parent).get("eos_token")
        self.end_of_text = _end_of_text(file, vocabulary, end_of_text, configured)
        self.mask_token = next((vocabulary[name] for name in MASKS if name in vocabulary), None)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        # The fast form does not keep where in the text each token came from.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        found = encode([_whole(text) for text in texts], add_special_tokens=False)
        return [np.asarray(encoding.ids, np.uint32) for encoding in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


class SentencePieceFile(Tokenizer):
    """A `.model` of sentencepiece."""

    def __init__(self, file: Path, end_of_text: str | None) -> None:
        library = needed_package("sentencepiece", f"data.tokenizer: {file}")
        content = file.read_bytes()
        try:
            self._processor = library.SentencePieceProcessor(model_proto=content)
        except Exception as error:
            hint = "some .model files are in truth tiktoken files: copy it to a name that ends in .tiktoken"
            raise refused(f"{file} is no sentencepiece model: {error}", str(file), ALLOWED, hint) from None
        size = int(self._processor.vocab_size())
        pieces = {self._processor.id_to_piece(i): i for i in range(size)}
        self.name = str(file)
        self.hash = content_hash("sentencepiece", content)
        self.vocabulary = size
        eos = int(self._processor.eos_id())
        configured = self._processor.id_to_piece(eos) if eos >= 0 else None
        self.end_of_text = _end_of_text(file, pieces, end_of_text, configured)
        self.mask_token = next((pieces[name] for name in MASKS if name in pieces), None)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.asarray(ids, np.uint32) for ids in self._processor.encode([_whole(text) for text in texts])]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([int(i) for i in ids]))


class TiktokenFile(Tokenizer):
    """A `.tiktoken` file: lines of a token in base64 and its rank."""

    def __init__(self, file: Path, pattern: str | None, end_of_text: str | None) -> None:
        library = needed_package("tiktoken", f"data.tokenizer: {file}")
        if pattern is None:
            allowed = ", ".join(TIKTOKEN_PATTERNS)
            raise refused(
                f"missing, and {file.name} does not say how texts are cut into words. Allowed: {allowed}",
                None,
                list(TIKTOKEN_PATTERNS),
                "gpt2 for r50k_base.tiktoken, cl100k for cl100k_base.tiktoken",
                key="tiktoken_pattern",
            )
        if end_of_text not in (None, END_OF_TEXT):
            raise refused(f"found {end_of_text!r}, a .tiktoken file has only {END_OF_TEXT}", end_of_text, END_OF_TEXT)
        content = file.read_bytes()
        ranks = _tiktoken_ranks(file, content)
        self.end_of_text = TIKTOKEN_ENDS.get((pattern, len(ranks)), max(ranks.values()) + 1)
        self._encoding = library.Encoding(
            file.stem,
            pat_str=TIKTOKEN_PATTERNS[pattern],
            mergeable_ranks=ranks,
            special_tokens={END_OF_TEXT: self.end_of_text},
        )
        self.name = f"{file} ({pattern})"
        self.hash = content_hash("tiktoken", content, pattern.encode())
        self.vocabulary = self.end_of_text + 1

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self._encoding.encode_ordinary_batch([_whole(text) for text in texts])
        return [np.asarray(ids, np.uint32) for ids in found]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(i) for i in ids]))


def content_hash(kind: str, *contents: bytes) -> str:
    digest = hashlib.sha256(kind.encode())
    for content in contents:
        digest.update(f"{len(content)}:".encode() + content)
    return digest.hexdigest()[:32]


def special_tokens(folder: Path) -> dict[str, str]:
    """`eos_token`, `bos_token` and the like, as the folder of a Hugging Face model names them."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json_object(folder / name).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


def json_object(file: Path) -> dict[str, Any]:
    """The object in a file that may not be there."""
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise refused(f"{file} is not valid JSON: {error}", str(file), "a JSON object") from None
    return document if isinstance(document, dict) else {}


def _end_of_text(file: Path, vocabulary: dict[str, int], wanted: str | None, configured: str | None) -> int:
    if wanted is not None:
        if wanted not in vocabulary:
            message = f"found {wanted!r}, which is no token of {file}"
            raise refused(message, wanted, "a token of the tokenizer", _naming_an_end(vocabulary), key="end_of_text")
        return vocabulary[wanted]
    found = next((name for name in (configured, *ENDS) if name in vocabulary), None)
    if found is None:
        message = f"missing, and {file} has none of {', '.join(ENDS)}"
        raise refused(message, None, "a token of the tokenizer", _naming_an_end(vocabulary), key="end_of_text")
    return vocabulary[found]


def _naming_an_end(vocabulary: dict[str, int]) -> str:
    """How to name the end of a text, in quotes that a shell and YAML need for brackets, with a token that is there."""
    special = sorted((name for name in vocabulary if _SPECIAL.fullmatch(name)), key=vocabulary.__getitem__)
    likely = [name for name in (*ENDS, *special) if name in vocabulary and _LIKE_AN_END.search(name)]
    example = next(iter([*likely, *special]), "TOKEN")
    others = [name for name in special if name != example][:_SPECIAL_SHOWN]
    hint = f"name the token that shall separate documents: --set 'data.end_of_text={json.dumps(example)}'"
    return hint + (f"; others that look special: {', '.join(others)}" if others else "")


def _tiktoken_ranks(file: Path, content: bytes) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise refused(f"{file}, line {number}: not a token and its rank: {error}", str(file), ALLOWED) from None
    if not ranks:
        raise refused(f"{file} is empty", str(file), ALLOWED)
    return ranks


def _whole(text: str) -> str:
    """The text without halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")
