"""Packing: samples from anywhere into tar shards with an index, by many processes, and again after any kill.

    DEST/.packing/plan.json              what is packed and how: another plan is refused
    DEST/.packing/unit-000003-000.tar    finished shards of unit 3
    DEST/.packing/unit-000003.index      written after them: unit 3 is done
    DEST/shard-000000.tar …              the same shards under their last names, once all units are done
    DEST/index, DEST/dataset.json        written last

What is written does not depend on how many processes there were, which of them was faster, or how often they were
stopped: units are cut from the origin alone, and nothing in a shard says when or by whom it was made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from gradus.data.shards.columns import Columns, file_digest
from gradus.data.shards.crew import Tell, by_crew, cores
from gradus.data.shards.description import (
    DESCRIPTION,
    INDEX,
    TOKENS,
    Content,
    Description,
    File,
    PartOf,
    ShardFile,
    TokensOf,
    read_description,
)
from gradus.data.shards.destination import PLAN, WORK, check_folder, locked, unwritable
from gradus.data.shards.index import Entry, Fragment, Index, merged_parts, write_index
from gradus.data.shards.origins import LABELS, TEXT, Origin, Sample, Unit
from gradus.data.shards.storage import Storage, flushed
from gradus.data.shards.tar import END, Member, Shard, ShardWriter, sample_bytes
from gradus.data.tokenised import BATCH_CHARACTERS, BATCH_TEXTS, token_dtype
from gradus.data.tokenizer import Tokenizer, open_tokenizer
from gradus.record.durable import flush
from gradus.schema.errors import GradusError, InputError

SHARD_BYTES = 256 * 2**20

Report = Callable[[int, int], None]  # bytes done, and in all


@dataclass(frozen=True)
class HowToPack:
    """What decides about the bytes of the shards, besides their origin."""

    shard_bytes: int = SHARD_BYTES
    tokenizer: str | None = None
    tiktoken_pattern: str | None = None
    end_of_text: str | None = None
    keep_text: bool = False  # beside its tokens

    def open_tokenizer(self) -> Tokenizer | None:
        return None if self.tokenizer is None else _tokenizer(self.tokenizer, self.tiktoken_pattern, self.end_of_text)

    def identity(self) -> Any:
        tokenizer = self.open_tokenizer()
        return [asdict(self) | {"tokenizer": None}, tokenizer and [tokenizer.hash, tokenizer.end_of_text]]


class Packed(NamedTuple):
    folder: Path
    description: Description
    new: int  # shards written now
    kept: int  # shards that were there, whole


def pack(
    origin: Origin,
    folder: Path,
    how: HowToPack,
    *,
    workers: int | None = None,
    report: Report = lambda done, total: None,
) -> Packed:
    """Everything that the origin has. Called again after a kill, it goes on; finished shards are checked and kept."""
    if how.shard_bytes < 2**16:
        raise InputError(
            "--shard-size: at least 64KiB", field="--shard-size", found=how.shard_bytes, allowed=">= 64KiB"
        )
    specification = _digest([type(origin).__name__, origin.identity, how.identity()])
    check_folder(folder, specification)
    if (folder / DESCRIPTION).exists():
        return _checked(folder, workers, report)
    units = origin.units(how.shard_bytes)
    if not units:
        raise _nothing()
    was_there = folder.exists()
    try:
        with locked(folder):
            try:
                return _pack(origin, folder, how, units, specification, workers or cores(), report)
            except InputError:
                if not any((folder / WORK).glob("*.index")):  # else the shards that are finished are of use
                    shutil.rmtree(folder / WORK, ignore_errors=True)
                    if not was_there:
                        shutil.rmtree(folder, ignore_errors=True)
                raise
    except OSError as error:
        raise unwritable(folder, error) from error


def _pack(
    origin: Origin,
    folder: Path,
    how: HowToPack,
    units: Sequence[Unit],
    specification: str,
    workers: int,
    report: Report,
) -> Packed:
    work = folder / WORK
    with flushed(work / PLAN) as stream:
        stream.write(json.dumps({"specification": specification, "units": len(units)}).encode())
    for left in [*work.glob("*.partial"), *work.glob(".*.partial")]:  # of processes that were killed
        left.unlink(missing_ok=True)
    finals = _final_names(work, len(units))
    total, done = sum(unit.weight for unit in units), 0

    def told(amount: int) -> None:
        nonlocal done
        done += amount
        report(min(done, total), total)

    tasks = list(enumerate(units))
    new = kept = 0
    for _, (shards, written) in by_crew(partial(_ensure_unit, origin, folder, how, finals), tasks, workers, told):
        new, kept = (new + shards, kept) if written else (new, kept + shards)
    report(total, total)
    description = _finish(origin, folder, how, units, specification)
    return Packed(folder, description, new, kept)


def _ensure_unit(
    origin: Origin, folder: Path, how: HowToPack, finals: dict[str, str], task: tuple[int, Unit], tell: Tell
) -> tuple[int, bool]:
    """Have a unit's shards on the disk; how many they are, and whether they had to be written."""
    number, unit = task
    found = _whole_shards(folder, number, finals)
    if found is not None:
        tell(unit.weight)
        return found, False
    try:
        return _write_unit(origin, folder / WORK, how, number, unit, tell), True
    except OSError as error:
        raise unwritable(folder, error) from error


