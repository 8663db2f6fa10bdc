"""`dataset.json`: what a folder of shards holds. It is written last, so where it is, everything else is there too."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gradus.data.shards.parts import is_image, kind_of
from gradus.data.shards.storage import Storage
from gradus.record.format import first_line
from gradus.schema.errors import InputError

DESCRIPTION = "dataset.json"
INDEX = "index"
FORMAT = "gradus-shards"
VERSION = 1

Content = Literal["images", "text", "samples"]
TOKENS = "tokens"  # the name of the part that holds the numbers of a text's tokens


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class File(_Frozen):
    bytes: int
    xxh3_64: str


class ShardFile(File):
    file: str
    samples: int


class PartOf(_Frozen):
    """A part that samples have: members that end in one of `suffixes`. Not every sample needs to have it."""

    name: str
    suffixes: tuple[str, ...]
    samples: int
    bytes: int

    @property
    def kinds(self) -> set[str]:
        return {kind_of(suffix) for suffix in self.suffixes}

    @property
    def image(self) -> bool:
        return all(is_image(suffix) for suffix in self.suffixes)


class TokensOf(_Frozen):
    """How texts were turned into numbers; each ends with `end_of_text`."""

    dtype: str
    tokenizer: str
    tokenizer_hash: str
    vocabulary: int
    end_of_text: int
    mask_token: int | None
    count: int


class Description(_Frozen):
    format: Literal["gradus-shards"] = "gradus-shards"
    version: int = VERSION
    content: Content
    samples: dict[Literal["train", "validation"], int]  # training samples come first
    parts: tuple[PartOf, ...]
    label: str | None  # the part that is a class number
    classes: tuple[str, ...] | None  # their names, if they have names
    class_count: int | None
    tokens: TokensOf | None
    shards: tuple[ShardFile, ...]
    index: File
    packed: dict[str, Any]  # from what and how

    @property
    def length(self) -> int:
        return sum(self.samples.values())

    @property
    def fingerprint(self) -> str:
        """The same for the same samples in the same order: the index has a checksum of everything in them."""
        return self.index.xxh3_64

    def part(self, name: str) -> int | None:
        return next((number for number, part in enumerate(self.parts) if part.name == name), None)

    def image_part(self) -> PartOf | None:
        return next((part for part in self.parts if part.image), None)

    def text_parts(self) -> list[PartOf]:
        return [part for part in self.parts if part.kinds == {"txt"}]


def is_packed(storage: Storage) -> bool:
    return storage.exists(DESCRIPTION)


def read_description(storage: Storage, field: str = "data.path") -> Description:
    """The description of the shards in a folder, or an error that says what is there instead."""
    if not storage.exists(DESCRIPTION):
        allowed = "a folder that `gradus data pack` wrote"
        raise InputError(
            f"{field}: {storage.folder} has no {DESCRIPTION}; allowed: {allowed}",
            hint="if packing was stopped, the same command goes on with it",
            field=field,
            found=storage.folder,
            allowed=allowed,
        )
    text = storage.open_range(DESCRIPTION, 0, storage.size(DESCRIPTION))
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if document.get("version") != VERSION:
            raise ValueError(f"its version is {document.get('version')}, allowed: {VERSION}")
        return Description.model_validate(document)
    except (ValueError, ValidationError) as error:
        what = first_line(error)
        message = f"{field}: {storage.folder}/{DESCRIPTION} does not describe shards: {what}"
        raise InputError(message, field=field, found=storage.folder) from None
