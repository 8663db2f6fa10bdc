"""Packed documents: samples that hold several whole documents each, with the number of the document beside each token.

`packing_plan` plans for the lengths of any documents, and keeps the plan in the cache; `PackedTexts` reads by it from
tokens that lie one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradus.data.order import Indices
from gradus.data.packing import FORMAT, WINDOW, packed, ranges
from gradus.data.source import Source
from gradus.data.sources.text import IGNORED, Masking
from gradus.data.split import Part
from gradus.data.token_cache import cached, check_content, key_of, meta_of
from gradus.data.tokenised import Mapped
from gradus.schema.errors import InputError

PLAN = ("first", "documents", "begins")


@dataclass(frozen=True)
class Documents:
    """Tokens of many documents, one after the other."""

    tokens: Mapped
    offsets: Mapped  # document i is tokens[offsets[i]:offsets[i + 1]]

    @classmethod
    def in_cache(cls, folder: Path, split: str, dtype: str) -> Documents:
        return cls(Mapped(folder / f"{split}.tokens.bin", dtype), Mapped(folder / f"{split}.offsets.bin", "int64"))


@dataclass(frozen=True)
class PackingPlan:
    """A plan in the cache: what `Packs` are, as files."""

    context: int
    packs: int
    efficiency: float
    first: Mapped
    documents: Mapped
    begins: Mapped


def packing_plan(
    cache: Path, identity: Any, lengths: Callable[[], NDArray[np.integer]], context: int, seed: int
) -> PackingPlan:
    """The plan for documents of these lengths, from the cache or made now. `identity` says which documents they are."""

    def write(folder: Path) -> dict[str, Any]:
        packs = packed(lengths(), context, seed)
        for name in PLAN:
            getattr(packs, name).tofile(folder / f"{name}.bin")
        return {"context": context, "packs": len(packs), "tokens": packs.tokens, "efficiency": packs.efficiency}

    folder = cached(cache, key_of(["packing", FORMAT, WINDOW, identity, context, seed]), write)
    check_content(folder)  # by every rank: a plan is small beside its tokens
    meta = meta_of(folder)
    files = {name: Mapped(folder / f"{name}.bin", "int64") for name in PLAN}
    return PackingPlan(meta["context"], meta["packs"], meta["efficiency"], **files)


class Packed(Source):
    """Samples of which each holds several documents."""

    def __init__(self, length: int, context: int) -> None:
        super().__init__(length)
        self.tokens_per_sample = context
        self.sample_shape = (context,)

    def finish(self, batch: Any, dtype: Any) -> Any:
        return {name: column if name == "documents" else column.long() for name, column in batch.items()}


class EmptyPacks(Packed):
    """Packs without a text, for whoever asks what they would cost."""

    def fetch(self, indices: Indices) -> dict[str, NDArray[Any]]:
        shape = (len(indices), *self.sample_shape)
        kinds = {"tokens": np.uint16, "targets": np.int32, "documents": np.int32}
        return {name: np.zeros(shape, kind) for name, kind in kinds.items()}


class PackedTexts(Packed):
    """Packs of documents. The target of a token is the next one of its document, also where a long one was cut."""

    def __init__(
        self,
        texts: Documents,
        plan: PackingPlan,
        part: Part,
        *,
        padding: int,
        vocabulary: int,
        masking: Masking | None = None,
        form: Literal["tokens", "huggingface"] = "tokens",
    ) -> None:
        super().__init__(part.length, plan.context)
        if masking is not None and form == "huggingface":
            raise InputError(
                "data.packing: found true, but masked models of Hugging Face do not keep documents apart",
                hint="use data.packing=false, or gradus's own bert with form: tokens",
                field="data.packing",
                found=True,
                allowed=False,
            )
        self.texts, self.plan, self.part = texts, plan, part
        self.padding, self.vocabulary, self.masking, self.form = padding, vocabulary, masking, form

    def fetch(self, indices: Indices) -> dict[str, NDArray[Any]]:
        plan, context, rows = self.plan, self.plan.context, len(indices)
        packs = self.part.locate(indices)
        counts = plan.first.array[packs + 1] - plan.first.array[packs]
        pieces = ranges(plan.first.array[packs], counts)
        documents = plan.documents.array[pieces]
        starts = self.texts.offsets.array[documents] + plan.begins.array[pieces]
        ends = self.texts.offsets.array[documents + 1]
        lengths = np.minimum(ends - starts, context)

        # Pieces lie in a row one after the other. What the rows before leave empty is skipped.
        numbers = ranges(np.zeros_like(counts), counts)
        row = np.repeat(np.arange(rows), counts)
        used = np.bincount(row, lengths, rows).astype(np.int64)
        before = np.cumsum(lengths) - lengths + (np.cumsum(context - used) - (context - used))[row]
        here = ranges(before, lengths)

        # Read once: of a document that goes on, also the token that follows.
        runs = lengths + (starts + lengths < ends)
        text = self.texts.tokens.array[ranges(starts, runs)]
        there = ranges(np.cumsum(runs) - runs, lengths)
        tokens = np.full(rows * context, self.padding, text.dtype)
        tokens[here] = text[there]
        inside = np.repeat(counts, context)
        inside[here] = np.repeat(numbers, lengths)
        shape = (rows, context)
        tokens, of_document = tokens.reshape(shape), inside.astype(np.int32).reshape(shape)
        if self.masking is not None:
            real = of_document < counts[:, None]
            batch = self.masking.apply(tokens, indices, real)
            return {**batch, "documents": of_document}
        if self.form == "huggingface":
            positions = np.zeros(rows * context, np.int32)
            positions[here] = ranges(np.zeros_like(lengths), lengths)
            labels = np.where(positions.reshape(shape) > 0, tokens, np.int64(IGNORED))
            # Padding is a document of its own; what positions it has does not matter, as long as they begin again.
            padding = np.arange(context) - used[:, None]
            positions = np.where(padding >= 0, padding, positions.reshape(shape))
            return {"input_ids": tokens, "labels": labels, "position_ids": positions}
        targets = np.full(rows * context, IGNORED, np.int32)
        follows = np.ones(len(here), np.bool_)
        follows[(np.cumsum(lengths) - 1)[starts + lengths == ends]] = False
        targets[here[follows]] = text[there[follows] + 1]
        return {"tokens": tokens, "targets": targets.reshape(shape), "documents": of_document}
