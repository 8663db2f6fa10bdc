"""Records and texts in the order in which they lie in their files. What is broken is named with its file and line."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, NamedTuple

from gradus.data.files import DataFile
from gradus.schema.errors import InputError, nearest

PIECE_BYTES = 2**20  # a longer text is read in pieces of about this size, cut after a line
ROWS_AT_ONCE = 1024


class Row(NamedTuple):
    where: str  # `corpus.jsonl, line 17`
    values: dict[str, Any]


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    ends: bool  # whether the document ends here


def count_documents(files: Sequence[DataFile]) -> int:
    """How many documents there are, without understanding them."""
    return sum(_count(file) for file in files)


def read_pieces(files: Sequence[DataFile], field: str) -> Iterator[Piece]:
    """All documents: a plain file is one, of records it is the text in `field`."""
    for file in files:
        if file.kind == "text":
            yield from _text_pieces(file)
            continue
        for where, values in read_rows([file], field):
            text = values[field]
            if not isinstance(text, str):
                raise broken(where, f"{field!r} is {type_name(text)}, allowed: text")
            yield Piece(text, True)


def read_rows(files: Sequence[DataFile], only: str | None = None) -> Iterator[Row]:
    """All records, or of each only one key, which then must be there."""
    for file in files:
        if file.kind == "text":
            message = f"{file.path} is plain text, not records"
            raise InputError(f"data.path: {message}", field="data.path", found=str(file.path), allowed="JSONL, Parquet")
        for row in _json_rows(file) if file.kind == "jsonl" else _table_rows(file, only):
            if only is not None and only not in row.values:
                raise missing_key(row.where, only, list(row.values))
            yield row


def missing_key(where: str, key: str, found: Sequence[str]) -> InputError:
    close = nearest(key, found)
    message = f"data.path: {where}: no key {key!r}" + (f"; did you mean {close!r}?" if close else ".")
    return InputError(
        f"{message} Found: {', '.join(found) or 'none'}",
        hint="name it: data.field, or data.fields of a chat source",
        field="data.path",
        found=list(found),
        allowed=key,
        nearest=close,
    )


def _count(file: DataFile) -> int:
    if file.kind == "text":
        return 1
    if file.kind == "parquet":
        with _understood(file):
            return int(_parquet(file).metadata.num_rows)
    if file.kind == "arrow":
        with _understood(file):
            return sum(batch.num_rows for batch in _arrow_batches(file))
    with _opened(file) as stream:
        return sum(1 for line in stream if not line.isspace())


def _json_rows(file: DataFile) -> Iterator[Row]:
    with _opened(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.isspace():
                continue
            where = f"{file.path}, line {number}"
            try:
                values = json.loads(line)
            except ValueError as error:
                one_document = number == 1 and line.strip() in (b"[", b"{")
                hint = "the file is one JSON document; make it lines with: jq -c '.[]' FILE" if one_document else None
                raise broken(where, f"not valid JSON: {error}", hint) from None
            if not isinstance(values, dict):
                raise broken(where, f"found {type_name(values)}, allowed: one JSON object in each line")
            yield Row(where, values)


def _table_rows(file: DataFile, only: str | None) -> Iterator[Row]:
    number = 0
    with _understood(file):
        if file.kind == "parquet":
            table = _parquet(file)
            known = table.schema_arrow.names
            if only is not None and only not in known:
                raise missing_key(str(file.path), only, known)
            batches = table.iter_batches(ROWS_AT_ONCE, columns=None if only is None else [only])
        else:
            batches = _arrow_batches(file)
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                for values in batch.slice(start, ROWS_AT_ONCE).to_pylist():
                    number += 1
                    yield Row(f"{file.path}, row {number}", values)


def _text_pieces(file: DataFile) -> Iterator[Piece]:
    """The file in pieces, one ahead, because the last one is marked."""
    line, ahead = 1, ""
    with _opened(file) as stream:
        while lines := stream.readlines(PIECE_BYTES):
            if ahead:
                yield Piece(ahead, False)
            try:
                ahead = b"".join(lines).decode("utf-8-sig" if line == 1 else "utf-8")
            except UnicodeDecodeError:
                raise _not_utf8(file, line, lines) from None
            line += len(lines)
    yield Piece(ahead, True)


def _not_utf8(file: DataFile, first: int, lines: list[bytes]) -> InputError:
    for number, line in enumerate(lines, first):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            where = f"{file.path}, line {number}"
            return broken(where, f"not UTF-8: {error.reason}", "convert it: iconv -f LATIN1 -t UTF-8")
    raise AssertionError(f"{file.path}: the lines are text, together they are not")


@contextmanager
def _opened(file: DataFile) -> Iterator[IO[bytes]]:
    """The bytes of a file, unzipped."""
    suffix = file.path.suffix.lower()
    try:
        if suffix == ".gz":
            with gzip.open(file.path, "rb") as stream:
                yield stream  # type: ignore[misc]
        elif suffix == ".zst":
            zstandard = needed_package("zstandard", f"{file.path} is compressed with Zstandard")
            with zstandard.open(file.path, "rb") as reader, io.BufferedReader(reader) as stream:
                yield stream
        else:
            with file.path.open("rb") as stream:
                yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise broken(str(file.path), f"cannot be read: {error}") from None
    except Exception as error:
        if type(error).__name__ == "ZstdError":
            raise broken(str(file.path), f"cannot be unpacked: {error}") from None
        raise


@contextmanager
def _understood(file: DataFile) -> Iterator[None]:
    arrow = needed_package("pyarrow", f"{file.path} is {file.kind}")
    try:
        yield
    except (OSError, arrow.ArrowException) as error:
        raise broken(str(file.path), f"not a readable {file.kind} file: {error}") from None


def _parquet(file: DataFile) -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(file.path, memory_map=True)


def _arrow_batches(file: DataFile) -> Iterator[Any]:
    """Hugging Face writes Arrow's stream format; other programs its file format, which begins with its name."""
    import pyarrow

    with pyarrow.memory_map(str(file.path)) as mapped:
        if file.path.open("rb").read(6) == b"ARROW1":
            reader = pyarrow.ipc.open_file(mapped)
            yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            yield from pyarrow.ipc.open_stream(mapped)


def needed_package(name: str, why: str) -> Any:
    """An optional package, or an error that says how to get it."""
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        message = f"data: {why}, which needs the package {name}; it is not installed"
        raise InputError(message, hint='pip install "gradus[text]"', field="data", allowed=name) from None


def broken(where: str, problem: str, hint: str | None = None) -> InputError:
    return InputError(f"data.path: {where}: {problem}", hint=hint, field="data.path", found=where)


def type_name(value: Any) -> str:
    names = {str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
