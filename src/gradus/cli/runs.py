"""`gradus runs`: what runs there are, and one of them in detail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradus.cli.output import print_json
from gradus.launcher.attempt import is_of_a_script, last_attempt
from gradus.launcher.ending_at_once import end_at_once
from gradus.launcher.processes import attempt_processes
from gradus.launcher.script import COMMAND_FILE, Script
from gradus.record.directory import RunDirectory, find_runs
from gradus.record.events import read_events
from gradus.record.format import number_text
from gradus.record.metrics import read_metrics
from gradus.record.status import read_status, shown_state, writer_is_gone
from gradus.record.stop import request_stop
from gradus.record.summary import summary_text
from gradus.record.tensorboard import export_tensorboard
from gradus.schema.errors import InputError, unknown_name

_SHOWN_EVENTS = 12


def runs_command(words: list[str], runs: str, export: str | None, as_json: bool, *, now: bool = False) -> int:
    if len(words) > 1:
        return _stop(words, runs, as_json, now=now)
    if now:
        raise InputError(
            "--now: found it without stop",
            hint=f"gradus runs stop {words[0] if words else 'RUN'} --now",
            field="--now",
            found=" ".join(words),
        )
    run = words[0] if words else None
    if export is not None and export != "tensorboard":
        raise unknown_name("exporter", export, ["tensorboard"], field="--export")
    if run is None and export is not None:
        raise InputError(
            "RUN: missing, and --export needs it",
            hint=f"gradus runs RUN --export {export}",
            field="RUN",
            found="nothing",
            allowed="a path, an id or a name",
        )
    if run is None:
        documents = [_document(found) for found in find_runs(Path(runs))]
        if as_json:
            print_json(documents)
        else:
            _print_table(documents, runs)
        return 0
    directory = RunDirectory.open(run, Path(runs))
    if export is not None:
        folder = export_tensorboard(directory)
        print_json({"run": str(directory.path), "folder": str(folder)}) if as_json else print(folder)
        return 0
    if as_json:
        print_json({**_document(directory), "events": read_events(directory), "metrics": read_metrics(directory)})
    else:
        _print_run(directory)
    return 0


def _stop(words: list[str], runs: str, as_json: bool, *, now: bool) -> int:
    """`gradus runs stop RUN [--now]`."""
    if words[0] != "stop" or len(words) != 2:
        raise InputError(
            f"RUN: found {len(words)} words: {' '.join(words)}",
            hint=f"gradus runs {words[-1]}, or gradus runs stop {words[-1]}",
            field="RUN",
            found=" ".join(words),
            allowed="a run, or stop and a run",
        )
    directory = RunDirectory.open(words[1], Path(runs))
    status = read_status(directory)
    state = shown_state(status) if status else "unknown"
    running = status is not None and state == "running" and not writer_is_gone(status)
    if now and status is not None and state in ("running", "lost"):  # what hangs may have no heartbeat any more
        running = running or bool(attempt_processes(directory.path, status.attempt))
    if status is None or not running:
        raise InputError(
            f"{directory.name}/{directory.id} is not running: {'lost' if state == 'running' else state}",
            hint=f"gradus runs {directory.name}/{directory.id}",
            found=state,
            allowed="running",
        )
    if now:
        ended = end_at_once(directory, status)
        if as_json:
            print_json({"run": str(directory.path), "requested": "end", "ended": ended})
        else:
            what = "ended" if ended else f"asked to end on {status.host}"
            print(f"{directory.name}/{directory.id} was {what} at once")
        return 0
    request_stop(directory, "gradus runs stop")
    if as_json:
        print_json({"run": str(directory.path), "requested": "stop"})
    else:
        print(f"{directory.name}/{directory.id} was asked to save and stop")
    return 0


def _document(run: RunDirectory) -> dict[str, Any]:
    status = read_status(run)
    rows = read_metrics(run)
    loss = next((row["loss"] for row in reversed(rows) if row.get("loss") is not None), None)
    script = _command(run)
    return {
        "run": str(run.path),
        "name": run.name,
        "id": run.id,
        "state": shown_state(status) if status else "unknown",
        "step": status.step if status else None,
        "steps_total": status.steps_total if status else None,
        "attempt": status.attempt if status else None,
        "loss": loss,
        "last_error": status.last_error if status else None,
        "updated_at": status.updated_at.isoformat(timespec="seconds") if status else None,
        **({"command": script} if script else {}),
    }


def _command(run: RunDirectory) -> str | None:
    """What a script's run ran; None for a recipe's."""
    if not run.attempts or not is_of_a_script(run):
        return None
    return Script.load(last_attempt(run) / COMMAND_FILE).text


def _print_table(documents: list[dict[str, Any]], runs: str) -> None:
    if not documents:
        print(f"no runs in {runs}; start one: gradus train recipes/quickstart.yaml")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("run", "state", "step", "loss", "attempt", "updated (UTC)"):
        right = column in ("step", "loss", "attempt")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    for d in documents:
        steps = f"{d['step']}/{d['steps_total']}" if d["steps_total"] else str(d["step"] or "-")
        loss = number_text(d["loss"]) if d["loss"] is not None else "-"
        updated = (d["updated_at"] or "-").replace("T", " ")[:19]
        table.add_row(f"{d['name']}/{d['id']}", d["state"], steps, loss, str(d["attempt"] or "-"), updated)
    console = Console()
    # An id that is cut off cannot be given to --resume: on a narrow terminal lines are longer instead.
    needed = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(width=max(console.width, needed)).print(table)


def _print_run(run: RunDirectory) -> None:
    document = _document(run)
    print(f"{document['name']}/{document['id']}: {document['state']}, attempt {document['attempt']}")
    if document["last_error"]:
        print(f"last error: {document['last_error']}")
    if "command" in document:
        print(f"command: {document['command']}")
    print()
    print(summary_text(run))
    events = read_events(run)
    if events:
        print("\nlast events")
    for event in events[-_SHOWN_EVENTS:]:
        rest = {k: v for k, v in event.items() if k not in ("time", "writer", "event") and v is not None}
        details = "  ".join(f"{key}={value}" for key, value in rest.items())
        print(f"  {event['time'][:19].replace('T', ' ')}  {event['event']:<14} {details[:120]}")
