"""`gradus runs RUN --export` and `gradus watch RUN --export`: a run's metrics sent elsewhere, once or as they come."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from gradus.cli.output import print_json
from gradus.diagnosis.live.followed import Folder
from gradus.diagnosis.live.prometheus import exposition, write_textfile
from gradus.launcher.watching import Watching
from gradus.record.directory import RunDirectory
from gradus.record.exporters import NAMES, export, exporter_of
from gradus.record.format import count_text
from gradus.schema.errors import EXIT_FINISHED, InputError, unknown_name

PROMETHEUS = "prometheus"
_EVERY_SECONDS = 5.0
_INTERRUPTED = 130


def export_command(run: str | None, runs: str, name: str, to: str | None, as_json: bool) -> int:
    """All that a run has so far. Doing it twice changes nothing."""
    if name not in (*NAMES, PROMETHEUS):
        raise unknown_name("exporter", name, (*NAMES, PROMETHEUS), field="--export")
    if name == PROMETHEUS:
        return _prometheus(run, runs, to, as_json)
    if run is None:
        raise InputError(
            "RUN: missing, and --export needs it",
            hint=f"gradus runs RUN --export {name}",
            field="RUN",
            found="nothing",
            allowed="a path, an id or a name",
        )
    directory = RunDirectory.open(run, Path(runs))
    place, sent = export(directory, name, to)
    if as_json:
        key = "folder" if name == "tensorboard" else "place"
        print_json({"run": str(directory.path), key: place, **({"steps": sent} if sent is not None else {})})
    else:
        print(place if sent is None else f"{place}: {count_text(sent, 'new step')}")
    return EXIT_FINISHED


def follow_command(run: str, runs: str, name: str, to: str | None, every: float | None, as_json: bool) -> int:
    """Send a run's metrics as they come, until it is over. Returns its exit code, as watching it does."""
    if name not in NAMES:
        raise unknown_name("exporter", name, NAMES, field="--export")
    if every is not None and every <= 0:
        raise InputError(
            f"--every: found {every:g}, allowed: seconds above 0", field="--every", found=every, allowed="above 0"
        )
    directory = RunDirectory.open(run, Path(runs))
    watching = Watching(directory)
    exporter = exporter_of(directory, name, to)
    try:
        view = watching.look()
        while not view.over:
            exporter.poll()
            time.sleep(every or _EVERY_SECONDS)
            view = watching.look()
        exporter.poll()
    except KeyboardInterrupt:
        print(f"the run goes on; again: gradus watch {run} --export {name}", file=sys.stderr)
        return _INTERRUPTED
    finally:
        exporter.close()
    place = str(getattr(exporter, "place", None) or exporter.target)
    code = view.exit_code if view.exit_code is not None else EXIT_FINISHED
    document = {"run": str(directory.path), "state": view.state, "exit_code": code, "place": place}
    print_json(document) if as_json else print(f"{view.state}; {place}")
    return code


def _prometheus(run: str | None, runs: str, to: str | None, as_json: bool) -> int:
    """How runs are now, as a file for node-exporter, or on stdout."""
    root = Path(runs)
    folder = Folder(root, RunDirectory.open(run, root) if run is not None else None)
    text = exposition(folder.snapshots(None if run is not None else folder.that_matter()), len(folder.runs()))
    if to is None and not as_json:
        print(text, end="")
        return EXIT_FINISHED
    if to is not None:
        try:
            write_textfile(Path(to), text)
        except OSError as error:
            raise InputError(f"--to: cannot write {to}: {error.strerror}", field="--to", found=to) from error
    if as_json:
        print_json({"file": to, "metrics": text} if to is None else {"file": to})
    else:
        print(to)
    return EXIT_FINISHED
