"""The settings of the reference models, checked as they are made. No torch, so that a launcher can check a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gradus.schema.errors import InputError, unknown_name

PROBABILITY = {"least": 0.0, "below": 1.0}


@dataclass(frozen=True)
class Settings:
    """What a reference model is built from. Integers are at least 1 unless a field's metadata says otherwise."""

    def __post_init__(self) -> None:
        kinds = get_type_hints(type(self))
        for setting in fields(self):
            value = checked(setting.name, getattr(self, setting.name), kinds[setting.name], setting.metadata)
            object.__setattr__(self, setting.name, value)
        self.check_together()

    def check_together(self) -> None:
        """Raise for values that are each allowed but do not fit one another."""


@dataclass(frozen=True)
class SimpleCNNSettings(Settings):
    classes: int = 10
    channels: int = 3
    dropout: float = field(default=0.0, metadata=PROBABILITY)


@dataclass(frozen=True)
class MnistCNNSettings(Settings):
    classes: int = 10
    feature_dropout: float = field(default=0.25, metadata=PROBABILITY)  # after the convolutions
    dropout: float = field(default=0.5, metadata=PROBABILITY)  # before the last layer


@dataclass(frozen=True)
class ResNetSettings(Settings):
    depth: Literal[18, 34, 50, 101] = 18
    classes: int = 1000
    channels: int = 3
    small_input: bool = False  # a 3x3 stem without pooling, for images of about 32x32
    image: int | None = None  # side of the images whose work is counted; None: 224, or 32 with small_input
    zero_init_residual: bool = False  # start each residual branch at zero

    @property
    def image_side(self) -> int:
        return self.image or (32 if self.small_input else 224)


@dataclass(frozen=True)
class GPTSettings(Settings):
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int | None = None  # fewer than heads: grouped-query attention; None: as many as heads
    context: int = 256  # longest sequence, in tokens
    vocabulary: int = 256  # number of outputs; 256 is every byte
    positions: Literal["learned", "rotary"] = "learned"
    rotary_base: float = field(default=10_000.0, metadata={"least": 1.0})
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: float = field(default=1e-5, metadata={"least": 0.0})
    activation: Literal["gelu", "gelu-tanh", "swiglu"] = "gelu"  # GPT-2 was trained with the tanh approximation
    inner: int | None = None  # width inside the MLP; None: see inner_width
    bias: bool = True
    tied: bool = True  # the output projection is the token embedding
    dropout: float = field(default=0.0, metadata=PROBABILITY)

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def inner_width(self) -> int:
        """4 x width for GELU; for SwiGLU, with three matrices for two, 8/3 x width rounded up to a multiple of 64."""
        if self.inner is not None:
            return self.inner
        return 64 * math.ceil(8 * self.width / (3 * 64)) if self.activation == "swiglu" else 4 * self.width

    def check_together(self) -> None:
        require_divisor("heads", self.heads, "width", self.width)
        require_divisor("kv_heads", self.key_value_heads, "heads", self.heads)
        if self.positions == "rotary" and self.head_width % 2:
            raise refused(
                "heads",
                self.heads,
                f"a number that makes width / heads even (rotary positions turn pairs); {self.width} / {self.heads}"
                f" = {self.head_width} is odd",
            )


@dataclass(frozen=True)
class BERTSettings(Settings):
    layers: int = 4
    width: int = 128
    heads: int = 4
    inner: int | None = None  # width inside the MLP; None: 4 x width
    context: int = 256  # longest sequence, in tokens
    position_offset: int = field(default=0, metadata={"least": 0})  # unused rows before position 0; RoBERTa has 2
    vocabulary: int = 256
    type_vocabulary: int = 1
    pooler: bool = False  # RoBERTa's pooling layer; masked-token prediction does not use it
    norm_eps: float = field(default=1e-5, metadata={"least": 0.0})  # RoBERTa's; BERT has 1e-12
    dropout: float = field(default=0.0, metadata=PROBABILITY)

    @property
    def inner_width(self) -> int:
        return self.inner or 4 * self.width

    def check_together(self) -> None:
        require_divisor("heads", self.heads, "width", self.width)


@dataclass(frozen=True)
class ViTSettings(Settings):
    image: int = 32  # side of an image, in pixels
    patch: int = 4  # side of a patch, in pixels
    layers: int = 6
    width: int = 192
    heads: int = 3
    inner: int | None = None  # width inside the MLP; None: 4 x width
    classes: int = 10
    channels: int = 3
    dropout: float = field(default=0.0, metadata=PROBABILITY)

    @property
    def inner_width(self) -> int:
        return self.inner or 4 * self.width

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    def check_together(self) -> None:
        require_divisor("patch", self.patch, "image", self.image)
        require_divisor("heads", self.heads, "width", self.width)


def checked(key: str, value: object, kind: Any, limits: Mapping[str, float]) -> object:
    """`value` as its annotation `kind` wants it (an integer for a float becomes one), or an InputError."""
    choices = get_args(kind)
    if get_origin(kind) is Literal:
        if type(value) is type(choices[0]) and value in choices:
            return value
        if isinstance(value, str) and isinstance(choices[0], str):
            raise unknown_name(key, value, choices, field=f"model.{key}")
        raise refused(key, value, " or ".join(repr(choice) for choice in choices))
    if value is None and type(None) in choices:
        return None
    expected = choices[0] if choices else kind
    if expected is float and type(value) is int:
        value = float(value)
    # Exact, because bool is a subclass of int and `layers: true` is a mistake.
    if type(value) is not expected:
        raise refused(key, value, f"{expected.__name__}{' or null' if choices else ''}")
    if expected is bool:
        return value
    assert isinstance(value, int | float)
    least = limits.get("least", 1 if expected is int else -math.inf)
    below = limits.get("below", math.inf)
    if not least <= value < below:
        raise refused(key, value, f"at least {least:g}" + (f" and below {below:g}" if below < math.inf else ""))
    return value


def require_divisor(key: str, divisor: int, of: str, number: int) -> None:
    if number % divisor:
        allowed = [n for n in range(1, number + 1) if number % n == 0]
        raise refused(key, divisor, f"a divisor of {of} ({number}): {', '.join(map(str, allowed))}")


def refused(key: str, found: object, allowed: str) -> InputError:
    return InputError(
        f"model.{key}: found {found!r} ({type(found).__name__}). Allowed: {allowed}",
        field=f"model.{key}",
        found=found,
        allowed=allowed,
    )
