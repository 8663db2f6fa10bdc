"""The run directory: where everything about one run lies, and how a run is found again."""

from __future__ import annotations

import contextlib
import difflib
import errno
import re
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from gradus.schema.errors import InputError

_MARKS = ("attempts", "control")  # folders by which a run is known
_FOLDERS = ("attempts", "events", "checkpoints", "control")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NAME_IN_RECIPE = re.compile(rf"name: '?({_NAME.pattern})'?$", re.MULTILINE)  # first of all, as recipes are written
# A run directory holds the user's working diff and logs: for the user's eyes unless they say otherwise.
_FOLDER_MODE = 0o700
_LISTED_RUNS = 8
CHANGED_DATA_MARK = "accept-changed-data"


@dataclass(frozen=True)
class RunDirectory:
    """`runs/<name>/<id>/`: one run with all its attempts."""

    path: Path

    @classmethod
    def create(cls, root: Path, name: str, run_id: str | None = None) -> RunDirectory:
        """Make the folders of a new run. If that fails, nothing is left behind."""
        while True:
            path = cls.future(root, name, run_id).path
            try:
                _make_folders(path)
            except FileExistsError:
                if run_id is None:
                    continue  # two runs of a job array in the same second drew the same id
                raise InputError(
                    f"run directory exists: {path}",
                    hint="continue that run with --resume, or choose another id",
                    found=run_id,
                ) from None
            except OSError as error:
                raise InputError(f"cannot create run directory {path}: {error.strerror}", found=str(path)) from error
            return cls(path)

    @classmethod
    def future(cls, root: Path, name: str, run_id: str | None = None) -> RunDirectory:
        """Where a new run would be made; nothing is."""
        for what, text in (("run name", name), ("run id", run_id)):
            if text is not None and not _NAME.fullmatch(text):
                raise InputError(
                    f"{what} {text!r} cannot name a folder", hint="use letters, digits, '.', '_' and '-'", found=text
                )
        return cls(root.absolute() / name / (run_id or _new_id()))

    @classmethod
    def open(cls, path_or_id: str, root: Path) -> RunDirectory:
        """The run that a path, an id, `name/id`, or a run name (its newest run) stands for.

        An own loop that gradus launched has two names: its script's, by which its folder is made, and its recipe's.
        """
        for candidate in (Path(path_or_id), root / path_or_id):
            if _is_run(candidate):
                return cls(candidate.absolute())
        runs = find_runs(root)
        of_name = next((run for run in runs if run.name == path_or_id or run.name_in_loop == path_or_id), None)
        if of_name is not None:
            return of_name
        of_id = [run for run in runs if run.id == path_or_id]
        if len(of_id) == 1:
            return of_id[0]
        if of_id:
            allowed = [f"{run.name}/{run.id}" for run in of_id]
            raise InputError(f"run id {path_or_id!r} is ambiguous: {', '.join(allowed)}", allowed=allowed)
        names = {text for run in runs for text in (run.name, run.id, f"{run.name}/{run.id}")}
        near = difflib.get_close_matches(path_or_id, sorted(names), n=3)
        there = [f"{run.name}/{run.id}" for run in sorted(runs, key=lambda run: -_likeness(run, path_or_id))]
        more = f", and {len(there) - _LISTED_RUNS} more" if len(there) > _LISTED_RUNS else ""
        listed = f"runs in {root}: {', '.join(there[:_LISTED_RUNS])}{more}" if there else f"there are no runs in {root}"
        why = "no such run directory"
        if (folder := Path(path_or_id)).is_dir():
            lacks = " and ".join(f"{name}/" for name in _MARKS if not (folder / name).is_dir())
            why = f"it is a folder, but has no {lacks} in it, as every run has"
        raise InputError(
            f"{path_or_id!r} is not a run: {why}, and no such id or name in {root}",
            hint=f"did you mean {' or '.join(near)}? {listed}" if near else listed,
            found=path_or_id,
            allowed=there,
            nearest=near or None,
        )

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def name_in_loop(self) -> str | None:
        """What the recipe of an own loop calls a run that its launcher has named; None for any other run."""
        for mark in self.control.glob("own-loop-*"):
            recipe = self.attempt_path(int(mark.name.rpartition("-")[2])) / "recipe.yaml"
            with contextlib.suppress(OSError):
                if (found := _NAME_IN_RECIPE.match(recipe.read_text(errors="replace"))) is not None:
                    return found[1]
        return None

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def attempts(self) -> list[int]:
        """The numbers of the attempts so far, ascending."""
        return sorted(int(entry.name) for entry in (self.path / "attempts").iterdir() if entry.name.isdecimal())

    def attempt_path(self, attempt: int) -> Path:
        return self.path / "attempts" / str(attempt)

    def new_attempt(self, files: Mapping[str, str] | None = None) -> int:
        """Claim the next attempt number; two launchers never get the same one.

        It is there with the files that describe it or not at all: if its launcher is killed meanwhile, the run goes on
        from the attempt before.
        """
        made = Path(tempfile.mkdtemp(prefix="new-", dir=self.path / "attempts"))  # with the mode of our folders
        (made / "logs").mkdir(mode=_FOLDER_MODE)
        for name, text in (files or {}).items():
            (made / name).write_text(text)
        attempt = max(self.attempts, default=0) + 1
        while True:
            try:
                made.rename(self.attempt_path(attempt))
                return attempt
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                attempt += 1

    @property
    def never_began(self) -> bool:
        """Whether it was made, and its launcher killed before there was an attempt; not one that waits in a queue."""
        return _is_run(self.path) and not self.attempts and not self.job.is_dir()

    def log_path(self, attempt: int, node: str) -> Path:
        return self.attempt_path(attempt) / "logs" / f"{node}.log"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def status_path(self) -> Path:
        return self.path / "status.json"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """What each data rank trained on; made by the first that has something to say."""
        return self.path / "samples"

    @property
    def job(self) -> Path:
        """What a scheduler was given for this run; there only if it was submitted to one."""
        return self.path / "job"

    @property
    def control(self) -> Path:
        return self.path / "control"

    @property
    def stop_file(self) -> Path:
        return self.control / "stop"

    def own_loop_mark(self, attempt: int) -> Path:
        """The file that an own loop leaves for its launcher when it begins."""
        return self.control / f"own-loop-{attempt}"

    def changed_data_mark(self, attempt: int) -> Path:
        """The file that says that an attempt may go on with data that is not what the run began with."""
        return self.attempt_path(attempt) / CHANGED_DATA_MARK

    def outcome_path(self, attempt: int) -> Path:
        return self.control / f"outcome-{attempt}.json"


