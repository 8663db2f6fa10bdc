"""What `text` and `chat` share: files, a tokenizer, and a cache in which their tokens are kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gradus.data.files import DataFiles, find_files
from gradus.data.sources.options import Count, Options
from gradus.data.split import Split
from gradus.data.token_cache import cache_folder, cached, key_of, meta_of
from gradus.data.tokenised import FORMAT
from gradus.data.tokenizer import BYTES, Tokenizer, open_tokenizer, tokenizer_file
from gradus.data.tokenizer_training import train_bpe, vocabulary_to_train

TRAINED = "tokenizer.json"


class Prepared(NamedTuple):
    """An entry of the cache."""

    folder: Path
    meta: dict[str, Any]
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> str:
        """Of the tokens themselves, wherever they came from and lie."""
        return key_of([self.meta["dtype"], self.meta.get("digests")])

    def origin(self, split: Split) -> str:
        documents, tokens = self.meta["documents"][split], self.meta["tokens"][split]
        return f"{documents} {split} documents with {tokens} tokens by {self.tokenizer.name}"


class TokenisedOptions(Options):
    content = "text"

    path: str  # a file, a folder or a wildcard
    context: Count
    pattern: str | None = None  # which files of a folder
    tokenizer: str | dict[str, Any] = BYTES
    tiktoken_pattern: Literal["gpt2", "cl100k"] | None = None
    end_of_text: str | None = None  # the token that ends a document or an answer, if the tokenizer has several
    cache: str | None = None

    @abstractmethod
    def _description(self) -> dict[str, Any]:
        """What, besides files, tokenizer and split, decides about the tokens."""

    @abstractmethod
    def _write(self, folder: Path, files: DataFiles, tokenizer: Tokenizer) -> dict[str, Any]:
        """Tokenise everything into a folder."""

    @abstractmethod
    def _training_texts(self, files: DataFiles) -> Iterator[str]:
        """The texts of the training split, for a tokenizer to be trained on."""

    def check(self) -> None:
        find_files(self.path, self.pattern)
        if isinstance(self.tokenizer, dict):
            vocabulary_to_train(self.tokenizer)
        elif self.tokenizer != BYTES:
            tokenizer_file(self.tokenizer)

    def token_count(self) -> int:
        if isinstance(self.tokenizer, dict):
            return vocabulary_to_train(self.tokenizer)
        return open_tokenizer(self.tokenizer, self.tiktoken_pattern, self.end_of_text).vocabulary

    def prepare(self) -> Prepared:
        """Tokens and tokenizer from the cache, made now if they are not there. Safe from many processes at once."""
        files = find_files(self.path, self.pattern)
        tokenizer = self._tokenizer(files)
        description = [FORMAT, files.identity(), self.validation, tokenizer.hash, tokenizer.end_of_text]
        key = key_of([*description, self._description()])
        folder = cached(
            cache_folder(self.cache), key, lambda work: {**self._write(work, files, tokenizer), "path": self.path}
        )
        return Prepared(folder, meta_of(folder), tokenizer)

    def _tokenizer(self, files: DataFiles) -> Tokenizer:
        if not isinstance(self.tokenizer, dict):
            return open_tokenizer(self.tokenizer, self.tiktoken_pattern, self.end_of_text)
        vocabulary = vocabulary_to_train(self.tokenizer)

        def train(work: Path) -> dict[str, Any]:
            return {"path": self.path, "characters": train_bpe(self._training_texts(files), vocabulary, work / TRAINED)}

        key = key_of(["bpe", FORMAT, files.identity(), self.validation, vocabulary, self._description()])
        return open_tokenizer(str(cached(cache_folder(self.cache), key, train) / TRAINED))
