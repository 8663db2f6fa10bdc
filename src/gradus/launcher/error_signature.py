"""Error signature: what an error says, without what differs each time: the same error has the same one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from gradus.schema.user_code import OUR_FOLDER

_LONGEST = 300
# Of a syntax error there is no function.
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<function>.+))?$', re.MULTILINE)
_NOT_THE_USERS = re.compile(r"site-packages|dist-packages|/lib/python3|^<")
# In this order: a time holds numbers, and a path may too.
_VARIABLE = (
    (re.compile(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(?:[.,]\d+)?(?:Z|[+-]\d{2}:?\d{2})?"), "TIME"),
    (re.compile(r"\b\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?\b"), "TIME"),
    (re.compile(r"\b0x[0-9a-fA-F]+\b"), "ADDRESS"),
    (re.compile(r"(?<![\w.])~?/[^\s'\",:;()\[\]]+"), "PATH"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "ADDRESS"),
    (re.compile(r"\b[0-9a-f]{8,}\b"), "HASH"),
    (re.compile(r"[-+]?\d+(?:[.,_]\d+)*(?:e[-+]?\d+)?", re.IGNORECASE), "#"),
)


def error_signature(error: Mapping[str, Any] | None, nodes: Iterable[str] = ()) -> str | None:
    """The signature of an error document, as a rank or a launcher leaves it; `nodes` are names that may occur in it."""
    if not error:
        return None
    message = normalised(str(error.get("message") or ""), [*nodes, *([error["node"]] if error.get("node") else [])])
    frame = innermost_user_frame(str(error.get("traceback") or ""))
    return f"{error.get('kind') or 'unknown'}: {message}{f' @ {frame}' if frame else ''}"


def normalised(message: str, nodes: Iterable[str] = ()) -> str:
    """A message without numbers, addresses, paths, times and names of nodes."""
    for node in sorted(set(nodes), key=len, reverse=True):
        message = re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "NODE", message)
    for pattern, word in _VARIABLE:
        message = pattern.sub(word, message)
    return " ".join(message.split())[:_LONGEST]


def innermost_user_frame(traceback: str) -> str | None:
    """`train.py:31 in step`: where the user's own code was; without any of it, where the error was raised."""
    for frame in (_users_frames(traceback) or list(_FRAME.finditer(traceback)))[-1:]:
        return f"{PurePath(frame['file']).name}:{frame['line']}{_in(frame)}"
    return None


def place_in_users_code(traceback: str) -> str | None:
    """`train.py, line 31, in step: loss.backwrad()`: where to look; None if no code of the user is in it."""
    own = _users_frames(traceback)
    if not own:
        return None
    frame = own[-1]
    code = traceback[frame.end() :].lstrip("\n").partition("\n")[0]
    what = f": {code.strip()}" if code.startswith("    ") else ""
    return f"{frame['file']}, line {frame['line']}{',' if frame['function'] else ''}{_in(frame)}{what}"


def _in(frame: re.Match[str]) -> str:
    return f" in {frame['function'].strip()}" if frame["function"] else ""


def _users_frames(traceback: str) -> list[re.Match[str]]:
    return [
        frame
        for frame in _FRAME.finditer(traceback)
        if not _NOT_THE_USERS.search(frame["file"]) and not frame["file"].startswith(OUR_FOLDER)
    ]
