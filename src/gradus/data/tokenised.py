"""Tokenised: documents and conversations as flat files of token ids in the cache, written once and then mapped."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.conversation import END, Segment
from gradus.data.files import DataFile, DataFiles
from gradus.data.progress import Progress
from gradus.data.records import Piece, count_documents
from gradus.data.split import Split, held_out_documents
from gradus.data.tokenizer import Tokenizer
from gradus.schema.errors import InputError

FORMAT = 3  # of the files in the cache; another number makes them anew
BATCH_TEXTS = 512
BATCH_CHARACTERS = 2**22

Files = tuple[DataFile, ...]
Document = list[Segment]


class Mapped:
    """A file as an array. It travels to a loader's worker as its name, and is mapped there anew."""

    def __init__(self, file: Path, dtype: str) -> None:
        self.file, self.dtype = file, dtype
        self._open()

    def _open(self) -> None:
        empty = self.file.stat().st_size == 0  # which cannot be mapped
        self.array: NDArray[Any] = np.empty(0, self.dtype) if empty else np.memmap(self.file, self.dtype, mode="r")

    def __getstate__(self) -> dict[str, Any]:
        return {"file": self.file, "dtype": self.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


@dataclass(frozen=True)
class Conversations:
    """Tokens of many records, one after the other."""

    tokens: Mapped
    in_loss: Mapped  # for each token whether it is learnt
    offsets: Mapped  # record i is tokens[offsets[i]:offsets[i + 1]]
    answers: Mapped  # where in each record its last answer begins


def open_conversations(folder: Path, dtype: str, split: Split) -> Conversations:
    kinds = {"tokens": dtype, "in_loss": "uint8", "offsets": "int64", "answers": "int64"}
    return Conversations(**{name: Mapped(folder / f"{split}.{name}.bin", kind) for name, kind in kinds.items()})


def token_dtype(vocabulary: int) -> str:
    return "uint8" if vocabulary <= 2**8 else "uint16" if vocabulary <= 2**16 else "uint32"


def split_documents(files: DataFiles, fraction: float) -> tuple[int, NDArray[np.bool_] | None]:
    """How many documents the training files have, and which of them are held out, if any are."""
    count = count_documents(files.train)
    return count, None if files.validation is not None or fraction == 0 else held_out_documents(count, fraction)


def training_only(documents: Iterable[Any], held_out: NDArray[np.bool_] | None) -> Iterator[Any]:
    """Those of the training files' documents that are not held out."""
    for number, document in enumerate(documents):
        if held_out is None or not held_out[number]:
            yield document


@dataclass(frozen=True)
class _Division:
    """What documents there are, and which split each of them belongs to."""

    documents: int
    parts: tuple[tuple[str, Files], ...]  # the files of each split
    held_out: NDArray[np.bool_] | None  # of the training files' documents

    @classmethod
    def of(cls, files: DataFiles, fraction: float) -> _Division:
        count, held_out = split_documents(files, fraction)
        validation = files.validation or ()
        parts = (("train", files.train), ("validation", validation))
        return cls(count + count_documents(validation), parts, held_out)

    def place(self, split: str, number: int) -> str:
        """Where a document goes that is the number-th of its files."""
        held_out = split == "train" and self.held_out is not None and self.held_out[number]
        return "validation" if held_out else split


def write_texts(
    folder: Path, files: DataFiles, fraction: float, tokenizer: Tokenizer, read: Callable[[Files], Iterator[Piece]]
) -> dict[str, Any]:
    """Every document followed by the end-of-text token, in a file for each split, and where each of them begins;
    returns what the cache shall know."""
    division = _Division.of(files, fraction)
    progress = Progress("tokenising")
    dtype = token_dtype(tokenizer.vocabulary)
    tokens: dict[str, int] = {}
    offsets = {split: array("q", [0]) for split in ("train", "validation")}  # where documents begin, and the end
    end = np.array([tokenizer.end_of_text], dtype).tobytes()
    done = 0
    with ExitStack() as stack:
        streams: dict[str, IO[bytes]] = {}
        for split in ("train", "validation"):
            streams[split] = stack.enter_context((folder / f"{split}.tokens.bin").open("wb"))
            tokens[split] = 0
        for split, of_files in division.parts:
            number = 0
            for batch in _batched(read(of_files), lambda piece: len(piece.text)):
                for piece, ids in zip(batch, tokenizer.encode([piece.text for piece in batch]), strict=True):
                    to = division.place(split, number)
                    streams[to].write(ids.astype(dtype).tobytes())
                    tokens[to] += len(ids)
                    if piece.ends:
                        streams[to].write(end)
                        tokens[to] += 1
                        offsets[to].append(tokens[to])
                        number += 1
                        done += 1
                progress.say(f"{done:,} of {division.documents:,} documents, {sum(tokens.values()):,} tokens")
    for split, values in offsets.items():
        (folder / f"{split}.offsets.bin").write_bytes(values.tobytes())
    documents = {split: len(values) - 1 for split, values in offsets.items()}
    return {"format": FORMAT, "dtype": dtype, "documents": documents, "tokens": tokens, **_about(tokenizer)}


def write_conversations(
    folder: Path, files: DataFiles, fraction: float, tokenizer: Tokenizer, read: Callable[[Files], Iterator[Document]]
) -> dict[str, Any]:
    """Every record's tokens and which of them are learnt; returns what the cache shall know."""
    division = _Division.of(files, fraction)
    progress = Progress("tokenising")
    dtype = token_dtype(tokenizer.vocabulary)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(_ConversationWriter(folder, split, dtype)) for split in ("train", "validation")
        }
        for split, of_files in division.parts:
            number = 0
            for batch in _batched(read(of_files), lambda segments: sum(len(s.text or "") for s in segments)):
                for tokens, in_loss in _encoded(batch, tokenizer):
                    if not in_loss.any():
                        message = f"data.path: record {number + 1} of {split} has no token to learn: it is empty"
                        raise InputError(message, field="data.path", found=number + 1, allowed="a prompt and an answer")
                    to = division.place(split, number)
                    writers[to].add(tokens.astype(dtype), in_loss)
                    number += 1
                progress.say(f"{sum(len(w) for w in writers.values()):,} of {division.documents:,} records")
        documents = {split: len(writer) for split, writer in writers.items()}
        counts = {split: writer.offsets[-1] for split, writer in writers.items()}
        learnt = {split: writer.learnt for split, writer in writers.items()}
    return {
        "format": FORMAT,
        "dtype": dtype,
        "documents": documents,
        "tokens": counts,
        "tokens_in_loss": learnt,
        **_about(tokenizer),
    }