def find_runs(root: Path) -> list[RunDirectory]:
    """All runs under `root`, the one started last first."""
    runs = [RunDirectory(path.absolute()) for path in root.glob("*/*") if _is_run(path)]
    return sorted(runs, key=_last_start, reverse=True)


def _last_start(run: RunDirectory) -> tuple[int, str]:
    # The folder changes when an attempt is added. The id breaks ties, since ids need not be made from the time.
    try:
        return (run.path / "attempts").stat().st_mtime_ns, run.id
    except FileNotFoundError:  # deleted since it was listed
        return 0, run.id


def _likeness(run: RunDirectory, text: str) -> float:
    """How much a text looks like the run's id, its name, or both, from 0 to 1."""
    names = (run.id, run.name, f"{run.name}/{run.id}")
    return max(difflib.SequenceMatcher(None, text, name).ratio() for name in names)


def _is_run(path: Path) -> bool:
    return all((path / name).is_dir() for name in _MARKS)


def _make_folders(path: Path) -> None:
    """The folders of a run and their missing parents, all or none. FileExistsError if the run itself exists."""
    made: list[Path] = []
    try:
        for folder in (*reversed(path.parents), path, *(path / name for name in _FOLDERS)):
            if folder != path and folder.is_dir():
                continue
            try:
                folder.mkdir(mode=_FOLDER_MODE)
                made.append(folder)
            except FileExistsError:
                # Another run may have made a common parent just now.
                if folder == path:
                    raise
    except OSError:
        for folder in reversed(made):
            # A parent in which another run was made meanwhile stays.
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _new_id() -> str:
    return f"{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