def _whole_shards(folder: Path, number: int, finals: dict[str, str]) -> int | None:
    """How many shards a finished unit has; None if it is not finished, or what is there is not what was written."""
    record = folder / WORK / f"{_unit_name(number)}.index"
    if not record.exists():
        return None
    try:
        shards = Columns(record).about["shards"]
    except (GradusError, OSError, ValueError):
        return None
    for shard in shards:
        file = _placed(folder, shard["file"], finals)
        if not file.is_file() or file.stat().st_size != shard["bytes"] or file_digest(file).xxh3_64 != shard["xxh3_64"]:
            return None
    return len(shards)


def _placed(folder: Path, staged: str, finals: dict[str, str]) -> Path:
    """Where a shard is: in the working folder, or already under its last name."""
    file = folder / WORK / staged
    return file if file.exists() or staged not in finals else folder / finals[staged]


def _write_unit(origin: Origin, work: Path, how: HowToPack, number: int, unit: Unit, tell: Tell) -> int:
    record = work / f"{_unit_name(number)}.index"
    record.unlink(missing_ok=True)
    fragment, shards = Fragment(), list[Shard]()
    writer: ShardWriter | None = None
    tokenizer = how.open_tokenizer()
    try:
        for sample, text_bytes, tokens in _tokenised(origin.samples(number, unit), tokenizer, how.keep_text):
            members = list(sample.members.values())
            if writer is not None and writer.bytes + sample_bytes(sample.key, members) + len(END) > how.shard_bytes:
                shards.append(writer.close())
                writer = None
            if writer is None:
                writer = ShardWriter(work / f"{_unit_name(number)}-{len(shards):03d}.tar")
            offsets = writer.add(sample.key, members)
            entries = {
                part: Entry(member.suffix, offset, len(member.data), xxhash.xxh3_64_intdigest(member.data))
                for (part, member), offset in zip(sample.members.items(), offsets, strict=True)
            }
            fragment.add(sample.key, entries, sample.label, text_bytes, tokens)
            tell(sample.weight)
        if writer is not None:
            shards.append(writer.close())
            writer = None
    finally:
        if writer is not None:
            writer.abandon()
    fragment.write(record, shards, {"split": unit.split})
    return len(shards)


def _tokenised(
    samples: Iterable[Sample], tokenizer: Tokenizer | None, keep_text: bool
) -> Iterator[tuple[Sample, int, int]]:
    """Samples with the length of their text and, where a tokenizer is given, with their tokens."""
    if tokenizer is None:
        for sample in samples:
            text = sample.members.get(TEXT)
            yield sample, len(text.data) if sample.document and text else 0, 0
        return
    dtype = token_dtype(tokenizer.vocabulary)
    for batch in _batches(samples):
        pieces = [piece for sample in batch for piece in sample.document or ()]
        ids = iter(tokenizer.encode(pieces))
        for sample in batch:
            if sample.document is None:
                message = f"--tokenizer: sample {sample.key} has no text"
                hint = "name the column that has the text: --text"
                raise InputError(message, hint=hint, field="--tokenizer", found=sample.key, allowed="a text")
            found = [next(ids).astype(dtype) for _ in sample.document]
            tokens = np.concatenate([*found, np.array([tokenizer.end_of_text], dtype)])
            members = {name: member for name, member in sample.members.items() if keep_text or name != TEXT}
            members[TOKENS] = Member(f"{TOKENS}.bin", tokens.tobytes())
            yield sample._replace(members=members), len(sample.members[TEXT].data), len(tokens)


def _batches(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    characters = 0
    for sample in samples:
        batch.append(sample)
        characters += sum(len(piece) for piece in sample.document or ())
        if len(batch) >= BATCH_TEXTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=1)
def _tokenizer(name: str, tiktoken_pattern: str | None, end_of_text: str | None) -> Tokenizer:
    return open_tokenizer(name, tiktoken_pattern, end_of_text)


def _final_names(work: Path, units: int) -> dict[str, str]:
    """The last name of each shard; nothing as long as a unit is missing, because its shards count."""
    records = [work / f"{_unit_name(number)}.index" for number in range(units)]
    if not all(record.exists() for record in records):
        return {}
    try:
        staged = [shard["file"] for record in records for shard in Columns(record).about["shards"]]
    except (GradusError, OSError, ValueError):
        return {}
    return {file: f"shard-{number:06d}.tar" for number, file in enumerate(staged)}