class _ConversationWriter:
    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self._folder, self._split = folder, split
        self._tokens, self._in_loss = ((folder / f"{split}.{name}.bin").open("wb") for name in ("tokens", "in_loss"))
        self.offsets, self._answers = array("q", [0]), array("q")
        self.learnt = 0

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, tokens: NDArray[Any], in_loss: NDArray[np.uint8]) -> None:
        self._tokens.write(tokens.tobytes())
        self._in_loss.write(in_loss.tobytes())
        self.offsets.append(self.offsets[-1] + len(tokens))
        begins = np.flatnonzero(np.diff(in_loss, prepend=np.uint8(0)) == 1)
        self._answers.append(int(begins[-1]))
        self.learnt += int(in_loss.sum())

    def __enter__(self) -> _ConversationWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tokens.close()
        self._in_loss.close()
        for name, values in (("offsets", self.offsets), ("answers", self._answers)):
            (self._folder / f"{self._split}.{name}.bin").write_bytes(values.tobytes())


def _about(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer.name,
        "tokenizer_hash": tokenizer.hash,
        "vocabulary": tokenizer.vocabulary,
        "end_of_text": tokenizer.end_of_text,
    }


def _encoded(batch: list[Document], tokenizer: Tokenizer) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8]]]:
    """Each part of a record on its own: at the time of use, the prompt is encoded without knowing the answer."""
    texts = [segment.text for document in batch for segment in document if segment.text is not END]
    encoded = iter(tokenizer.encode([text for text in texts if text is not None]))
    end = np.array([tokenizer.end_of_text], np.uint32)
    for document in batch:
        parts = [end if segment.text is END else next(encoded) for segment in document]
        flags = [np.full(len(part), s.in_loss, np.uint8) for part, s in zip(parts, document, strict=True)]
        tokens, in_loss = np.concatenate([part.astype(np.uint32) for part in parts]), np.concatenate(flags)
        in_loss[:1] = 0  # there is nothing to predict the first token from
        yield tokens, in_loss


def _batched(items: Iterable[Any], size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """Enough at once for a tokenizer with threads, and no more than fits into memory easily."""
    batch: list[Any] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += size(item)
        if len(batch) >= BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
