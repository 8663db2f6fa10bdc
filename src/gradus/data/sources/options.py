"""What a `data:` block may say. Each source declares its keys as the fields of one class, and is opened from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradus.data.source import Source
from gradus.data.split import Part, Split
from gradus.schema.errors import InputError, unknown_name
from gradus.schema.recipe import DataBlock

Count = Annotated[int, Field(ge=1)]
ExistingPath = Annotated[Path, Field(strict=False)]  # not strict: a recipe has only strings

SomeOptions = TypeVar("SomeOptions", bound="Options")


class Options(BaseModel, ABC):
    """The keys that every source has."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    use: ClassVar[str]
    content: ClassVar[Literal["text", "images"]]

    # Train on the first few samples only: a model that cannot learn them by heart has a bug.
    limit: Annotated[int, Field(ge=0)] | None = None
    # The fraction held out, where the data comes without a validation set of its own.
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @abstractmethod
    def open(self, split: Split, seed: int) -> Source:
        """The samples of one split. `seed` matters only where content or masks are drawn at random."""

    def check(self) -> None:
        """Refuse what is wrong with the values together, or with the files they name. Loads nothing large."""

    def prepare(self) -> Any:
        """Do what takes long and has to be done once, so that opening is quick. Safe from many processes at once."""

    @property
    def ready(self) -> bool:
        """Whether it can be opened on the spot: nothing has to be tokenised first."""
        return type(self).prepare is Options.prepare

    def training_samples(self, seed: int) -> int:
        return self.open("train", seed).length

    def image_shape(self) -> tuple[int, int, int] | None:
        """Channels, height and width of the images, as far as they are known without loading them."""
        return None

    def images_in_memory(self, split: Split) -> int | None:
        """How many images of a split are held in memory, as far as that is known without loading them."""
        return None

    def token_count(self) -> int | None:
        """How many tokens a model of this text must know, if a tokenizer says so."""
        return None

    @classmethod
    def parse(cls: type[SomeOptions], given: Mapping[str, Any]) -> SomeOptions:
        """Check names, types and paths, and say what is wrong in the words of the recipe."""
        try:
            options = cls.model_validate(dict(given))
        except ValidationError as error:
            raise cls._explain(error) from None
        for name in cls.model_fields:
            value = getattr(options, name)
            if isinstance(value, Path) and not value.exists():
                raise options.refuse(name, f"{value.absolute()} does not exist", allowed="an existing path")
        options.check()
        return options

    @classmethod
    def _explain(cls, error: ValidationError) -> InputError:
        # An unknown key first: it may be the missing one, misspelt.
        problem = min(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
        name, found = str(problem["loc"][0]), problem["input"]
        field = f"data.{name}"
        if problem["type"] == "extra_forbidden":
            general = set(DataBlock.model_fields) - {"use"}
            return unknown_name(f"option of source {cls.use!r}:", name, {*cls.model_fields, *general}, field=field)
        if problem["type"] == "missing":
            return InputError(f"{field}: missing, but source {cls.use!r} needs it", field=field, allowed="a value")
        allowed = "a path" if problem["type"] == "path_type" else problem["msg"].removeprefix("Input should be ")
        message = f"{field}: found {found!r}; source {cls.use!r} allows: {allowed}"
        return InputError(message, field=field, found=found, allowed=allowed)

    def refuse(self, key: str, message: str, *, allowed: Any = None, hint: str | None = None) -> InputError:
        """The error that blames one key of the data block."""
        found = getattr(self, key)
        return InputError(
            f"data.{key}: {message}",
            hint=hint,
            field=f"data.{key}",
            found=str(found) if isinstance(found, Path) else found,
            allowed=allowed,
        )

    def limited(self, part: Part, length: int, split: Split, origin: str) -> Part:
        """The part with `limit` applied; refused if nothing is left of the `length` samples that `origin` describes."""
        limited = part.first(self.limit) if split == "train" else part
        if limited.length:
            return limited
        too_short = "path" if hasattr(self, "path") else "context"
        key = "limit" if part.length else "validation" if length else too_short
        numbers = f"{length} samples, validation {self.validation}, limit {self.limit}"
        raise self.refuse(
            key, f"source {self.use!r} has no {split} samples: {origin}; {numbers}", allowed="at least one"
        )
