"""Texts in shards: windows or packs of the tokens that were packed, or of the text, tokenised once into the cache."""

from __future__ import annotations

from array import array
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from gradus.data.order import Indices
from gradus.data.progress import Progress
from gradus.data.shards.reading import Shards
from gradus.data.shards.token_stream import TokenStream
from gradus.data.source import Source
from gradus.data.sources.packed import Documents, PackedTexts, packing_plan
from gradus.data.sources.text import Masking, TextSource, TextWindows, Tokens, in_form
from gradus.data.sources.text_files import TextFiles
from gradus.data.sources.tokenised import Prepared
from gradus.data.split import TEXT_BLOCKS, Part, Split, blocks, held_out_documents, scattered, whole
from gradus.data.token_cache import cache_folder, cached, key_of, meta_of
from gradus.data.tokenised import BATCH_TEXTS, FORMAT, Mapped, token_dtype
from gradus.data.tokenizer import BYTES, Tokenizer, open_tokenizer, tokenizer_file


class ShardedText(TextFiles):
    """The keys of `text`, for texts that lie in shards without their tokens."""

    use = "shards"
    verify: bool = True

    def check(self) -> None:
        if isinstance(self.tokenizer, dict):
            message = "a tokenizer is trained on text files; for shards, name one"
            raise self.refuse("tokenizer", message, allowed="bytes, or a tokenizer file")
        if self.tokenizer != BYTES:
            tokenizer_file(self.tokenizer)

    @cached_property
    def _shards(self) -> Shards:
        return Shards(self.path, verify=self.verify, cache=self.cache)

    def _part(self) -> int:
        found = self._shards.description.part(self.field)
        texts = [part.name for part in self._shards.description.text_parts()]
        if found is None or self.field not in texts:
            message = f"the samples of {self.path} have no text {self.field!r}"
            raise self.refuse("field", message, allowed=texts or "shards of text")
        return found

    def prepare(self) -> Prepared:
        assert isinstance(self.tokenizer, str), self.tokenizer
        tokenizer = open_tokenizer(self.tokenizer, self.tiktoken_pattern, self.end_of_text)
        self._part()
        fingerprint = self._shards.description.fingerprint
        key = key_of(
            [FORMAT, "shards", fingerprint, self.field, self.validation, tokenizer.hash, tokenizer.end_of_text]
        )
        folder = cached(cache_folder(self.cache), key, lambda work: self._tokenise(work, tokenizer))
        return Prepared(folder, meta_of(folder), tokenizer)

    def _tokenise(self, folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
        """The same files that texts from anywhere else become."""
        # Always compared with its checksum: what is kept would pass for the tokens of the text that was packed.
        shards = Shards(self.path, verify=True, cache=self.cache)
        counts, part = shards.description.samples, self._part()
        held_out = None
        if not counts["validation"] and self.validation:
            held_out = held_out_documents(counts["train"], self.validation)
        progress = Progress("tokenising")
        dtype = token_dtype(tokenizer.vocabulary)
        offsets = {split: array("q", [0]) for split in ("train", "validation")}
        end = np.array([tokenizer.end_of_text], dtype)
        length = len(shards)
        with ExitStack() as stack:
            streams = {
                split: stack.enter_context((folder / f"{split}.tokens.bin").open("wb"))
                for split in ("train", "validation")
            }
            for start in range(0, length, BATCH_TEXTS):
                numbers = np.arange(start, min(start + BATCH_TEXTS, length))
                texts = [data.decode("utf-8", errors="replace") for data in shards.read(numbers, part)]
                for number, ids in zip(numbers.tolist(), tokenizer.encode(texts), strict=True):
                    held = number >= counts["train"] or (held_out is not None and bool(held_out[number]))
                    split = "validation" if held else "train"
                    streams[split].write(ids.astype(dtype).tobytes() + end.tobytes())
                    offsets[split].append(offsets[split][-1] + len(ids) + 1)
                progress.say(f"{start + len(numbers):,} of {length:,} documents")
        for split, values in offsets.items():
            (folder / f"{split}.offsets.bin").write_bytes(values.tobytes())
        return {
            "format": FORMAT,
            "dtype": dtype,
            "documents": {split: len(values) - 1 for split, values in offsets.items()},
            "tokens": {split: values[-1] for split, values in offsets.items()},
            "path": self.path,
        }

    def open(self, split: Split, seed: int) -> Source:
        source = super().open(split, seed)
        source.fingerprint = self._shards.description.fingerprint
        return source


class ShardedTokens(ShardedText):
    """The same keys, for shards that hold tokens: nothing has to be tokenised, and nothing is cached."""

    def check(self) -> None:
        about = self._shards.description.tokens
        assert about is not None, self.path
        if "tokenizer" not in self.model_fields_set:
            return
        super().check()
        assert isinstance(self.tokenizer, str), self.tokenizer
        given = open_tokenizer(self.tokenizer, self.tiktoken_pattern, self.end_of_text)
        if given.hash != about.tokenizer_hash:
            message = f"{self.path} holds tokens of {about.tokenizer} (hash {about.tokenizer_hash[:12]})"
            message += f", {self.tokenizer} is another tokenizer (hash {given.hash[:12]})"
            hint = "leave data.tokenizer out, or pack the texts again with this one"
            raise self.refuse("tokenizer", message, hint=hint, allowed=about.tokenizer)

    def token_count(self) -> int:
        about = self._shards.description.tokens
        assert about is not None, self.path
        return about.vocabulary

    @property
    def ready(self) -> bool:
        return True

    def prepare(self) -> Any:
        """Nothing is left to be done."""

    def open(self, split: Split, seed: int) -> Source:
        description = self._shards.description
        about = description.tokens
        assert about is not None, self.path
        stream, separate = self._stream(split)
        masking = self._mask(about.mask_token, about.vocabulary, about.tokenizer, seed)
        origin = f"{self.path} has {stream.documents} {split} documents with {len(stream)} tokens"
        if self.packing:
            identity = ["shards", description.fingerprint, split if separate else "all", self.validation]
            plan = packing_plan(cache_folder(self.cache), identity, lambda: stream.document_lengths, self.context, seed)
            part = whole(plan.packs) if separate else scattered(plan.packs, self.validation, split)
            part = self.limited(part, plan.packs, split, origin)
            tokens, offsets = (cast(Mapped, _As(each)) for each in (stream, stream.starts))
            source: Source = PackedTexts(
                Documents(tokens, offsets),
                plan,
                part,
                padding=about.end_of_text,
                vocabulary=about.vocabulary,
                masking=masking,
                form=self.form,
            )
            source.note = (
                f"{stream.documents:,} documents are packed into {plan.packs:,} contexts, {plan.efficiency:.2%} full"
            )
        else:
            length = TextWindows.count(len(stream), self.context)
            part = whole(length) if separate else blocks(length, self.validation, split)
            part = self.limited(part, length, split, f"{origin}, a window is context + 1 = {self.context + 1}")
            source = StreamedWindows(stream, part, self.context, about.vocabulary, masking, self.form)
            if not separate and self.validation:
                source.note = (
                    f"{stream.documents} documents are too few to hold out {self.validation:g} of them: "
                    f"up to {TEXT_BLOCKS} stretches of the text are held out for validation"
                )
        source.tokenizer_hash = about.tokenizer_hash
        source.fingerprint = description.fingerprint
        return source

    def _stream(self, split: Split) -> tuple[TokenStream, bool]:
        """The documents of a split, and whether it has its own: packed as such, or held out by document now."""
        counts = self._shards.description.samples
        train = counts["train"]
        if counts["validation"]:
            validation = split == "validation"
            return TokenStream(self._shards, train if validation else 0, counts[split]), True
        held_out = held_out_documents(train, self.validation) if self.validation else None
        if held_out is None:
            return TokenStream(self._shards, 0, train), self.validation == 0
        return TokenStream(self._shards, 0, 0, np.flatnonzero(held_out == (split == "validation"))), True

    def _mask(self, known: int | None, vocabulary: int, tokenizer: str, seed: int) -> Masking | None:
        if self.objective == "next":
            return None
        mask_token = known if self.mask_token is None else self.mask_token
        if mask_token is None or not 0 <= mask_token < vocabulary:
            message = f"the objective 'masked' needs the id of a mask token, and {tokenizer} names none"
            raise self.refuse("mask_token", message, allowed=f"0 to {vocabulary - 1}")
        return Masking(seed, mask_token, vocabulary)


class StreamedWindows(TextSource):
    """Windows cut from a stream of documents, `context` apart, as if it were one long text."""

    def __init__(
        self, stream: TokenStream, part: Part, context: int, vocabulary: int, masking: Masking | None, form: str
    ) -> None:
        super().__init__(part.length, context, vocabulary, masking)
        self.stream, self.part, self.form = stream, part, form

    def windows(self, indices: Indices) -> Tokens:
        starts = self.part.locate(indices) * self.context
        lengths = np.full(len(starts), self.context + 1)
        return self.stream.runs(starts, lengths).reshape(len(starts), self.context + 1)

    def finish(self, batch: Any, dtype: Any) -> Any:
        return in_form(self.form, super().finish(batch, dtype), masked=self.masking is not None)


class _As:
    """What a mapped file looks like to those who read it."""

    def __init__(self, array: Any) -> None:
        self.array = array
