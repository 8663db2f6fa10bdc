"""Commit: the parts of all ranks become one checkpoint, or none. No torch.

Rank 0 waits for the record of each rank, writes what they say together into MANIFEST.json, and COMMITTED last.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import gradus
from gradus.checkpoint.digest import digest
from gradus.checkpoint.part import (
    COMMITTED,
    Abandoned,
    Entry,
    PartRecord,
    read_record,
    write_whole,
)
from gradus.record.durable import flush
from gradus.schema.errors import GradusError

__all__ = [
    "COMMITTED",
    "FORMAT",
    "MANIFEST",
    "Abandoned",
    "NotWhole",
    "commit",
    "committed_text",
    "has_come",
    "has_committed",
    "tiles",
    "versions",
]

# 3: each rank writes its own part. 2: rows of `attention.qkv` lie in groups, one for each key-value head.
FORMAT = 3
MANIFEST = "MANIFEST.json"
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 0.01, 0.5


class NotWhole(GradusError):
    """What the ranks wrote is not one whole checkpoint. Writing it again would not help."""

    kind = "checkpoint-not-whole"


def commit(
    folder: Path,
    step: int,
    ranks: int,
    document: Mapping[str, Any],
    *,
    abandoned: Callable[[], bool],
    save_id: str = "",
) -> None:
    """Make a checkpoint of the parts in its folder, when all are there.

    `document` is what rank 0 has to say: `recipe_hash`, `plan_hash`, `samples`, and `state`, which is all that is no
    tensor. A failure is an OSError, and it may be tried again: the records stay until there is a checkpoint. What this
    save has committed already, it leaves alone.
    """
    there = _committed_manifest(folder) if save_id else None
    if there is not None and there.get("save_id") == save_id:
        _finish(folder, {*there["files"], MANIFEST, COMMITTED})
        return
    records = _all_records(folder, ranks, save_id, abandoned)
    files, tensors = _merged(records)
    for name, described in files.items():
        found = os.stat(folder / name).st_size
        if found != described["bytes"]:
            raise NotWhole(f"{folder / name} has {found} bytes, and {described['bytes']} were written")
    manifest = {
        "format": FORMAT,
        "step": step,
        "written_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "save_id": save_id,
        **({} if "versions" in document else {"versions": versions()}),
        **dict.fromkeys(("recipe_hash", "plan_hash", "samples")),
        **document,
        "files": files,
        "tensors": tensors,
    }
    (folder / COMMITTED).unlink(missing_ok=True)
    content = json.dumps(manifest, separators=(",", ":")).encode()
    write_whole(folder / MANIFEST, content)
    flush(folder)
    if abandoned():
        raise Abandoned
    write_whole(folder / COMMITTED, committed_text(content))
    _finish(folder, {*files, MANIFEST, COMMITTED})


def _finish(folder: Path, ours: set[str]) -> None:
    flush(folder)
    flush(folder.parent)
    _tidy(folder, ours)


def has_come(folder: Path, rank: int, ranks: int, save_id: str) -> bool:
    """Whether a rank has nothing left to write of a save: its part is recorded, or the whole is committed.

    Asked in this order: a record goes only when COMMITTED is there.
    """
    try:
        record = read_record(folder, rank, ranks)
    except OSError as error:
        if error.errno is not None:
            raise
        record = None  # there is something that is no record, and will be written anew
    if record is not None and record.save_id == save_id:
        file = folder / record.file_name
        return file.exists() and file.stat().st_size == record.bytes
    return has_committed(folder, save_id)


def has_committed(folder: Path, save_id: str) -> bool:
    """Whether what is committed in a folder is of this save."""
    there = _committed_manifest(folder)
    return there is not None and there.get("save_id") == save_id


def _committed_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of what is committed in a folder, if it is as it was committed."""
    try:
        committed = (folder / COMMITTED).read_bytes()
        content = (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if committed != committed_text(content):
        return None
    found = json.loads(content)
    return found if isinstance(found, dict) else None


def versions() -> dict[str, str]:
    """Of whatever a checkpoint depends on, the versions that write it."""
    torch = sys.modules.get("torch")  # where it is loaded, it says so itself; a writer process never loads it
    found = metadata.version("torch") if torch is None else str(torch.__version__)
    return {"gradus": gradus.__version__, "torch": found, "python": platform.python_version()}


def committed_text(manifest: bytes) -> bytes:
    """What COMMITTED says of a manifest: no byte of it means nothing."""
    return json.dumps({"bytes": len(manifest), "xxh3_64": digest(manifest)}, separators=(",", ":")).encode()


def _all_records(folder: Path, ranks: int, save_id: str, abandoned: Callable[[], bool]) -> list[PartRecord]:
    """Each is opened by its name: a list of a folder may be old news on a network file system."""
    records: list[PartRecord] = []
    pause = _FIRST_WAIT_SECONDS
    while len(records) < ranks:
        record = read_record(folder, len(records), ranks)
        if record is not None and record.save_id == save_id:
            records.append(record)
            pause = _FIRST_WAIT_SECONDS
            continue
        if abandoned():
            raise Abandoned
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_WAIT_SECONDS)
    return records


