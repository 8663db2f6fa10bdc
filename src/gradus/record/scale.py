"""Scale: where a value lies on an axis, and which values the axis names."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Scale:
    """From a value to a share of the axis (0 to 1), linear or logarithmic."""

    low: float
    high: float
    log: bool = False
    base: int = 10

    def share(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[float]:
        """Round numbers on the axis, about so many."""
        return _log_ticks(self, about) if self.log else _linear_ticks(self.low, self.high, about)


def scale_of(values: Iterable[float], *, log: bool = False, from_zero: bool = False, base: int = 10) -> Scale:
    """An axis that holds all these values. A logarithmic one holds those above zero; without any, it is linear."""
    found = [value for value in values if math.isfinite(value)]
    if log:
        found = [value for value in found if value > 0]
        log = bool(found)
    low, high = min(found, default=0.0), max(found, default=1.0)
    if log:
        return Scale(low, high, True, base) if high > low else Scale(low / base, high * base, True, base)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        # One value only: an axis around it, or from zero to it.
        around = abs(high) * 0.1 or 1.0
        low, high = (low, high + around) if from_zero and high == 0 else (low - around, high + around)
    return Scale(low, high)


def roomy(scale: Scale, room: float = 0.04) -> Scale:
    """The same with some room above and below, so that lines do not touch the frame; a zero at an end stays the end."""
    if scale.log:
        factor = (scale.high / scale.low) ** room
        return Scale(scale.low / factor, scale.high * factor, True, scale.base)
    more = (scale.high - scale.low) * room
    low = scale.low if scale.low == 0 else scale.low - more
    # Amounts that cannot be negative do not get an axis that says otherwise.
    low = 0.0 if scale.low >= 0 > low else low
    return Scale(low, scale.high if scale.high == 0 else scale.high + more)


def _linear_ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / max(1, about)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = magnitude * min((1, 2, 5, 10), key=lambda factor: abs(math.log(magnitude * factor / rough)))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(scale: Scale, about: int) -> list[float]:
    first = math.floor(math.log(scale.low, scale.base) + 1e-9)
    last = math.ceil(math.log(scale.high, scale.base) - 1e-9)
    inside = [
        tick
        for power in range(first, last + 1)
        if scale.low * 0.9999 <= (tick := float(scale.base) ** power) <= scale.high * 1.0001
    ]
    if len(inside) > about:
        every = math.ceil(len(inside) / about)
        return inside[::every]
    if scale.base == 10 and len(inside) < 3:
        factors = (1, 2, 5) if len(inside) else (1, 1.5, 2, 3, 5, 7)
        more = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in factors]
        within = [tick for tick in more if scale.low * 0.9999 <= tick <= scale.high * 1.0001]
        if len(within) >= 2:
            return within
        return _linear_ticks(scale.low, scale.high, about)
    return inside


def tick_text(value: float, step: float | None = None) -> str:
    """A tick as short as it can be and still exact: 0.25, 12,000, 2.5 M, 3e-05.

    `step` is the distance to the next tick: it tells how many digits after the point are meant.
    """
    if value == 0 or (step and abs(value) < abs(step) * 1e-6):
        return "0"
    size = abs(value)
    for limit, divisor, suffix in ((1e12, 1e12, " T"), (1e9, 1e9, " G"), (1e6, 1e6, " M")):
        if size >= limit:
            return f"{_plain(value / divisor, step / divisor if step else None)}{suffix}"
    # All ticks of an axis alike: 1e-3 beside 8e-4.
    if size < 1e-3 if step is None else step < 1e-3 and size < 1e-2:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return _plain(value, step)


def _plain(value: float, step: float | None) -> str:
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step else 0 if abs(value) >= 1000 else 4
    text = f"{value:,.{min(digits, 8)}f}"
    if step is None and "." in text:
        text = text.rstrip("0").rstrip(".")
    return text.replace("-", "−")
