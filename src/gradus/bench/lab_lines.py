"""The lines of Horovod's synthetic benchmark, which the OSU lab prints too: written, and read from a log.

    Iter #0: 336.0 img/sec per GPU
    Img/sec per GPU: 336.0 +-0.2
    Total img/sec on 1 GPU(s): 336.0 +-0.2

After +- comes 1.96 times the standard deviation of the iterations (of all of them, not of a sample of more).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradus.schema.errors import InputError

CONFIDENCE = 1.96

_UNIT = r"(?P<unit>[A-Za-z]+)/sec"
_NUMBER = r"(?P<rate>\d+(?:\.\d+)?)"
_ITERATION = re.compile(rf"Iter #(?P<number>\d+): {_NUMBER} {_UNIT} per (?P<device>GPU|CPU)")
_EACH = re.compile(rf"{_UNIT} per (?P<device>GPU|CPU): {_NUMBER} \+-(?P<plus_minus>\d+(?:\.\d+)?)")
_TOTAL = re.compile(
    rf"Total {_UNIT} on (?P<count>\d+) (?P<device>GPU|CPU)\(s\): {_NUMBER} \+-(?P<plus_minus>\d+(?:\.\d+)?)"
)


@dataclass(frozen=True)
class LabResult:
    """What one run of the benchmark says."""

    devices: int
    device: str  # "GPU" or "CPU"
    unit: str  # "img" or "seq"
    iterations: tuple[float, ...]  # of each device, in a second
    each: float
    each_plus_minus: float
    total: float
    total_plus_minus: float

    @classmethod
    def of_iterations(cls, rates: Sequence[float], devices: int, device: str, unit: str) -> LabResult:
        mean, plus_minus = statistics.fmean(rates), CONFIDENCE * statistics.pstdev(rates)
        return cls(devices, device, unit, tuple(rates), mean, plus_minus, devices * mean, devices * plus_minus)

    @property
    def lines(self) -> list[str]:
        """The last two."""
        unit, title = self.unit, self.unit.capitalize()
        return [
            f"{title}/sec per {self.device}: {self.each:.1f} +-{self.each_plus_minus:.1f}",
            f"Total {unit}/sec on {self.devices} {self.device}(s): {self.total:.1f} +-{self.total_plus_minus:.1f}",
        ]


def iteration_line(number: int, rate: float, device: str, unit: str) -> str:
    return f"Iter #{number}: {rate:.1f} {unit}/sec per {device}"


def read_log(path: str | Path) -> LabResult:
    """The last result in a log. Whatever else is in it, such as what srun puts before each line, is passed over."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", file=str(path), field="--log") from None
    totals = list(_TOTAL.finditer(text))
    if not totals:
        raise InputError(
            f"{path}: no line like `Total img/sec on 1 GPU(s): 336.0 +-0.2`",
            hint="give it what `gradus bench synthetic`, or Horovod's synthetic benchmark, has printed",
            file=str(path),
            field="--log",
            found="no total",
            allowed="Total img/sec on N GPU(s): X +-Y",
        )
    total = totals[-1]
    before = text[totals[-2].end() if len(totals) > 1 else 0 : total.start()]
    iterations = _last_iterations(before)
    each = list(_EACH.finditer(before))
    count, rate, plus_minus = int(total["count"]), float(total["rate"]), float(total["plus_minus"])
    if count < 1 or rate <= 0:
        raise InputError(
            f"{path}: found {total[0]!r}, allowed: more than none", file=str(path), field="--log", found=total[0]
        )
    return LabResult(
        count,
        total["device"],
        total["unit"].lower(),
        iterations,
        float(each[-1]["rate"]) if each else rate / count,
        float(each[-1]["plus_minus"]) if each else plus_minus / count,
        rate,
        plus_minus,
    )


def _last_iterations(text: str) -> tuple[float, ...]:
    """Those of the last time that iterations were counted from 0 on."""
    found: dict[int, float] = {}
    for match in _ITERATION.finditer(text):
        number = int(match["number"])
        if number == 0:
            found = {}
        found[number] = float(match["rate"])
    return tuple(rate for _, rate in sorted(found.items()))
