"""Local tier: parts on a node's own disk, which takes them fast, and their way into the run's folder. No torch.

<local>/step-00000100/
  part-00003-of-00004.safetensors   as in the run's folder, for each rank of this node
  part-00003-of-00004.json          its record, which stays here
  part-document.json                where rank 0 is: what the manifest says besides tensors, and of which history it is

What is here when a run dies may be all there is of its last checkpoint: `drain` brings it to safety, `commit_drained`
makes a checkpoint of it if the other nodes brought their parts too. That is only for the attempt right after the one
that wrote it: any other has gone on from elsewhere, and what lies here is of a history that was left.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradus.checkpoint.commit import NotWhole, commit
from gradus.checkpoint.digest import digest
from gradus.checkpoint.manifest import committed_steps
from gradus.checkpoint.part import PartLayout, PartRecord, read_record, write_part, write_record, write_whole
from gradus.checkpoint.report import Report
from gradus.checkpoint.step_folder import step_folders

_DOCUMENT = "part-document.json"  # rank 0 tidies what begins like a part when it commits
_RECORD = re.compile(r"part-(\d+)-of-(\d+)\.json")


def write_document(
    folder: Path, save_id: str, ranks: int, document: Mapping[str, Any], began_from: int | None = None
) -> None:
    """`began_from` is the step of the checkpoint that the attempt went on from."""
    said = {
        "save_id": save_id,
        "attempt": attempt_of(save_id),
        "began_from": began_from,
        "ranks": ranks,
        "document": document,
    }
    write_whole(folder / _DOCUMENT, json.dumps(said, separators=(",", ":")).encode())


def save_id_of(attempt: str, number: int) -> str:
    """Of the saves of a run, this one: the same on all ranks, without a word between them."""
    return f"{attempt}#{number}"


def attempt_of(save_id: str) -> str:
    return save_id.rpartition("#")[0]


def copy_part(source: Path, target: Path, record: PartRecord, *, abandoned: Callable[[], bool]) -> PartRecord:
    """Write a part once more from its file. Bytes that are not those that were recorded are an OSError."""
    file = source / record.file_name
    expected = {place: found for entry, digests in record.tensors for place, found in _placed(entry.blocks(), digests)}
    descriptor = os.open(file, os.O_RDONLY)
    try:

        def checked(start: int, stop: int, wanted: str) -> bytes:
            block = os.pread(descriptor, stop - start, start)
            if len(block) != stop - start or digest(block) != wanted:
                raise OSError(f"{file}: bytes {start} to {stop} are not those that were written")
            return block

        header = checked(0, record.header_bytes, record.header_xxh3_64)
        layout = PartLayout(record.file_name, header, tuple(entry for entry, _ in record.tensors), record.bytes)
        return write_part(
            target,
            layout,
            lambda start, stop: checked(start, stop, expected[start, stop]),
            abandoned=abandoned,
            save_id=record.save_id,
            held=record.held,
        )
    finally:
        os.close(descriptor)


def _placed(blocks: Iterator[tuple[int, int]], digests: tuple[str, ...]) -> Iterator[tuple[tuple[int, int], str]]:
    return zip(blocks, digests, strict=True)


def drain(local: Path, folder: Path, *, attempt: str) -> list[Report]:
    """Bring what a run that died left on this node into its folder. For one process on each node, before it goes on.

    `attempt` is the one that went before: what others have left is of a history that was left.
    """
    reports: list[Report] = []
    newest = max(committed_steps(folder), default=-1)
    for step, path in step_folders(local):
        if step <= newest:
            continue
        ours = 0
        for rank, ranks in _recorded(path):
            try:
                record = read_record(path, rank, ranks)
                if record is None or attempt_of(record.save_id) != attempt:
                    continue
                ours += 1
                taken = _drain_part(path, folder / path.name, record, rank, ranks)
            except (OSError, ValueError) as error:
                reports.append(Report("failed", step, f"{path}: the part of rank {rank} cannot be used: {error}"))
            else:
                if taken is not None:
                    reports.append(Report("copied", step, str(folder / path.name / taken.file_name), 0.0, taken.bytes))
        if not ours and _recorded(path):
            message = f"{path} is not used: an attempt has started since it was written, and went on without it"
            reports.append(Report("note", step, message))
        elif (path / _DOCUMENT).exists() and (folder / path.name).is_dir():
            try:
                write_whole(folder / path.name / _DOCUMENT, (path / _DOCUMENT).read_bytes())
            except OSError as error:
                reports.append(Report("failed", step, f"{path}: {error}"))
    return reports


def _drain_part(source: Path, target: Path, record: PartRecord, rank: int, ranks: int) -> PartRecord | None:
    """The part that was taken, unless it has come there before."""
    there = read_record(target, rank, ranks) if target.is_dir() else None
    if there is not None and there.save_id == record.save_id and (target / record.file_name).exists():
        return None
    record = copy_part(source, target, record, abandoned=lambda: False)
    write_record(target, record)
    return record


@dataclass(frozen=True)
class _Document:
    save_id: str
    ranks: int
    document: Mapping[str, Any]
    attempt: str
    began_from: int | None


def commit_drained(folder: Path, *, attempt: str) -> list[Report]:
    """Make checkpoints of what was brought from all nodes, where it is whole. For rank 0, after all have drained."""
    reports: list[Report] = []
    newest = max(committed_steps(folder), default=-1)
    for step, path in step_folders(folder):
        if step <= newest or not (path / _DOCUMENT).exists():
            continue
        try:
            said = _Document(**json.loads((path / _DOCUMENT).read_text()))
            if said.attempt != attempt:
                continue  # of which `drain` has told
            if said.began_from is not None and said.began_from > newest:
                message = f"its attempt began from step {said.began_from}, which is gone: somebody went back before it"
                reports.append(Report("note", step, f"{path} is not used: {message}"))
                continue
            save_id, ranks, document = said.save_id, said.ranks, said.document
            missing = [rank for rank in range(ranks) if not recorded(path, rank, ranks, save_id)]
            if missing:
                message = f"the parts of {len(missing)} of {ranks} ranks are missing, the first that of {missing[0]}"
                reports.append(Report("failed", step, f"{path}: {message}"))
                continue
            commit(path, step, ranks, document, abandoned=lambda: False, save_id=save_id)
            reports.append(Report("committed", step, str(path)))
        except (OSError, ValueError, KeyError, TypeError, NotWhole) as error:
            reports.append(Report("failed", step, f"{path}: {error}"))
    return reports


def recorded(path: Path, rank: int, ranks: int, save_id: str) -> bool:
    """Whether a rank has written its part in a certain save."""
    record = read_record(path, rank, ranks)
    return record is not None and record.save_id == save_id


def forget_older(local: Path, folder: Path) -> None:
    """Delete from the node's disk what is older than the newest checkpoint in the run's folder."""
    newest = max(committed_steps(folder), default=-1)
    for step, path in step_folders(local):
        if step < newest:
            shutil.rmtree(path, ignore_errors=True)  # another rank of this node may be at it too


def forget(local: Path) -> None:
    """Delete the run's folder on the node's disk. For when the run is finished, and all of it in the run's folder."""
    shutil.rmtree(local, ignore_errors=True)  # another rank of this node may be at it too


def _recorded(path: Path) -> list[tuple[int, int]]:
    found = (_RECORD.fullmatch(file.name) for file in path.iterdir())
    return sorted((int(match[1]), int(match[2])) for match in found if match is not None)
