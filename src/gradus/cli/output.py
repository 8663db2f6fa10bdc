"""Output: one JSON document on stdout with `--json`, text for people otherwise, errors in either form."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

from gradus.schema.errors import EXIT_FAILED, GradusError

_TRACEBACK_LINES = 24  # an error must fit on one screen


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=1, default=str))


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


def print_error(error: dict[str, Any]) -> None:
    """An error for people: what happened, where, the end of the traceback if there is one, and a hint."""
    lines = []
    if error.get("traceback"):
        shown = error["traceback"].rstrip().splitlines()
        if len(shown) > _TRACEBACK_LINES:
            shown = ["  …", *shown[-_TRACEBACK_LINES:]]
        lines += [*shown, ""]
    where = f"rank {error['rank']} on {error['node']}: " if error.get("node") and "rank" in error else ""
    lines.append(f"error: {where}{error['message']}")
    if error.get("hint"):
        lines.append(f"hint: {error['hint']}")
    if error.get("log"):
        lines.append(f"log: {error['log']}")
    print("\n".join(lines), file=sys.stderr)
