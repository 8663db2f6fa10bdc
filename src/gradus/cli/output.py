"""Output: one JSON document on stdout with `--json`, text for people otherwise, errors in either form."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradus.record import strict_json
from gradus.schema.errors import EXIT_FAILED, GradusError

_TRACEBACK_LINES = 24  # an error must fit on one screen


def print_json(document: Any) -> None:
    print(strict_json.pretty(document))


def run_command(command: Callable[[], int], as_json: bool) -> int:
    """Run a verb and report what goes wrong in it. Returns the exit code."""
    try:
        return command()
    except GradusError as error:
        if as_json:
            print_json({"error": error.document(), "exit_code": error.exit_code})
        else:
            print_error(error.document())
        return error.exit_code
    except BrokenPipeError:
        return EXIT_FAILED
    except Exception as error:
        if not as_json:
            raise
        document = {
            "kind": "internal",
            "message": f"{type(error).__name__}: {error}",
            "hint": "this is a bug in gradus",
            "traceback": traceback.format_exc(),
        }
        print_json({"error": document, "exit_code": EXIT_FAILED})
        return EXIT_FAILED


def shown(path: Path) -> str:
    """A path as short as it can be typed here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_error(error: dict[str, Any]) -> None:
    """An error for people: what happened, where, the end of the traceback if there is one, and a hint."""
    lines = []
    ended_with = error.get("traceback") or error.get("output")
    if ended_with:
        shown = ended_with.rstrip().splitlines()
        if len(shown) > _TRACEBACK_LINES:
            shown = ["  …", *shown[-_TRACEBACK_LINES:]]
        lines += [*shown, ""]
    # Bad input and a NaN are the same on every rank; which of them came first to say so does not matter.
    of_one_rank = error.get("kind") in ("exception", "lost-peer", "out-of-memory") and "rank" in error
    where = f"rank {error['rank']} on {error['node']}: " if of_one_rank else ""
    lines.append(f"error: {where}{error['message']}")
    if error.get("hint"):
        lines.append(f"hint: {error['hint']}")
    if error.get("log"):
        lines.append(f"log: {error['log']}")
    print("\n".join(lines), file=sys.stderr)
