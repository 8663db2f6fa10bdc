"""Case: what a rule about combinations looks at, all of it known before any process starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gradus.schema.errors import InputError
from gradus.schema.plan import Plan
from gradus.schema.recipe import Recipe


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model before it is built. None: not known, or it has no such thing."""

    name: str  # as messages call it
    kind: Literal["reference", "huggingface", "user", "unknown"]  # unknown: an own loop brings it
    reference: str | None = None  # of which reference model it is a size
    blocks: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_widths: tuple[int, ...] = ()  # numbers of a key and of a value
    inner: int | None = None  # width inside the MLP
    longest: int | None = None  # sequence that it takes, in tokens
    sequence: int | None = None  # tokens of a sample of the data
    dropout: float = 0.0
    experts: int | None = None
    capacity: float | None = None  # of an expert, in its even shares; None: no token is dropped
    balance: str | None = None  # what keeps its experts equally busy
    latent_attention: bool = False
    batch_norm: bool = False
    vocabulary: int | None = None  # of a loss over all tokens, which may be computed in parts
    narrow_failure: str = ""  # how it failed with weights in 16 bits, and only with them, when it was traced


@dataclass(frozen=True)
class Case:
    """What a rule looks at."""

    recipe: Recipe
    plan: Plan
    model: ModelFacts
    on_gpus: bool = False
    gpu: str | None = None
    capability: tuple[int, int] | None = None  # of the GPU, where it is known
    own_loop: bool = False


def refused(field: str, found: object, why: str, *, allowed: object, hint: str) -> InputError:
    """A refusal in one line: the field, what was found, and why not; the hint says what would do."""
    return InputError(f"{field}: found {found}, but {why}", hint=hint, field=field, found=found, allowed=allowed)


def reason_of(refusal: InputError) -> str:
    """Why, without what was found."""
    return refusal.message.partition(", but ")[2] or refusal.message
