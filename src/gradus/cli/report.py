"""`gradus report`: a run, a comparison of runs, or a benchmark's result, as one page that opens offline."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.cli.output import print_json, shown
from gradus.record.directory import RunDirectory
from gradus.schema.errors import EXIT_FINISHED, InputError

REPORT, COMPARISON = "report.html", "comparison.html"


@dataclass(frozen=True)
class ReportOptions:
    """What was typed after `gradus report`."""

    targets: tuple[str, ...]
    compare: tuple[str, ...] = ()
    out: str | None = None
    runs: str = "runs"
    as_json: bool = False


def report_command(options: ReportOptions) -> int:
    target, others = _targets(options)
    if Path(target).is_file():
        path, document = _bench(Path(target), options)
    elif others:
        path, document = _comparison([target, *others], options)
    else:
        path, document = _run(target, options)
    if options.as_json:
        print_json({"report": str(path), **document})
    else:
        print(shown(path))
    return EXIT_FINISHED


def _targets(options: ReportOptions) -> tuple[str, list[str]]:
    """The run, and those to compare it with: `--compare A B` is read as `--compare A --compare B`."""
    first, *more = options.targets
    if more and not options.compare:
        raise InputError(
            f"RUN: found {len(options.targets)}: {' '.join(options.targets)}",
            hint=f"gradus report {first} --compare {' '.join(more)}",
            field="RUN",
            found=" ".join(options.targets),
            allowed="one run; others after --compare",
        )
    return first, [*options.compare, *more]


def _run(target: str, options: ReportOptions) -> tuple[Path, dict[str, Any]]:
    from gradus.diagnosis.report.run_report import RunReport
    from gradus.record.page_html import page

    run = RunDirectory.open(target, Path(options.runs))
    report = RunReport(run)
    head, sections = report.parts()
    path = _write(options.out, run.path / REPORT, page(head, sections))
    facts = {fact.name: fact.value for fact in head.facts}
    said = report.found.document() if report.found is not None else {}
    return path, {"run": str(run.path), "state": head.chip, "facts": facts, **said}


def _comparison(targets: Sequence[str], options: ReportOptions) -> tuple[Path, dict[str, Any]]:
    from gradus.diagnosis.report.comparison import compare
    from gradus.diagnosis.report.comparison_page import comparison_page

    runs = [RunDirectory.open(target, Path(options.runs)) for target in targets]
    found = compare(runs)
    return _write(options.out, runs[0].path / COMPARISON, comparison_page(found)), found.document()


def _bench(file: Path, options: ReportOptions) -> tuple[Path, dict[str, Any]]:
    from gradus.bench.page import bench_page
    from gradus.bench.result import BenchResult

    if options.compare:
        raise InputError("--compare: compares runs, and this is a file", field="--compare", found=str(file))
    result = BenchResult.load(file)
    return _write(options.out, file.with_suffix(".html"), bench_page(result)), {
        "kind": result.kind,
        "title": result.title,
    }


def _write(out: str | None, default: Path, text: str) -> Path:
    """Replaced as a whole: who has the old page open keeps it. Readable by its owner only, as the run is."""
    path = Path(out) if out is not None else default
    if path.is_dir():
        path = path / default.name
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(file, "w", encoding="utf-8") as stream:
            stream.write(text)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {path}: {error.strerror}",
            hint="name a file that can be written: --out report.html",
            field="--out",
            found=str(path),
        ) from error
    return path.absolute()
