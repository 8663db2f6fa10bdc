"""A tokenizer trained on the spot: byte-level BPE on the training texts, the same each time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gradus.data.progress import Progress
from gradus.data.records import needed_package
from gradus.data.tokenizer import ALLOWED, END_OF_TEXT, refused
from gradus.schema.errors import unknown_name

SMALLEST = 257  # every byte, and the end of a text
# More text hardly changes which pairs are the most frequent ones, and reading it takes long.
TRAINING_CHARACTERS = 2**30


def vocabulary_to_train(given: Mapping[str, Any]) -> int:
    """The number of tokens that `{train: bpe, vocabulary: 8192}` asks for."""
    for key in given:
        if key not in ("train", "vocabulary"):
            raise unknown_name("key", str(key), ["train", "vocabulary"], field=f"data.tokenizer.{key}")
    if given.get("train") != "bpe":
        raise refused(f"train: found {given.get('train')!r}, allowed: bpe", given.get("train"), ["bpe"])
    vocabulary = given.get("vocabulary")
    if type(vocabulary) is not int or vocabulary < SMALLEST:
        allowed = f"a whole number, at least {SMALLEST}: every byte and the end of a text"
        raise refused(f"vocabulary: found {vocabulary!r}, allowed: {allowed}", vocabulary, ALLOWED)
    return vocabulary


def train_bpe(texts: Iterable[str], vocabulary: int, file: Path) -> int:
    """Write a tokenizer.json; returns how many characters it was trained on."""
    library = needed_package("tokenizers", "data.tokenizer: training one")
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = library.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    read = _Counted(texts)
    tokenizer.train_from_iterator(read, trainer)
    tokenizer.save(str(file))
    return read.characters


class _Counted:
    """The first texts, as many as are enough."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        progress = Progress("training a tokenizer")
        for text in self._texts:
            yield text.encode("utf-8", errors="replace").decode("utf-8")
            self.characters += len(text)
            progress.say(f"{self.characters:,} characters read")
            if self.characters >= TRAINING_CHARACTERS:
                return
