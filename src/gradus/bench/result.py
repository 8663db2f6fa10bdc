"""BenchResult: what a benchmark measured, as a document that can be kept, compared and shown as a page."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradus.record import strict_json
from gradus.record.environment import environment
from gradus.schema.errors import InputError

if TYPE_CHECKING:
    from gradus.record.chart import Picture

FORMAT = "gradus-bench-1"


@dataclass(frozen=True)
class BenchResult:
    """One measurement: its settings, its rows, what they add up to, and the pictures that show them."""

    kind: str  # "synthetic", "scaling", ...
    title: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] = field(default_factory=dict)
    charts: tuple[Picture, ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    provenance: str = "measured"
    notes: tuple[str, ...] = ()  # what a reader must know: what could not be measured, and why

    def document(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "kind": self.kind,
            "title": self.title,
            "time": self.time,
            "provenance": self.provenance,
            "settings": dict(self.settings),
            "summary": dict(self.summary),
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
            "charts": [asdict(chart) for chart in self.charts],
            "environment": dict(self.environment),
        }

    def save(self, path: str | Path) -> Path:
        """Write the document; folders on the way are made."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(strict_json.pretty(self.document()) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """The result in a file that `save` or `--json` wrote."""
        path = Path(path)
        try:
            document = strict_json.decode(path.read_bytes())
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}", file=str(path)) from None
        except ValueError:
            raise _no_result(path, "no JSON document") from None
        return cls.of_document(document, path)

    @classmethod
    def of_document(cls, document: Mapping[str, Any], path: Path) -> BenchResult:
        if document.get("format") != FORMAT:
            raise _no_result(path, f"format {document.get('format')!r}")
        try:
            return cls(
                kind=str(document["kind"]),
                title=str(document["title"]),
                settings=dict(document["settings"]),
                rows=[dict(row) for row in document["rows"]],
                summary=dict(document["summary"]),
                charts=tuple(_chart(chart) for chart in document["charts"]),
                environment=dict(document["environment"]),
                time=float(document["time"]),
                provenance=str(document["provenance"]),
                notes=tuple(map(str, document.get("notes", ()))),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _no_result(path, f"{type(error).__name__}: {error}") from None


def is_bench_result(path: Path) -> bool:
    """Whether a file is one of ours, without a complaint if it is not."""
    try:
        return strict_json.decode(path.read_bytes()).get("format") == FORMAT
    except (OSError, ValueError):
        return False


def bench_environment() -> dict[str, Any]:
    """Versions, machine and GPUs; a benchmark's file travels, so of the source only the commit."""
    from gradus.hardware.detect import detect_machine
    from gradus.hardware.host import cpu_name

    machine = detect_machine()
    found = environment([asdict(gpu) for gpu in machine.gpus])
    if "git" in found:
        found["git"] = {"commit": found["git"]["commit"], "changed": bool(found["git"].get("diff"))}
    return {**found, "cpu": cpu_name(), "cpu_cores": machine.cpu_cores}


def _no_result(path: Path, found: str) -> InputError:
    return InputError(
        f"{path}: found {found}, allowed: what `gradus bench ... --save` or `--json` wrote ({FORMAT})",
        file=str(path),
        field="format",
        found=found,
        allowed=FORMAT,
    )


def _chart(document: Mapping[str, Any]) -> Picture:
    from gradus.record.chart import Bars, Chart, Heat, Mark, Series

    if "rows" in document and "x" in document:
        return Heat(**{**document, "rows": tuple((label, tuple(values)) for label, values in document["rows"])})
    if "rows" in document:
        return Bars(**{**document, "rows": tuple((label, _pairs(parts)) for label, parts in document["rows"])})
    return Chart(
        **{
            **document,
            "series": tuple(Series(**series) for series in document["series"]),
            "marks": tuple(Mark(**mark) for mark in document.get("marks", ())),
        }
    )


def _pairs(parts: Sequence[Sequence[Any]]) -> tuple[tuple[str, float], ...]:
    return tuple((str(kind), float(value)) for kind, value in parts)


def finite(value: float) -> float | None:
    """A number, or None: JSON has no other way to say that there is none."""
    return value if math.isfinite(value) else None
