"""Errors meant for people: what happened, where, and what to do. Each kind carries its exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_NO_PLAN = 3
EXIT_STOPPED = 75
EXIT_DO_NOT_RESTART = 93


class GradusError(Exception):
    """A failure that is reported without a traceback. `details` go into the JSON form of the error."""

    exit_code = EXIT_FAILED
    kind = "failed"

    def __init__(self, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            self.__notes__ = [f"hint: {hint}"]  # Python 3.11 and notebooks show it below the traceback
        self.details = {key: value for key, value in details.items() if value is not None}

    def locate(self, file: str) -> None:
        """Name the file that the field is written in, unless the error names one already."""
        if "file" not in self.details:
            self.message = f"{file}: {self.message}"
            self.args = (self.message,)
            self.details["file"] = file

    def document(self) -> dict[str, Any]:
        """The error as `--json` prints it and as a rank leaves it for the launcher."""
        return {"kind": self.kind, "message": self.message, "hint": self.hint, **self.details}


class InputError(GradusError):
    """Bad input: names the file, the field, what was found, what is allowed, and the nearest valid name."""

    exit_code = EXIT_BAD_INPUT
    kind = "bad-input"


class NoPlanFits(GradusError):
    """No legal plan: names the numbers that bind and the smallest change that would fit."""

    exit_code = EXIT_NO_PLAN
    kind = "no-plan"


class DoNotRestart(GradusError):
    """A failure that the same inputs would only repeat."""

    exit_code = EXIT_DO_NOT_RESTART
    kind = "do-not-restart"


def nearest(name: str, allowed: Iterable[str]) -> str | None:
    """The allowed name that `name` was probably meant to be, whatever its case; of long names, a beginning will do."""
    written = {candidate.lower(): candidate for candidate in allowed}
    wanted = name.lower()
    close = difflib.get_close_matches(wanted, list(written), n=1, cutoff=0.6)
    if not close and len(wanted) >= 3:
        close = [candidate for candidate in sorted(written) if candidate.startswith(wanted)]
    return written[close[0]] if close else None


def unknown_name(
    what: str, found: str, allowed: Iterable[str], *, field: str, file: str | None = None, hint: str | None = None
) -> InputError:
    """The error for a name that is not one of `allowed`, with the nearest one as a suggestion."""
    names = sorted(allowed)
    close = nearest(found, names)
    where = f"{file}: " if file else ""
    suggestion = f"; did you mean {close!r}?" if close else "."
    return InputError(
        f"{where}{field}: unknown {what} {found!r}{suggestion} Allowed: {', '.join(names) or 'none is known here'}",
        hint=hint,
        file=file,
        field=field,
        found=found,
        allowed=names,
        nearest=close,
    )
