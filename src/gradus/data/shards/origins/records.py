"""Plain text, JSONL, Parquet and Arrow files: documents, or rows whose columns are parts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from gradus.data.files import COMPRESSED, DataFile, DataFiles, find_files
from gradus.data.records import broken, count_documents, read_pieces, read_rows, type_name
from gradus.data.shards.origins.origin import LABELS, SPLITS, TEXT, Sample, Sent, Unit, grouped, label_of, part_name
from gradus.data.shards.parts import encoded
from gradus.data.shards.tar import Member
from gradus.data.split import held_out_documents
from gradus.schema.errors import InputError


class Range(NamedTuple):
    """A file, or the records of it that begin between two bytes, or two row groups."""

    file: int
    start: int
    end: int | None
    size: int
    first: int = 0  # the number of the first document in it; known only if some are held out


@dataclass(frozen=True)
class Records(Sent):
    """Plain text, JSONL, Parquet or Arrow: files of documents, or of rows whose columns are parts."""

    path: str
    pattern: str | None = None
    validation: float = 0.0
    text: str = TEXT  # the column that is a document
    columns: tuple[str, ...] | None = None  # only these
    kind: str | None = None  # what the files must be
    files: DataFiles = field(init=False)

    def __post_init__(self) -> None:
        files = find_files(self.path, self.pattern)
        kinds = {"jsonl": ("jsonl",), "text": ("text",), "parquet": ("parquet", "arrow")}
        found = files.train[0].kind
        if self.kind is not None and found not in kinds[self.kind]:
            message = f"--kind: found {self.kind}, but {files.train[0].path} is {found}"
            raise InputError(message, field="--kind", found=self.kind, allowed=found)
        object.__setattr__(self, "files", files)

    @cached_property
    def classes(self) -> tuple[str, ...] | None:
        """The names of classes that Hugging Face writes into Parquet and Arrow files."""
        if self.files.train[0].kind != "parquet":
            return None
        import pyarrow.parquet

        try:
            metadata = pyarrow.parquet.read_schema(self.files.train[0].path).metadata or {}
            features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]
            names = next(features[name]["names"] for name in LABELS if "names" in features.get(name, {}))
        except (OSError, ValueError, KeyError, TypeError, StopIteration, pyarrow.ArrowException):
            return None
        return tuple(map(str, names))

    @property
    def identity(self) -> Any:
        content = [self.text, list(self.columns) if self.columns else None, self.validation]
        return {"files": self.files.identity(), "content": content}

    def units(self, shard_bytes: int) -> list[Unit]:
        units: list[Unit] = []
        published = self.files.validation is not None
        held = 0.0 if published else self.validation
        for split in SPLITS:
            files = self.files.train if split == "train" or not published else self.files.validation or ()
            if split == "validation" and not published and held == 0:
                continue
            ranges = [r for number, file in enumerate(files) for r in _ranges(number, file, shard_bytes)]
            documents = None  # how many there are matters only if some are held out
            if held:
                ranges, documents = _numbered(files, ranges)
                self._check_enough(documents)
            share = held if split == "validation" else 1.0
            for chosen in grouped([max(1, round(r.size * share)) for r in ranges], shard_bytes):
                units.append(Unit(split, sum(r.size for r in ranges[chosen]), (tuple(ranges[chosen]), documents)))
        return units

    def _check_enough(self, documents: int) -> None:
        if _held_out(documents, self.validation) is None:
            message = f"--validation: {self.validation:g} of {documents} documents in {self.path} is less than one"
            raise InputError(message, field="--validation", found=self.validation, allowed="more, or 0")

    def samples(self, number: int, unit: Unit) -> Iterator[Sample]:
        published = self.files.validation is not None
        files = (self.files.validation or ()) if unit.split == "validation" and published else self.files.train
        ranges, documents = unit.what
        held_out = None if documents is None else _held_out(documents, self.validation)
        count = 0
        for of_range in ranges:
            file, document, before = files[of_range.file], of_range.first, 0
            for members, label, text, weight in self._rows(file, of_range):
                wanted = held_out is None or bool(held_out[document]) == (unit.split == "validation")
                document += 1
                before += weight
                if wanted:
                    yield Sample(f"{number:06d}-{count:07d}", members, label, text, before)
                    count, before = count + 1, 0

    def _rows(
        self, file: DataFile, of_range: Range
    ) -> Iterator[tuple[dict[str, Member], int | None, tuple[str, ...] | None, int]]:
        if file.kind == "text":
            pieces = tuple(piece.text for piece in read_pieces([file], self.text))
            yield {TEXT: _text_member("txt", pieces)}, None, pieces, of_range.size
            return
        for where, values, weight in _rows_of(file, of_range, self.columns):
            chosen = values
            if self.columns is not None:
                missing = [name for name in self.columns if name not in values]
                if missing:
                    message = f"no column {missing[0]!r}; found: {', '.join(values) or 'none'}"
                    raise broken(where, message, "name the columns of this data: --columns")
                chosen = {name: values[name] for name in self.columns}
            if self.text != TEXT and self.text not in chosen:
                message = f"no column {self.text!r}; found: {', '.join(chosen) or 'none'}"
                raise broken(where, message, "name the column that is the document: --text")
            yield *self._sample(where, chosen), weight

    def _sample(
        self, where: str, values: Mapping[str, Any]
    ) -> tuple[dict[str, Member], int | None, tuple[str, ...] | None]:
        members: dict[str, Member] = {}
        document: tuple[str, ...] | None = None
        for name, value in values.items():
            if name == self.text and isinstance(value, str):
                document = (value,)
                members[TEXT] = _text_member("txt" if len(values) == 1 else "text.txt", document)
                continue
            member = encoded(part_name(name), value, where)
            if member is not None:
                members[part_name(name)] = member
        if not members:
            raise broken(where, "nothing in this record can be packed: it is empty")
        return members, label_of(values), document


def _text_member(suffix: str, pieces: Sequence[str]) -> Member:
    # JSON may hold half of a surrogate pair, which has no bytes of its own.
    return Member(suffix, "".join(pieces).encode("utf-8", errors="replace"))


def _is_compressed(file: DataFile) -> bool:
    return file.path.suffix.lower() in COMPRESSED


def _ranges(number: int, file: DataFile, size: int) -> list[Range]:
    """Pieces of a file that can be read without what is before them."""
    length = file.path.stat().st_size
    if file.kind == "parquet":
        import pyarrow.parquet

        metadata = pyarrow.parquet.ParquetFile(file.path).metadata
        groups = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        return [Range(number, s.start, s.stop, sum(groups[s])) for s in grouped(groups, size)]
    if file.kind != "jsonl" or _is_compressed(file) or length <= size:
        return [Range(number, 0, None, length)]
    edges = [*range(0, length, size), length]
    return [Range(number, start, end, end - start) for start, end in pairwise(edges)]


_held_out = lru_cache(maxsize=1)(held_out_documents)  # of all units that a process reads, the same


def _numbered(files: Sequence[DataFile], ranges: Sequence[Range]) -> tuple[list[Range], int]:
    """The ranges with the numbers of their first documents, and how many documents there are."""
    numbered, first = [], 0
    for each in ranges:
        numbered.append(each._replace(first=first))
        first += _documents(files[each.file], each)
    return numbered, first


def _documents(file: DataFile, of_range: Range) -> int:
    if of_range.end is not None and file.kind == "jsonl":
        return sum(1 for _ in _lines(file, of_range))
    if of_range.end is not None and file.kind == "parquet":
        import pyarrow.parquet

        metadata = pyarrow.parquet.ParquetFile(file.path).metadata
        return sum(metadata.row_group(group).num_rows for group in range(of_range.start, of_range.end))
    return count_documents([file])


def _lines(file: DataFile, of_range: Range) -> Iterator[tuple[int, bytes]]:
    """The lines that begin in a range of bytes, with their places; empty ones are left out."""
    assert of_range.end is not None
    with file.path.open("rb") as stream:
        at = of_range.start
        if at:
            stream.seek(at - 1)
            at += len(stream.readline()) - 1  # of a line that begins before, the rest
        while at < of_range.end and (line := stream.readline()):
            if not line.isspace():
                yield at, line
            at += len(line)


def _rows_of(
    file: DataFile, of_range: Range, columns: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, Any], int]]:
    if of_range.end is None:
        weight = of_range.size
        for row in read_rows([file]):
            yield row.where, row.values, weight
            weight = 0
    elif file.kind == "parquet":
        yield from _parquet_rows(file, of_range, columns)
    else:
        for at, line in _lines(file, of_range):
            try:
                values = json.loads(line)
                problem = None if isinstance(values, dict) else f"found {type_name(values)}, allowed: a JSON object"
            except ValueError as error:
                problem = f"not valid JSON: {error}"
            if problem:
                with file.path.open("rb") as stream:
                    number = stream.read(at).count(b"\n") + 1
                raise broken(f"{file.path}, line {number}", problem)
            yield f"{file.path}, byte {at}", values, len(line)


def _parquet_rows(
    file: DataFile, of_range: Range, columns: Sequence[str] | None
) -> Iterator[tuple[str, dict[str, Any], int]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file.path, memory_map=True)
        known = table.schema_arrow.names
        chosen = None if columns is None else [name for name in columns if name in known]
        groups = list(range(of_range.start, of_range.end or 0))
        rows = sum(table.metadata.row_group(group).num_rows for group in groups)
        first = sum(table.metadata.row_group(group).num_rows for group in range(of_range.start))
        for batch in table.iter_batches(1024, row_groups=groups, columns=chosen):
            for values in batch.to_pylist():
                first += 1
                yield f"{file.path}, row {first}", values, of_range.size // max(rows, 1)
    except (OSError, pyarrow.ArrowException) as error:
        raise broken(str(file.path), f"not a readable parquet file: {error}") from None
