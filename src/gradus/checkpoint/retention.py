"""Retention: which checkpoints stay when a newer one is there. No torch.

step-00000100                of the run's history
step-00000300.passed-over    of a history that was left: whole perhaps, and set aside rather than deleted
step-00000050.removed        on its way out
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gradus.checkpoint.manifest import committed_steps, verify_folder
from gradus.checkpoint.part import COMMITTED
from gradus.checkpoint.step_folder import step_of

_REMOVED = ".removed"
_PASSED_OVER = ".passed-over"
_MOST_PASSED_OVER = 2  # that stay: what is wrong with the newest is seldom wrong with the one before, too


@dataclass(frozen=True)
class Retention:
    keep: int  # the newest ones
    every: int | None = None  # and the first at or after each multiple of so many steps
    best: int | None = None  # and the one of this step


@dataclass
class Cleared:
    """What became of folders that were to go."""

    gone: list[Path] = field(default_factory=list)
    set_aside: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # of those that cannot be deleted or renamed, why

    @property
    def steps(self) -> list[int]:
        """Of the checkpoints that are gone."""
        return sorted(step for path in self.gone if (step := step_of(path.name)) is not None)


def kept(steps: Iterable[int], newest: int, retention: Retention) -> set[int]:
    """Which steps stay, of which the newest was just verified.

    Those of later steps are of a history that was left: a resume has passed over them.
    """
    ordered = sorted(step for step in steps if step <= newest)
    stay = {*ordered[-retention.keep :], newest} & set(ordered)
    if retention.every is not None:
        marked: set[int] = {0}  # the beginning is no milestone
        for step in ordered:
            if step // retention.every not in marked:
                marked.add(step // retention.every)
                stay.add(step)
    return stay | {step for step in ordered if step == retention.best}


def prune(folder: Path, newest: int, retention: Retention) -> Cleared:
    """Delete the checkpoints that need not stay, once every byte of the newest is verified.

    Those of later steps are set aside. Also gone is what saves that never came to an end left behind, unless they are
    of later steps: those may be under way.
    """
    committed = {step: folder / name for step, name in committed_steps(folder).items()}
    assert newest in committed, f"step {newest} is not committed"
    later = [path for step, path in committed.items() if step > newest]
    unneeded = committed.keys() - kept(committed, newest, retention)
    going = [path for step, path in sorted(committed.items()) if step < newest and step in unneeded]
    cleared = Cleared()
    for path in later:
        _each(path, _set_aside, cleared.set_aside, cleared.problems)
    going += _too_many_passed_over(folder)
    if going:
        verify_folder(committed[newest])
    for path in going:
        _each(path, remove, cleared.gone, cleared.problems)
    for path, step in _leftovers(folder).items():
        if step < newest:
            _each(path, remove, [], cleared.problems)
    return cleared


def set_aside(folder: Path, later_than: int) -> Cleared:
    """Out of the run's way: checkpoints of steps after one that the run goes back to. For when nobody is saving."""
    cleared = Cleared()
    for step, name in committed_steps(folder).items():
        if step > later_than:
            _each(folder / name, _set_aside, cleared.set_aside, cleared.problems)
    return cleared


def clear_leftovers(folder: Path) -> Cleared:
    """Delete what saves that never came to an end left behind. For when nobody is saving: before a run goes on."""
    cleared = Cleared()
    for path in sorted(_leftovers(folder)) if folder.is_dir() else ():
        _each(path, remove, cleared.gone, cleared.problems)
    return cleared


def _each(path: Path, action: Callable[[Path], None], done: list[Path], problems: list[str]) -> None:
    """One that cannot be deleted (somebody has it open, or it is another user's) is no reason to keep the rest."""
    try:
        action(path)
    except OSError as error:
        problems.append(f"{path}: {error}")
    else:
        done.append(path)


def _leftovers(folder: Path) -> dict[Path, int]:
    """What is neither committed nor set aside, with the step that it was to be or has been of."""
    found = {}
    committed = committed_steps(folder)
    for path in folder.iterdir():
        name = path.name.removesuffix(_REMOVED)
        step = step_of(name if name == path.name else name.removesuffix(_PASSED_OVER))
        if step is not None and committed.get(step) != path.name:
            found[path] = step
    return found


def _set_aside(path: Path) -> None:
    """Out of the run's way, and whole: whoever renames it back has it again."""
    aside = path.with_name(path.name + _PASSED_OVER)
    if aside.exists():
        remove(aside)
    path.rename(aside)


def passed_over(folder: Path) -> dict[int, Path]:
    """The checkpoints that were set aside, ascending."""
    found = ((step_of(path.name.removesuffix(_PASSED_OVER)), path) for path in folder.glob(f"step-*{_PASSED_OVER}"))
    return dict(sorted((step, path) for step, path in found if step is not None))


def _too_many_passed_over(folder: Path) -> list[Path]:
    return list(passed_over(folder).values())[:-_MOST_PASSED_OVER]


def remove(path: Path) -> None:
    """Delete a checkpoint, or what there is of one."""
    (path / COMMITTED).unlink(missing_ok=True)  # first: a half-deleted checkpoint must not look like a whole one
    out = path if path.name.endswith(_REMOVED) else path.with_name(path.name + _REMOVED)
    if out is not path:
        with suppress(FileNotFoundError):
            shutil.rmtree(out)  # what an earlier try left
        # At once, so that whoever saves the same step anew begins in a folder of its own.
        path.rename(out)
    shutil.rmtree(out)
