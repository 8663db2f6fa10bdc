"""Provenance: in what a run ran, its attempts, how to make it again, and the files that it left."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from gradus.diagnosis.evidence import Evidence
from gradus.diagnosis.report.marks import moment, text_of
from gradus.record.directory import RunDirectory
from gradus.record.format import bytes_text, duration_text
from gradus.record.page_html import code, folded, missing, paragraph, table_html

_LONGEST_DIFF = 60_000
_FILES = ("recipe.yaml", "plan.yaml", "cluster.yaml", "command.json")


def attempts_html(run: RunDirectory, events: Sequence[Mapping[str, Any]]) -> str:
    if not run.attempts:
        return missing("No attempt has begun yet.")
    rows = [_attempt(number, [e for e in events if e.get("attempt") == number]) for number in run.attempts]
    return table_html(("attempt", "began (UTC)", "lasted", "ranks", "from step", "ended", "why"), rows, text_columns=7)


def _attempt(number: int, events: Sequence[Mapping[str, Any]]) -> tuple[object, ...]:
    named = {str(event.get("event")): event for event in events}
    times = [when for event in events if (when := moment(event)) is not None]
    end, start = named.get("end", {}), named.get("start", {})
    error = end.get("error")
    why = error.get("message") if isinstance(error, dict) else None
    reasons = [text_of(named[name]) for name in ("restart", "verdict", "stop-request", "finish") if name in named]
    said = " ".join(str(why).split())[:200] if why else None
    return (
        number,
        str(events[0].get("time", ""))[:19].replace("T", " ") if events else None,
        duration_text(times[-1] - times[0]) if len(times) > 1 else None,
        start.get("ranks") or named.get("launch", {}).get("ranks"),
        start.get("step"),
        end.get("state") or "no word of its end",
        "; ".join(text for text in (said, *reasons) if text) or None,
    )


def environment_html(evidence: Evidence) -> str:
    found = evidence.environment
    if not found:
        return missing("No environment was written down: the run has no attempt, or is of another version.")
    packages = found.get("packages") or {}
    git = found.get("git") or {}
    changed = " with changes that were not committed" if str(git.get("diff", "")).strip() else ""
    gpus = [str(gpu.get("name", "GPU")) for gpu in found.get("gpus") or ()]
    slurm = found.get("slurm") or {}
    rows = [
        ("machine", found.get("hostname")),
        ("GPUs", ", ".join(f"{gpus.count(name)} × {name}" for name in dict.fromkeys(gpus)) or "none"),
        ("system", found.get("platform")),
        ("Python", found.get("python")),
        ("source", f"git {git['commit']}{changed}" if git.get("commit") else "not in a git repository"),
        ("modules", ", ".join(found.get("modules") or ()) or None),
        ("Slurm job", f"{slurm.get('job_id')} on {slurm.get('nodes')}" if slurm.get("job_id") else None),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items()) or None),
    ]
    return table_html(("what", "found"), [row for row in rows if row[1]], text_columns=2)


def reproduce_html(evidence: Evidence) -> str:
    run = evidence.run
    assert run is not None, "a report is of a run"
    command = evidence.environment.get("command") or []
    git = evidence.environment.get("git") or {}
    lines = [f"git checkout {git['commit']}"] if git.get("commit") else []
    if str(git.get("diff", "")).strip():
        lines.append("git apply changes.diff   # below")
    if command:
        lines.append(shlex.join([Path(str(command[0])).name, *map(str, command[1:])]))
    parts = [code("\n".join(lines))] if lines else [missing("The command was not written down.")]
    if evidence.recipe is not None:
        parts.append(
            paragraph(
                "The same samples in the same order follow from the recipe's seed on any hardware; the same bits need "
                "the same mesh, machine type and versions, and deterministic: true."
            )
        )
    folder = evidence.attempt_path
    for name in _FILES:
        text = _text(folder / name) if folder is not None else None
        if text:
            parts.append(folded(f"{name} of attempt {evidence.attempt}" if evidence.attempt else name, text))
    diff = str(git.get("diff", ""))
    if diff.strip():
        cut = len(diff) > _LONGEST_DIFF or not git.get("diff_is_whole", True)
        note = "\n… cut here; environment.json has more" if cut else ""
        parts.append(folded("changes.diff", diff[:_LONGEST_DIFF] + note))
    return "".join(parts)


def traces_html(run: RunDirectory) -> str:
    found = sorted((run.path / "traces").glob("*")) if (run.path / "traces").is_dir() else []
    if not found:
        return missing("No trace: gradus train --profile steps=5 records some steps in detail.")
    rows = [(path.name, bytes_text(path.stat().st_size)) for path in found if path.is_file()]
    how = paragraph(
        "In traces/ of the run. Traces (.json.gz) open in Perfetto, memory snapshots (.pickle) in PyTorch's own viewer."
    )
    return how + table_html(("file", "size"), rows)


def files_html(run: RunDirectory) -> str:
    return f"<p>All of this is from <code>{escape(str(run.path))}</code>.</p>\n"


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