def _finish(origin: Origin, folder: Path, how: HowToPack, units: Sequence[Unit], specification: str) -> Description:
    work = folder / WORK
    records = [work / f"{_unit_name(number)}.index" for number in range(len(units))]
    # A unit of which nothing was wanted, all of it being held out, has no shard and no samples.
    abouts = [Columns(record).about for record in records]
    counts: dict[Any, int] = {"train": 0, "validation": 0}
    for about in abouts:
        counts[about["split"]] += about["samples"]
    if not sum(counts.values()):
        shutil.rmtree(folder)  # in which there is nothing but the working folder
        raise _nothing()
    finals = _final_names(work, len(units))
    for staged, final in finals.items():
        if (work / staged).exists():
            (work / staged).replace(folder / final)
    flush(folder)
    shards = [
        ShardFile(file=finals[shard["file"]], bytes=shard["bytes"], xxh3_64=shard["xxh3_64"], samples=shard["samples"])
        for about in abouts
        for shard in about["shards"]
    ]
    parts = merged_parts(abouts)
    index = write_index(work / INDEX, records, parts)
    (work / INDEX).replace(folder / INDEX)
    flush(folder)
    description = _described(
        origin, folder, how, parts, counts, shards, File(bytes=index.bytes, xxh3_64=index.xxh3_64), specification
    )
    with flushed(work / DESCRIPTION) as stream:
        stream.write((json.dumps(description.model_dump(mode="json"), indent=1) + "\n").encode())
    (work / DESCRIPTION).replace(folder / DESCRIPTION)
    flush(folder)
    shutil.rmtree(work)
    return description


def _described(
    origin: Origin,
    folder: Path,
    how: HowToPack,
    parts: dict[str, list[str]],
    counts: dict[Any, int],
    shards: list[ShardFile],
    index: File,
    specification: str,
) -> Description:
    opened = Index(folder / INDEX)
    listed = []
    for column, (name, suffixes) in enumerate(parts.items()):
        present = int(np.count_nonzero(opened.offsets[:, column]))
        size = int(opened.lengths[:, column].sum(dtype=np.uint64))
        listed.append(PartOf(name=name, suffixes=tuple(suffixes), samples=present, bytes=size))
    labelled = opened.labels is not None
    candidates = [part.name for part in listed if part.kinds == {"cls"}]
    label = None
    if labelled:
        label = next((name for name in LABELS if name in candidates), candidates[-1] if candidates else None)
    tokenizer = how.open_tokenizer()
    tokens = None
    if tokenizer is not None and opened.tokens is not None:
        tokens = TokensOf(
            dtype=token_dtype(tokenizer.vocabulary),
            tokenizer=tokenizer.name if tokenizer.name == "bytes" else Path(tokenizer.name).name,
            tokenizer_hash=tokenizer.hash,
            vocabulary=tokenizer.vocabulary,
            end_of_text=tokenizer.end_of_text,
            mask_token=tokenizer.mask_token,
            count=int(opened.tokens[-1]),
        )
    class_count = None
    if label is not None:
        assert opened.labels is not None
        class_count = max(len(origin.classes or ()), int(opened.labels.max()) + 1)
    return Description(
        content=_content(listed, label, tokens is not None),
        samples=counts,
        parts=tuple(listed),
        label=label,
        classes=origin.classes,
        class_count=class_count,
        tokens=tokens,
        shards=tuple(shards),
        index=index,
        packed={"specification": specification, "shard_bytes": how.shard_bytes},
    )


def _content(parts: Sequence[PartOf], label: str | None, tokens: bool) -> Content:
    """What a model would learn from: pictures with a class, or documents, or whatever the user makes of the parts."""
    if len(parts) == 2 and label is not None and any(part.image for part in parts):
        return "images"
    names = {part.name for part in parts}
    return "text" if tokens or (TEXT in names and not any(part.image for part in parts)) else "samples"


def _checked(folder: Path, workers: int | None, report: Report) -> Packed:
    """A dataset that was packed before: nothing to do if every shard is as it was written."""
    description = read_description(Storage(str(folder)), "DEST")
    shutil.rmtree(folder / WORK, ignore_errors=True)  # of a packing that was killed when all was done
    total, done = sum(shard.bytes for shard in description.shards), 0

    def told(amount: int) -> None:
        nonlocal done
        done += amount
        report(done, total)

    shards = list(description.shards)
    damaged = [
        shards[number].file
        for number, whole in by_crew(partial(_is_whole, folder), shards, workers or cores(), told)
        if not whole
    ]
    if damaged:
        message = f"{folder} was packed before, and {', '.join(sorted(damaged)[:5])} is not as it was written"
        hint = f"what is wrong: gradus data verify {folder}; to pack again, remove the folder"
        raise GradusError(message, hint=hint, damaged=sorted(damaged))
    return Packed(folder, description, 0, len(shards))


def _is_whole(folder: Path, shard: ShardFile, tell: Tell) -> bool:
    file = folder / shard.file
    whole = file.is_file() and file.stat().st_size == shard.bytes and file_digest(file).xxh3_64 == shard.xxh3_64
    tell(shard.bytes)
    return whole


def _nothing() -> InputError:
    message = "SOURCE: there is nothing to pack in it"
    return InputError(message, field="SOURCE", found="no samples", allowed="at least one sample")


def _unit_name(number: int) -> str:
    return f"unit-{number:06d}"


def _digest(description: Any) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:24]
