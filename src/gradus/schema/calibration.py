"""Calibration: how far measured steps of a cluster are from what was predicted for them, by kind."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

# The kinds of a predicted step and of predicted memory that rest on assumptions. Those that follow from counting
# (parameters, gradients, optimizer state) or from others (the bubble) are not corrected. `optimizer` is its time.
StepKind = Literal["compute", "recompute", "exposed_communication", "optimizer", "data"]
MemoryKind = Literal["activations", "logits", "communication", "device_context", "fragmentation"]
Kind = Literal[StepKind, MemoryKind]


def _day(value: Any) -> Any:
    """YAML reads an unquoted day as a date; here it is text either way."""
    if isinstance(value, datetime.date):
        return value.isoformat()[:10]
    if isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value).isoformat()
        except ValueError:
            raise ValueError("a day, such as 2026-11-15") from None
    return value


class Calibration(BaseModel):
    """Correction factors that were measured, and on what. Predicted times factor is what is to be expected."""

    model_config = _STRICT

    device: str | None = None  # as the driver names it, or the processor
    software: str | None = None  # such as "torch 2.11.0+cu130"
    date: Annotated[str, BeforeValidator(_day)] | None = None
    factors: dict[Kind, Annotated[float, Field(gt=0)]] = {}
    flops_per_second: float | None = Field(None, gt=0)  # achieved, where no peak is quoted, as for CPUs

    def factor(self, kind: Kind) -> float:
        """What a predicted number of this kind is multiplied with."""
        return self.factors.get(kind, 1.0)

    @property
    def measured(self) -> bool:
        return bool(self.factors) or self.flops_per_second is not None
