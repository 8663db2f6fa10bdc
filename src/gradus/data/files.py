"""Which files a `data.path` means, of which kind each is, and which of them are for validation."""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradus.schema.errors import InputError

Kind = Literal["jsonl", "text", "parquet", "arrow"]

KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".md": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
COMPRESSED = (".gz", ".zst")
# Beside the data in most folders, and not part of it.
NOT_DATA = re.compile(r"^([._]|readme|license|dataset_info\.json$|state\.json$|dataset_dict\.json$)", re.IGNORECASE)
# A file or folder of this name, alone or before a digit or a sign: train.jsonl, train-00000-of-00004.parquet.
SPLIT_NAME = re.compile(r"^(train|validation|valid|val|dev|test)(?![A-Za-z])", re.IGNORECASE)
# The first of these that is there is used for validation: a test set only where there is nothing else.
VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")


@dataclass(frozen=True)
class DataFile:
    path: Path
    kind: Kind

    def identity(self) -> list[Any]:
        """What changes when the content does, at the price of a look at the folder."""
        found = self.path.stat()
        return [str(self.path.resolve()), self.kind, found.st_size, found.st_mtime_ns]


@dataclass(frozen=True)
class DataFiles:
    """The files in a fixed order. `validation` is None where a part of `train` has to be held out."""

    train: tuple[DataFile, ...]
    validation: tuple[DataFile, ...] | None

    def identity(self) -> list[Any]:
        return [[file.identity() for file in files or ()] for files in (self.train, self.validation)]


def find_files(path: str, pattern: str | None = None) -> DataFiles:
    """The files of a path that names a file, a folder or a wildcard; a `pattern` chooses among those of a folder."""
    root = Path(path)
    if root.is_dir():
        if pattern is None and (saved := _saved_dataset(root)) is not None:
            return saved
        found = root.glob(pattern) if pattern and "/" in pattern else root.rglob(pattern or "*")
        names = sorted(file.relative_to(root) for file in found if file.is_file())
        chosen = [(name, root / name) for name in names if pattern or _is_data(name)]
        if not chosen:
            allowed = f"files that match {pattern!r}" if pattern else f"files that end in {', '.join(KINDS)}"
            hint = None if pattern else 'for other names: data.pattern, for example "*.rst"'
            key = "pattern" if pattern else "path"
            raise refused(key, pattern or path, f"{root} has no {allowed}", allowed, hint)
        return _by_split(chosen, path)
    if root.is_file():
        return DataFiles((_data_file(root),), None)
    matches = sorted(Path(match) for match in glob.glob(path, recursive=True))
    files = [file for file in matches if file.is_file()]
    if not files:
        problem = "matches no file" if glob.has_magic(path) else "does not exist"
        raise refused("path", path, f"{root.absolute()} {problem}", "a file, a folder, or a wildcard such as *.jsonl")
    return _by_split([(Path(file.name), file) for file in files], path)


def refused(key: str, found: str, message: str, allowed: str, hint: str | None = None) -> InputError:
    return InputError(f"data.{key}: {message}", hint=hint, field=f"data.{key}", found=found, allowed=allowed)


def without_compression(path: Path) -> Path:
    return path.with_suffix("") if path.suffix.lower() in COMPRESSED else path


def _is_data(name: Path) -> bool:
    hidden = any(part.startswith(".") for part in name.parts)
    return not hidden and not NOT_DATA.match(name.name) and without_compression(name).suffix.lower() in KINDS


def _data_file(path: Path) -> DataFile:
    """A file that is named is text, whatever its ending says, unless it says something that is known."""
    return DataFile(path, KINDS.get(without_compression(path).suffix.lower(), "text"))


def _by_split(named: Sequence[tuple[Path, Path]], path: str) -> DataFiles:
    """Files whose names say so are the training and the validation set; otherwise all are for training."""
    files = [(_split_of(name), _data_file(file)) for name, file in named]
    _check_one_kind((file for _, file in files), path)
    present = {split for split, _ in files}
    published = next((name for name in VALIDATION_NAMES if name in present), None)
    if "train" not in present or published is None:
        return DataFiles(tuple(file for _, file in files), None)
    strays = [file.path.name for split, file in files if split is None]
    if strays:
        message = f"{path} has files for train and {published}, and others that say neither: {', '.join(strays[:5])}"
        hint = 'choose with data.pattern, for example "train*"'
        raise refused("path", path, message, "names that begin with train, validation or test", hint)
    chosen = {split: tuple(file for of, file in files if of == split) for split in ("train", published)}
    return DataFiles(chosen["train"], chosen[published])


def _split_of(name: Path) -> str | None:
    matches = (SPLIT_NAME.match(part) for part in name.parts)
    return next((match.group(1).lower() for match in matches if match), None)


def _check_one_kind(files: Iterable[DataFile], path: str) -> None:
    kinds = {file.kind: file.path.name for file in files}
    if len(kinds) > 1:
        found = " and ".join(f"{kind} ({name})" for kind, name in sorted(kinds.items()))
        hint = 'choose with data.pattern, for example "*.jsonl"'
        raise refused("path", path, f"{path} has files of several kinds: {found}", "files of one kind", hint)


def _saved_dataset(root: Path) -> DataFiles | None:
    """What Hugging Face's `save_to_disk` wrote: one dataset, or several with the names of their splits."""
    if (root / "dataset_dict.json").is_file():
        splits = _json(root / "dataset_dict.json").get("splits", [])
        published = next((name for name in VALIDATION_NAMES if name in splits), None)
        if "train" not in splits:
            raise refused("path", str(root), f"{root} has the splits {', '.join(splits) or 'none'}", "a split `train`")
        return DataFiles(_arrow_files(root / "train"), _arrow_files(root / published) if published else None)
    if (root / "state.json").is_file():
        return DataFiles(_arrow_files(root), None)
    return None


def _arrow_files(folder: Path) -> tuple[DataFile, ...]:
    listed = _json(folder / "state.json").get("_data_files", [])
    files = tuple(DataFile(folder / entry["filename"], "arrow") for entry in listed)
    missing = [file.path.name for file in files if not file.path.is_file()]
    if missing or not files:
        message = f"{folder}/state.json lists {', '.join(missing) or 'no file'}, which is not there"
        raise refused("path", str(folder), message, "a folder that save_to_disk wrote")
    return files


def _json(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        assert isinstance(document, dict)
    except (OSError, ValueError, AssertionError) as error:
        raise refused("path", str(file), f"{file} cannot be read: {error}", "a JSON object") from None
    return document
