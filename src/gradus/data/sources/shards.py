"""`shards`: what `gradus data pack` wrote: pictures with classes, texts, or samples of several parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradus.data.images import Augment, Decoder, check_decoder, pictures
from gradus.data.order import Indices, Words
from gradus.data.shards.description import Content
from gradus.data.shards.parts import array, kind_of, numbers_in
from gradus.data.shards.reading import Shards
from gradus.data.source import Batch, Source
from gradus.data.sources.folder import DEVIATION, MEAN
from gradus.data.sources.image import Augmented, ImageFormat, ImageOptions, ImageSource, normalised
from gradus.data.sources.options import Count
from gradus.data.sources.sharded_text import ShardedText, ShardedTokens
from gradus.data.sources.text import Objective
from gradus.data.split import Part, Split, scattered, whole
from gradus.data.tokenizer import BYTES, Bytes, Tokenizer, open_tokenizer
from gradus.schema.errors import InputError

# The keys that matter for texts, as `text` has them.
TEXT_KEYS = ("field", "tokenizer", "tiktoken_pattern", "end_of_text", "objective", "mask_token", "form", "packing")
# Those that samples of several parts have a use for, if one part is a text.
PART_KEYS = ("context", "tokenizer", "tiktoken_pattern", "end_of_text")


class PackedShards(ImageOptions):
    use = "shards"

    path: str  # a folder that `gradus data pack` wrote, or an address: s3://, gs://, https://
    kind: Content | None = None  # by default, what the shards were packed as
    verify: bool = True  # compare every sample with its checksum as it is read
    cache: str | None = None
    size: Count = 224  # of pictures
    decoder: Decoder = "auto"
    context: Count | None = None  # of texts
    field: str = "text"
    tokenizer: str = BYTES
    tiktoken_pattern: Literal["gpt2", "cl100k"] | None = None
    end_of_text: str | None = None
    objective: Objective = "next"
    mask_token: int | None = None
    form: Literal["tokens", "huggingface"] = "tokens"
    packing: bool = False

    @cached_property
    def shards(self) -> Shards:
        return Shards(self.path, verify=self.verify, cache=self.cache)

    @property
    def content(self) -> Literal["text", "images"]:  # type: ignore[override]
        return "text" if self._kind == "text" else "images"

    @property
    def _kind(self) -> Content:
        return self.kind or self.shards.description.content

    def check(self) -> None:
        check_decoder(self.decoder)
        description = self.shards.description
        if self._kind == "images" and (description.image_part() is None or description.label is None):
            parts = ", ".join(part.name for part in description.parts)
            message = f"{self.path} has no pictures with classes; its samples have: {parts}"
            raise self.refuse("kind", message, allowed="samples")
        if self._kind == "text":
            self._text()
        else:
            self._refuse_text_keys()

    def _refuse_text_keys(self) -> None:
        """What nobody would read must not look as if it meant something."""
        for key in ("context", *TEXT_KEYS):
            if self._kind == "samples" and key in PART_KEYS:
                continue
            if getattr(self, key) != type(self).model_fields[key].default:
                what = "pictures with classes" if self._kind == "images" else "samples of several parts"
                message = f"found {getattr(self, key)!r}, but {self.path} has {what}, and this key is for texts"
                raise self.refuse(key, message, hint=f"leave out data.{key}")

    def _text(self) -> ShardedText:
        """The options of a text source."""
        if self.context is None:
            raise self.refuse("context", "missing: how many tokens is a sample of this text?", allowed="a whole number")
        general = ("path", "limit", "validation", "verify", "cache", "context")
        given = {name: getattr(self, name) for name in (*general, *TEXT_KEYS) if name in self.model_fields_set}
        packed = self.shards.description.tokens is not None and self.field == "text"
        return (ShardedTokens if packed else ShardedText).parse(given)

    def image_shape(self) -> tuple[int, int, int] | None:
        return (3, self.size, self.size) if self._kind == "images" else None

    def token_count(self) -> int | None:
        return self._text().token_count() if self._kind == "text" else None

    @property
    def ready(self) -> bool:
        return self._kind != "text" or self._text().ready

    def prepare(self) -> Any:
        return self._text().prepare() if self._kind == "text" else None

    def readable_by(self) -> Tokenizer | None:
        """What turns the tokens of a sample into text again, where that is known here."""
        if self._kind != "text":
            return None
        packed = self.shards.description.tokens
        if packed is None or self.field != "text" or "tokenizer" in self.model_fields_set:
            return open_tokenizer(self.tokenizer, self.tiktoken_pattern, self.end_of_text)
        return Bytes() if packed.tokenizer_hash == Bytes.hash else None

    def open(self, split: Split, seed: int) -> Source:
        if self._kind == "text":
            return self._text().open(split, seed)
        counts = self.shards.description.samples
        published = counts["validation"] > 0
        first = counts["train"] if published and split == "validation" else 0
        length = counts[split] if published else counts["train"]
        part = whole(length) if published else scattered(length, self.validation, split)
        part = self.limited(part, length, split, f"{self.path} has {length} samples")
        kind = ShardImages if self._kind == "images" else SampleParts
        source = kind(self.shards, part, first, self, self.augment_of(split))
        source.fingerprint = self.shards.description.fingerprint
        return source


class _Pictures:
    """One part of the samples, decoded."""

    def __init__(self, shards: Shards, part: int, size: int, decoder: Decoder) -> None:
        self._shards, self._part, self._size, self._decoder = shards, part, size, decoder

    def __call__(self, numbers: Indices, draws: Words | None) -> NDArray[np.uint8]:
        contents = self._shards.read(numbers, self._part)

        def name(row: int) -> str:
            return self._shards.name(int(numbers[row]))

        return pictures(contents, len(contents), self._size, draws, name, self._decoder)


class ShardImages(Augmented, ImageSource):
    """Pictures with their classes."""

    def __init__(self, shards: Shards, part: Part, first: int, options: PackedShards, augment: Augment) -> None:
        description = shards.description
        assert description.class_count is not None, options.path
        size = options.size
        super().__init__(part.length, ImageFormat((3, size, size), description.class_count, MEAN, DEVIATION))
        image = next(place for place, part in enumerate(description.parts) if part.image)
        assert shards.index.labels is not None, options.path
        self.part, self.first, self.augment = part, first, augment
        self.shards = shards
        self._pictures = _Pictures(shards, image, size, options.decoder)

    def _fetched(self, indices: Indices, draws: Words | None) -> Batch:
        numbers = self.part.locate(indices) + self.first
        assert self.shards.index.labels is not None
        return self._pictures(numbers, draws), self.shards.index.labels[numbers]


class SampleParts(Augmented):
    """Samples of several parts, as a dict for a model of the user's own; those packed from tuples, as a tuple.

    Pictures are resized and normalised, arrays stacked, numbers are numbers. A text becomes `context` token ids, cut or
    filled up with the end-of-text token, and beside it `<name>_length`, how many of them are text.
    """

    def __init__(self, shards: Shards, part: Part, first: int, options: PackedShards, augment: Augment) -> None:
        super().__init__(part.length)
        self.shards, self.part, self.first, self.augment = shards, part, first, augment
        self.size, self.context, self.decoder = options.size, options.context, options.decoder
        self.tokenizer = (options.tokenizer, options.tiktoken_pattern, options.end_of_text)
        self.classes = shards.description.class_count
        self.images = [part.name for part in shards.description.parts if part.image]
        self.sample_shape = (3, self.size, self.size) if self.images else ()
        missing = [part for part in shards.description.parts if part.samples < len(shards)]
        if missing:
            names = ", ".join(f"{part.name} ({part.samples:,} of {len(shards):,})" for part in missing)
            message = f"not every sample has each part: {names}"
            raise options.refuse(
                "path", message, hint="pack the samples that have all of them", allowed="whole samples"
            )
        if self.context is None and shards.description.text_parts():
            name = shards.description.text_parts()[0].name
            message = f"missing: the samples have a text, {name!r}; how many tokens of it are wanted?"
            raise options.refuse("context", message, allowed="a whole number")

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return open_tokenizer(*self.tokenizer)

    def _fetched(self, indices: Indices, draws: Words | None) -> Batch:
        numbers = self.part.locate(indices) + self.first
        batch: dict[str, NDArray[Any]] = {}
        for place, part in enumerate(self.shards.description.parts):
            if part.image:
                batch[part.name] = _Pictures(self.shards, place, self.size, self.decoder)(numbers, draws)
            elif part.name == self.shards.description.label and self.shards.index.labels is not None:
                batch[part.name] = self.shards.index.labels[numbers]
            else:
                batch |= self._stacked(part.name, numbers, place)
        return tuple(batch.values()) if self._positions(batch) else batch

    def _positions(self, names: Iterable[str]) -> bool:
        """Whether parts are called by their places in a tuple."""
        return all(name == str(place) for place, name in enumerate(names))

    def _stacked(self, name: str, numbers: Indices, place: int) -> dict[str, NDArray[Any]]:
        contents = self.shards.read(numbers, place)
        kinds = {kind_of(self.shards.suffix(int(each), place)) for each in numbers}
        if kinds == {"txt"}:
            return self._texts(name, contents)
        if kinds == {"npy"}:
            values = [array(data) for data in contents]
        elif kinds <= {"cls", "json"}:
            values = [self._numbers(name, data, int(each)) for data, each in zip(contents, numbers, strict=True)]
        else:
            known = "pictures, arrays, numbers and texts"
            message = f"data.path: part {name!r} is {', '.join(sorted(kinds))}, and a batch is made of {known}"
            hint = "read them with WebDataset, or pack what the model takes"
            raise InputError(message, hint=hint, field="data.path", found=sorted(kinds), allowed=known)
        shapes = {value.shape for value in values}
        if len(shapes) > 1:
            found = " and ".join(str(list(shape)) for shape in sorted(shapes)[:3])
            message = f"data.path: part {name!r} has the shapes {found}; samples of one batch must be alike"
            raise InputError(message, field="data.path", found=found, allowed="one shape")
        return {name: np.stack(values)}

    def _numbers(self, name: str, data: bytes, sample: int) -> NDArray[Any]:
        value = numbers_in(data)
        if value is None:
            where = self.shards.name(sample)
            message = f"data.path: {where}: part {name!r} is neither a number nor a list of numbers"
            raise InputError(message, field="data.path", found=where, allowed="numbers")
        return value

    def _texts(self, name: str, contents: list[bytes]) -> dict[str, NDArray[Any]]:
        assert self.context is not None, name
        tokens = np.full((len(contents), self.context), self._tokenizer.end_of_text, np.int64)
        lengths = np.empty(len(contents), np.int64)
        encoded = self._tokenizer.encode([data.decode("utf-8", errors="replace") for data in contents])
        for row, ids in enumerate(encoded):
            cut = ids[: self.context]
            tokens[row, : len(cut)], lengths[row] = cut, len(cut)
        return {name: tokens, f"{name}_length": lengths}

    def finish(self, batch: Any, dtype: Any) -> Any:
        if not isinstance(batch, Mapping):
            named = {str(place): column for place, column in enumerate(batch)}
            return tuple(self._finished(named, dtype).values())
        return self._finished(batch, dtype)

    def _finished(self, batch: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
        finished = {}
        for name, column in batch.items():
            if name in self.images:
                form = ImageFormat((3, self.size, self.size), 0, MEAN, DEVIATION)
                finished[name] = normalised(column, form, dtype)
            elif column.is_floating_point():
                finished[name] = column.to(dtype)
            else:
                finished[name] = column if column.dtype.itemsize == 1 else column.long()
        return finished
