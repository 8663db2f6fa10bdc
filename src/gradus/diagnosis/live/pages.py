"""Pages of the live view: the report of a run as it grows, and the list of all runs of a folder."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from gradus.diagnosis.live.changing import Changing
from gradus.diagnosis.live.followed import Folder, Snapshot
from gradus.diagnosis.live.prometheus import exposition
from gradus.diagnosis.report.run_report import LIVE_JUDGE_SECONDS, RunReport
from gradus.record.directory import RunDirectory
from gradus.record.format import count_text, duration_text, first_line, number_text, rate_text
from gradus.record.page_html import Head, Section, table_html

_LISTED_RUNS = 200  # of more, the others are counted
_KEPT_PAGES = 16  # each holds the history of its run; one that is asked for again later is read again
_CHIPS = {"running": "good", "finished": "good", "failed": "bad", "lost": "bad", "queued": "warn", "starting": "warn"}
_SCRIPT = "live_script.j2"


class Pages:
    """All that is served of a folder. The token is in links, so that they can be followed."""

    def __init__(self, folder: Folder, token: str) -> None:
        self.folder = folder
        self._token = token
        self._lock = threading.Lock()
        self._changing: OrderedDict[Path, Changing] = OrderedDict()

    def page(self, run: RunDirectory | None) -> str:
        """Of a run, or the list of all of them."""
        return self._of(run).whole(_live_script)

    def updates(self, run: RunDirectory | None, since: int) -> dict[str, Any]:
        return self._of(run).since(since)

    def documents(self) -> list[dict[str, Any]]:
        """The list of runs for programs."""
        return [_document(snapshot) for snapshot in self.folder.snapshots(self.folder.runs()[:_LISTED_RUNS])]

    def metrics(self) -> str:
        """For Prometheus."""
        return exposition(self.folder.snapshots(self.folder.that_matter()), len(self.folder.runs()))

    def _of(self, run: RunDirectory | None) -> Changing:
        with self._lock:
            key = run.path if run is not None else self.folder.root
            if key not in self._changing:
                self._changing[key] = self._report(run) if run is not None else self._list()
            self._changing.move_to_end(key)
            while len(self._changing) > _KEPT_PAGES:
                self._changing.popitem(last=False)
            return self._changing[key]

    def _report(self, run: RunDirectory) -> Changing:
        report = RunReport(run, LIVE_JUDGE_SECONDS)
        return Changing(report.parts, self.folder.followed(run).fingerprint)

    def _list(self) -> Changing:
        def draw() -> tuple[Head, list[Section]]:
            runs = self.folder.runs()
            snapshots = self.folder.snapshots(runs[:_LISTED_RUNS])
            table = self._table(snapshots, len(runs))
            return _list_head(snapshots, len(runs)), [Section("runs", "Newest first", table)]

        return Changing(draw, lambda: object())  # runs come, and fall silent, without a word in a file of the folder

    def _table(self, snapshots: Sequence[Snapshot], count: int) -> str:
        if not snapshots:
            return "<p>No runs yet. <code>gradus train recipes/quickstart.yaml</code> starts one.</p>\n"
        header = ("run", "state", "why", "step", "loss", "speed", "ETA", "goodput", "findings", "updated (UTC)")
        table = table_html(header, [self._row(one) for one in snapshots], text_columns=3)
        more = f"<p>… and {count - len(snapshots)} older ones.</p>\n" if count > len(snapshots) else ""
        return table + more

    def _row(self, one: Snapshot) -> list[object]:
        view = one.view
        link = f"/runs/{quote(view.run.name)}/{quote(view.run.id)}?token={quote(self._token)}"
        steps = f"{view.step}/{view.steps_total}" if view.steps_total else str(view.step)
        going = view.state in ("running", "starting")
        return [
            Markup(f'<a href="{escape(link)}">{escape(one.name)}</a>'),
            Markup(f'<span class="chip {_CHIPS.get(view.state, "")}">{escape(view.state)}</span>'),
            _why(one),
            steps,
            number_text(view.loss) if view.loss is not None else None,
            rate_text(view.speed.per_second, view.speed.unit) if view.speed is not None else None,
            duration_text(view.eta_seconds) if view.eta_seconds is not None and going else None,
            f"{view.goodput.share:.0%}" if view.goodput is not None and view.goodput.share is not None else None,
            len(one.findings) if one.findings is not None else None,
            _moment(one.updated_at),
        ]


def _why(one: Snapshot) -> str | None:
    """What there is to say of its state: why it waits, why it failed, or its first finding."""
    view = one.view
    if view.state in ("failed", "lost") and view.last_error:
        return first_line(view.last_error)
    return view.note or (one.findings[0].verdict if one.findings else None)


def _list_head(snapshots: Sequence[Snapshot], count: int) -> Head:
    running = sum(one.view.state == "running" for one in snapshots)
    failed = sum(one.view.state in ("failed", "lost") for one in snapshots)
    parts = [
        count_text(count, "run"),
        f"{running} running",
        *([f"{failed} failed or lost"] if failed else []),
    ]
    return Head("Runs", ", ".join(parts))


def _document(one: Snapshot) -> dict[str, Any]:
    view = one.view
    return {
        "run": str(view.run.path),
        "name": view.run.name,
        "id": view.run.id,
        "state": view.state,
        "over": view.over,
        "attempt": view.attempt,
        "step": view.step,
        "steps_total": view.steps_total,
        "loss": view.loss,
        "tokens_per_second": one.row.get("tokens_per_second"),
        "samples_per_second": one.row.get("samples_per_second"),
        "eta_seconds": view.eta_seconds,
        "goodput": view.goodput.share if view.goodput is not None else None,
        "findings": [finding.id for finding in one.findings] if one.findings is not None else None,
        "last_error": view.last_error,
        "updated_at": one.updated_at,
    }


@cache
def _script_template() -> Template:
    text = resources.files("gradus.diagnosis.live").joinpath(_SCRIPT).read_text("utf-8")
    return Environment(undefined=StrictUndefined).from_string(text)  # a number goes in, no text


def _live_script(version: int) -> str:
    return _script_template().render(version=version)


def _moment(at: float | None) -> str | None:
    return f"{datetime.fromtimestamp(at, timezone.utc):%Y-%m-%d %H:%M:%S}" if at is not None else None
