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
    # latent attention: keys and values of all heads are made from one narrow vector, and the position has its own part
    attention: Literal["heads", "latent"] = "heads"
    query_rank: int | None = None  # width of the vector that queries are made from; None: the model's
    kv_rank: int | None = None  # width of the vector that keys and values are made from; latent attention needs it
    plain_width: int | None = None  # of a head, the part without the position; None: width / heads
    rotary_width: int | None = None  # and the part that carries it; None: half of plain_width
    value_width: int | None = None  # of a head's values; None: plain_width
    # mixture of experts: in place of an MLP, several of which each token uses a few
    experts: int | None = None  # None: one MLP for all tokens
    experts_per_token: int = 2
    shared_experts: int = field(default=0, metadata={"least": 0})  # that every token uses besides
    expert_inner: int | None = None  # width inside an expert; None: inner_width
    expert_scale: float = field(default=1.0, metadata={"above": 0.0})  # of what the chosen experts add
    dense_layers: int = field(default=0, metadata={"least": 0})  # so many first layers have an MLP all the same
    router: Literal["softmax", "sigmoid"] = "softmax"  # how scores are made of what the router computes
    # What an expert takes of a sequence at most: this many times its even share. None: all (dropless).
    capacity_factor: float | None = field(default=None, metadata={"above": 0.0})
    balance: Literal["none", "loss", "bias"] = "none"  # what keeps experts equally busy
    balance_weight: float = field(default=0.01, metadata={"above": 0.0})  # of the loss, for each layer
    balance_rate: float = field(default=0.001, metadata={"above": 0.0})  # by which the bias moves in a step

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

    @property
    def expert_width(self) -> int:
        return self.expert_inner or self.inner_width

    @property
    def latent_widths(self) -> tuple[int, int, int]:
        """Of a head of latent attention: the plain part, the rotary part, and its values."""
        plain = self.plain_width or self.head_width
        return plain, self.rotary_width or plain // 2, self.value_width or plain

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.dense_layers

    def check_together(self) -> None:
        require_divisor("heads", self.heads, "width", self.width)
        require_divisor("kv_heads", self.key_value_heads, "heads", self.heads)
        self._check_attention()
        self._check_experts()

    def _check_attention(self) -> None:
        if self.attention == "latent":
            if self.kv_rank is None:
                raise refused("kv_rank", None, "with attention=latent, the width that keys and values are made from")
            if self.positions != "rotary":
                raise refused("positions", self.positions, "with attention=latent: rotary")
            if self.kv_heads is not None:
                raise refused("kv_heads", self.kv_heads, "with attention=latent: null, every head has its own keys")
            _, rotary, _ = self.latent_widths
            if rotary % 2 or rotary == 0:
                raise refused("rotary_width", rotary, "an even number of at least 2 (rotary positions turn pairs)")
            return
        self._refuse_changed(
            ("query_rank", "kv_rank", "plain_width", "rotary_width", "value_width"), "only with attention=latent"
        )
        if self.positions == "rotary" and self.head_width % 2:
            raise refused(
                "heads",
                self.heads,
                f"a number that makes width / heads even (rotary positions turn pairs); {self.width} / {self.heads}"
                f" = {self.head_width} is odd",
            )

    def _check_experts(self) -> None:
        if self.experts is None:
            of_experts = ("experts_per_token", "shared_experts", "expert_inner", "expert_scale", "dense_layers")
            of_balance = ("router", "capacity_factor", "balance", "balance_weight", "balance_rate")
            self._refuse_changed(of_experts + of_balance, "only with model.experts, the number of experts in a layer")
            return
        if self.experts_per_token > self.experts:
            raise refused("experts_per_token", self.experts_per_token, f"at most experts ({self.experts})")
        if self.dense_layers >= self.layers:
            raise refused("dense_layers", self.dense_layers, f"fewer than layers ({self.layers})")
        for balance, key in (("loss", "balance_weight"), ("bias", "balance_rate")):
            if self.balance != balance:
                self._refuse_changed((key,), f"only with balance={balance}")

    def _refuse_changed(self, keys: tuple[str, ...], allowed: str) -> None:
        """Settings that mean nothing here must be as they are by default: a recipe that gives them means something."""
        defaults = {setting.name: setting.default for setting in fields(self)}
        for key in keys:
            if getattr(self, key) != defaults[key]:
                raise refused(key, getattr(self, key), allowed)


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
    above = limits.get("above", -math.inf)
    if not (least <= value < below and value > above):
        lower = f"above {above:g}" if above > -math.inf else f"at least {least:g}"
        raise refused(key, value, lower + (f" and below {below:g}" if below < math.inf else ""))
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


def image_shape(settings: Settings) -> tuple[int, int]:
    """Channels, and pixels along a side."""
    if isinstance(settings, MnistCNNSettings):
        return 1, 28
    if isinstance(settings, SimpleCNNSettings):
        return settings.channels, 32
    if isinstance(settings, ResNetSettings):
        return settings.channels, settings.image_side
    assert isinstance(settings, ViTSettings), settings
    return settings.channels, settings.image
