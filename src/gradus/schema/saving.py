"""Writing into YAML files that people edit: what did not change keeps its lines and comments."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from gradus.schema.errors import InputError
from gradus.schema.loading import Document, dump_yaml, parse_yaml

_TOP_KEY = re.compile(r"^([A-Za-z_][\w-]*)\s*:")


def write_document(path: Path, document: Document, keep: Collection[str] = ()) -> None:
    """Make the file hold the document. Blocks of the top-level keys in `keep` stay as they are written.

    The file is replaced as a whole or not at all.
    """
    text = dump_yaml(document)
    if keep and path.exists():
        text = _merged(path.read_text(encoding="utf-8"), document, keep) or text
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}", file=str(path)) from None


def _merged(old: str, document: Document, keep: Collection[str]) -> str | None:
    """The old text with all blocks but those to keep written anew, or None where its lines cannot be told apart."""
    blocks = _blocks(old)
    names = [name for name, _ in blocks if name]
    if not names or len(set(names)) < len(names):
        return None
    lines: list[str] = []
    for name, block in blocks:
        if not name or name in keep:
            lines += block
        elif name in document:
            lines += dump_yaml({name: document[name]}).splitlines()
    for name in document.keys() - set(names):
        lines += dump_yaml({name: document[name]}).splitlines()
    text = "\n".join(lines) + "\n"
    read_back = parse_yaml(text, "the new text")
    return text if all(read_back.get(name) == document[name] for name in document.keys() - set(keep)) else None


def _blocks(text: str) -> list[tuple[str, list[str]]]:
    """The lines of each top-level key; what stands before the first one, and comments between them, have no name."""
    blocks: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines():
        key = _TOP_KEY.match(line)
        if key:
            blocks.append((key[1], [line]))
        elif line.startswith("#"):  # of what follows it, more likely than of what is above
            if blocks[-1][0]:
                blocks.append(("", []))
            blocks[-1][1].append(line)
        else:
            blocks[-1][1].append(line)
    return blocks