def _merged(records: Sequence[PartRecord]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The files and the tensors of all ranks. Of boxes that several have written, the lowest rank's is taken."""
    files = {
        r.file_name: {
            "bytes": r.bytes,
            "xxh3_64": r.xxh3_64,
            "header": {"bytes": r.header_bytes, "xxh3_64": r.header_xxh3_64},
        }
        for r in records
    }
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    pieces: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], dict[str, Any]]] = {}
    for record in records:
        for entry, digests in record.tensors:
            kind = kinds.setdefault(entry.name, (entry.dtype, entry.shape))
            if kind != (entry.dtype, entry.shape):
                raise NotWhole(
                    f"{entry.name} is {entry.dtype} {list(entry.shape)} in {record.file_name}, and {kind[0]} "
                    f"{list(kind[1])} in a part before it"
                )
            piece = _piece(record.file_name, entry, digests)
            pieces.setdefault(entry.name, {}).setdefault((entry.offset, entry.box), piece)
    tensors: dict[str, Any] = {}
    for name, (dtype, shape) in sorted(kinds.items()):
        if not tiles(shape, list(pieces[name])):
            boxes = "; ".join(f"{list(box)} at {list(offset)}" for offset, box in itertools.islice(pieces[name], 5))
            raise NotWhole(f"{name} of shape {list(shape)} is not what its boxes make together: {boxes}")
        tensors[name] = {"dtype": dtype, "shape": shape, "pieces": list(pieces[name].values())}
    _check_none_is_missing(records, tensors)
    return files, tensors


def _check_none_is_missing(records: Sequence[PartRecord], written: Mapping[str, Any]) -> None:
    """Each rank works out by itself whose turn a tensor is. Ranks that hold other things may come to other results."""
    for record in records:
        missing = [name for name in record.held if name not in written]
        if missing:
            raise NotWhole(
                f"{len(missing)} tensors that the rank of {record.file_name} holds were written by none, the first of "
                f"them {missing[0]}: do all ranks hold tensors of the same names?"
            )


def _piece(file: str, entry: Entry, digests: Sequence[str]) -> dict[str, Any]:
    return {
        "file": file,
        "offset": entry.offset,
        "shape": entry.box,
        "start": entry.start,
        "bytes": entry.byte_count,
        "digests": digests,
    }


def tiles(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes, each an offset and a shape, make a whole: nothing is missing, and nothing there twice."""
    filled = 0
    for offset, box in boxes:
        if not len(shape) == len(offset) == len(box):
            return False
        if any(low < 0 or size < 0 or low + size > all_ for all_, low, size in zip(shape, offset, box, strict=True)):
            return False
        filled += math.prod(box)
    if not boxes or filled != math.prod(shape):
        return False
    solid = [(offset, box) for offset, box in boxes if math.prod(box)]
    if len(solid) < 2:
        return True
    # Between all the planes along which something is cut lie cells. Each must be in one box only.
    cuts = [
        sorted({edge for offset, box in solid for edge in (offset[dim], offset[dim] + box[dim])})
        for dim in range(len(shape))
    ]
    taken: set[tuple[int, ...]] = set()
    for offset, box in solid:
        spans = [
            range(bisect.bisect_left(cut, low), bisect.bisect_left(cut, low + size))
            for cut, low, size in zip(cuts, offset, box, strict=True)
        ]
        for cell in itertools.product(*spans):
            if cell in taken:
                return False
            taken.add(cell)
    return True


def _tidy(folder: Path, ours: set[str]) -> None:
    """Records, and what an earlier attempt left in the folder. The checkpoint is there, with or without them."""
    with suppress(OSError):
        for path in folder.glob("part-*"):
            if path.name not in ours:
                path.unlink(missing_ok=True)
