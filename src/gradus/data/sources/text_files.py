"""`text`: JSONL, Parquet, Hugging Face datasets on disk or plain files, as windows of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gradus.data.files import DataFiles
from gradus.data.records import Piece, read_pieces
from gradus.data.source import Batch, Source
from gradus.data.sources.packed import Documents, PackedTexts, packing_plan
from gradus.data.sources.text import Masking, Objective, TextWindows, in_form
from gradus.data.sources.tokenised import Prepared, TokenisedOptions
from gradus.data.sources.tokens import MappedWindows
from gradus.data.split import TEXT_BLOCKS, Split, blocks, scattered, whole
from gradus.data.token_cache import cache_folder
from gradus.data.tokenised import Files, split_documents, write_texts
from gradus.data.tokenizer import Tokenizer

IN_MEMORY_BYTES = 64 * 2**20  # a shorter text may live on the training device


class TextFiles(TokenisedOptions):
    use = "text"

    field: str = "text"  # of records
    objective: Objective = "next"
    mask_token: int | None = None
    form: Literal["tokens", "huggingface"] = "tokens"  # the keys of a batch: tokens, targets or input_ids, labels
    packing: bool = False  # whole documents in each sample, each of which the model sees alone

    def open(self, split: Split, seed: int) -> Source:
        prepared = self.prepare()
        source = self._packed(prepared, split, seed) if self.packing else self._windows(prepared, split, seed)
        source.tokenizer_hash, source.fingerprint = prepared.tokenizer.hash, prepared.fingerprint
        return source

    def _packed(self, prepared: Prepared, split: Split, seed: int) -> Source:
        documents = prepared.meta["documents"]
        file, separate = _file_of(prepared, split)
        texts = Documents.in_cache(prepared.folder, file, prepared.meta["dtype"])
        identity = [prepared.folder.name, file]  # the name is a hash of all that decides about the tokens
        plan = packing_plan(
            cache_folder(self.cache), identity, lambda: np.diff(texts.offsets.array), self.context, seed
        )
        part = whole(plan.packs) if separate else scattered(plan.packs, self.validation, split)
        part = self.limited(part, plan.packs, split, f"{self.path} has {prepared.origin(file)}")
        source = PackedTexts(
            texts,
            plan,
            part,
            padding=prepared.tokenizer.end_of_text,
            vocabulary=prepared.tokenizer.vocabulary,
            masking=self._masking(prepared.tokenizer, seed),
            form=self.form,
        )
        packs = f"{documents[file]:,} documents are packed into {plan.packs:,} contexts, {plan.efficiency:.2%} full"
        held = self._note(prepared) if separate else part.note
        source.note = f"{packs}; {held}" if held else packs
        return source

    def _windows(self, prepared: Prepared, split: Split, seed: int) -> Source:
        documents = prepared.meta["documents"]
        file, separate = _file_of(prepared, split)
        tokens = prepared.meta["tokens"][file]
        length = TextWindows.count(tokens, self.context)
        if separate and split == "validation" and length == 0:
            message = (
                f"the {documents['validation']} documents for validation have {tokens} tokens, fewer than a window"
            )
            hint = (
                f"a window is context + 1 = {self.context + 1}; hold out more, or nothing (0), or shorten the context"
            )
            raise self.refuse("validation", message, allowed=f"at least {self.context + 1} tokens", hint=hint)
        part = whole(length) if separate else blocks(length, self.validation, split)
        origin = f"{self.path} has {prepared.origin(file)}, a window is context + 1 = {self.context + 1}"
        part = self.limited(part, length, split, origin)
        text = np.memmap(prepared.folder / f"{file}.tokens.bin", prepared.meta["dtype"], mode="r")
        masking = self._masking(prepared.tokenizer, seed)
        source = CachedWindows(text, part, self.context, prepared.tokenizer.vocabulary, masking)
        source.form = self.form
        source.note = self._note(prepared)
        return source

    def _note(self, prepared: Prepared) -> str | None:
        documents = prepared.meta["documents"]
        if self.validation == 0 or documents["validation"]:
            held = documents["validation"]
            return f"{held} of {held + documents['train']} documents are for validation" if held else None
        return (
            f"{documents['train']} documents are too few to hold out {self.validation:g} of them: "
            f"up to {TEXT_BLOCKS} stretches of the text are held out for validation"
        )

    def _masking(self, tokenizer: Tokenizer, seed: int) -> Masking | None:
        if self.objective == "next":
            return None
        mask_token = tokenizer.mask_token if self.mask_token is None else self.mask_token
        allowed = f"0 to {tokenizer.vocabulary - 1}"
        if mask_token is None or not 0 <= mask_token < tokenizer.vocabulary:
            message = f"the objective 'masked' needs the id of a mask token, and {tokenizer.name} names none"
            raise self.refuse("mask_token", message, allowed=allowed)
        return Masking(seed, mask_token, tokenizer.vocabulary)

    def _description(self) -> dict[str, Any]:
        return {"use": self.use, "field": self.field}

    def _read(self, files: Files) -> Iterator[Piece]:
        return read_pieces(files, self.field)

    def _write(self, folder: Path, files: DataFiles, tokenizer: Tokenizer) -> dict[str, Any]:
        return write_texts(folder, files, self.validation, tokenizer, self._read)

    def _training_texts(self, files: DataFiles) -> Iterator[str]:
        _, held_out = split_documents(files, self.validation)
        number = 0
        for piece in self._read(files.train):
            if held_out is None or not held_out[number]:
                yield piece.text
            number += piece.ends


def _file_of(prepared: Prepared, split: Split) -> tuple[Split, bool]:
    """The split in whose file a split is, and whether validation has one: published, or held out by document."""
    separate = prepared.meta["documents"]["validation"] > 0
    return ("validation" if separate and split == "validation" else "train"), separate


class CachedWindows(MappedWindows):
    """Windows of a text in the cache."""

    form: Literal["tokens", "huggingface"] = "tokens"

    @property
    def columns(self) -> Batch | None:  # type: ignore[override]
        if self.text.nbytes > IN_MEMORY_BYTES:
            return None
        small: dict[str, Any] = TextWindows.columns.fget(self)  # type: ignore[attr-defined]
        # On a device, torch selects rows of int32, but not everywhere of uint16 and uint32.
        return {name: column.astype(np.int32) for name, column in small.items()}

    def finish(self, batch: Any, dtype: Any) -> Any:
        return in_form(self.form, super().finish(batch, dtype), masked=self.masking is not None)
