"""Storage: a folder's disk or network file system, read in one go, in random pieces, and as many small files.

What training reads is rarely one file from its beginning to its end. Where the ratio is bad, packing samples into
shards turns the small reads into large ones; where a node's own disk is faster, staging moves them there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gradus.bench.interleaved import Spread, interleaved
from gradus.bench.reading import (
    Read,
    drop,
    file_system,
    held_share,
    is_memory,
    read_files,
    read_pieces,
    read_through,
    written,
)
from gradus.bench.result import BenchResult, bench_environment
from gradus.record.chart import Bars
from gradus.record.format import bytes_text
from gradus.schema.errors import InputError

SEQUENTIAL, PIECES, FILES, WRITING = "sequential read", "random pieces", "many small files", "write and fsync"
_FILES_IN_A_FOLDER = 256
_LOW_RATIO = 0.5  # of the sequential rate: less, and shards are worth their while
_FASTER = 1.5  # times as fast is another disk worth a copy
_DROPPED = 0.05  # of a file at most is left in memory, or it does not count as dropped


@dataclass(frozen=True)
class Asked:
    file_mib: int = 256
    sample_kib: int = 100  # about a picture of ImageNet
    files: int = 512
    seconds: float = 5.0  # at most for each measurement of small reads
    rounds: int = 3


@dataclass(frozen=True)
class Row:
    path: str
    what: str
    megabytes_per_second: float
    spread: float | None
    samples_per_second: float | None  # of small reads
    against_sequential: float | None


@dataclass(frozen=True)
class Place:
    """What was measured of one folder."""

    path: str
    kind: str | None
    rates: dict[str, Spread]
    pieces: dict[str, float]  # in a second
    held: float | None  # the largest share of a file that was in memory after it was dropped

    @property
    def is_cold(self) -> bool:
        return self.held is not None and self.held <= _DROPPED

    def ratio(self, what: str) -> float:
        return self.rates[what].median / self.rates[SEQUENTIAL].median


def bench_storage(
    path: str, asked: Asked, against: str | None = None, say: Callable[[str], None] = lambda line: None
) -> BenchResult:
    """`against` is a second folder, such as the node's own disk, that data could be staged to."""
    folders = [path, *([against] if against is not None else [])]
    for folder, field in zip(folders, ("PATH", "--against"), strict=False):
        _check(Path(folder), asked, field)
    places = [_measured(folder, asked, say) for folder in folders]
    rows = [row for place in places for row in _rows(place)]
    first = places[0]
    summary: dict[str, Any] = {
        "file_system": first.kind or "unknown",
        "page_cache_dropped": first.is_cold,
        "files_against_sequential": first.ratio(FILES),
        "pieces_against_sequential": first.ratio(PIECES),
        "advice": advice(places),
    }
    bars = tuple((f"{row.what}, {row.path}", ((row.what, row.megabytes_per_second),)) for row in rows)
    return BenchResult(
        "storage",
        f"Storage at {path}",
        {**asdict(asked), "path": path, "against": against},
        [asdict(row) for row in rows],
        summary,
        (Bars("Rates", "MB/s", bars),),
        bench_environment(),
        notes=tuple(note for place in places for note in _notes(place)),
    )


def advice(places: Sequence[Place]) -> list[str]:
    """What to do about it: exact commands; an empty list where nothing is to be gained."""
    first, *others = places
    found = []
    if first.ratio(FILES) < _LOW_RATIO:
        found.append(
            f"small files are read at {first.ratio(FILES):.0%} of the sequential rate: pack them into shards with "
            f"`gradus data pack {first.path} packed`, and train with `data: {{use: shards, path: packed}}`"
        )
    for other in others:
        times = other.rates[SEQUENTIAL].median / first.rates[SEQUENTIAL].median
        if times >= _FASTER:
            found.append(
                f"{other.path} is {times:.1f} times as fast: stage shards there with "
                f"`gradus data stage packed --to {other.path}`, or in a recipe `data: {{stage: {other.path}}}`"
            )
    return found


def _check(path: Path, asked: Asked, field: str) -> None:
    if not path.is_dir():
        raise InputError(
            f"{field}: found {path}, which is {'no folder' if path.exists() else 'not there'}",
            field=field,
            found=str(path),
            allowed="a folder that can be written to",
        )
    needed = (asked.file_mib << 20) + asked.files * (asked.sample_kib << 10)
    free = shutil.disk_usage(path).free
    if free < 1.2 * needed:
        raise InputError(
            f"{field}: {path} has {bytes_text(free)} free, and the test files take {bytes_text(needed)}",
            hint="--file-mib and --files make them smaller",
            field=field,
            found=free,
            allowed=needed,
        )
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"{field}: {path} cannot be written to: {error.strerror}", field=field, found=str(path)
        ) from None


def _measured(path: str, asked: Asked, say: Callable[[str], None]) -> Place:
    piece = asked.sample_kib << 10
    with tempfile.TemporaryDirectory(prefix=".gradus-bench-", dir=path) as made:
        folder = Path(made)
        large = folder / "large"
        say(f"{path}: writing {asked.file_mib} MiB and {asked.files} files of {asked.sample_kib} KiB")
        writes = [written(large, asked.file_mib << 20) for _ in range(asked.rounds)]
        files = _small_files(folder, asked.files, piece)
        held: list[float | None] = []
        pieces: dict[str, list[float]] = {SEQUENTIAL: [], PIECES: [], FILES: []}

        def cold(what: str, paths: Sequence[Path], read: Callable[[], Read]) -> float:
            drop(paths)
            held.append(held_share(paths[0]))
            found = read()
            pieces[what].append(found.pieces_per_second)
            return found.megabytes_per_second

        seeds = iter(range(10**6))
        variants = {
            SEQUENTIAL: partial(cold, SEQUENTIAL, [large], lambda: read_through(large)),
            PIECES: partial(
                cold, PIECES, [large], lambda: read_pieces(large, piece, asked.files, asked.seconds, next(seeds))
            ),
            FILES: partial(cold, FILES, files, lambda: read_files(files, asked.seconds, next(seeds))),
        }
        say(f"{path}: reading")
        rates = interleaved(variants, asked.rounds)
    rates = {WRITING: Spread(tuple(one.megabytes_per_second for one in writes)), **rates}
    known = [share for share in held if share is not None]
    return Place(
        path,
        file_system(Path(path)),
        rates,
        {what: Spread(tuple(found)).median for what, found in pieces.items()},
        max(known) if len(known) == len(held) else None,
    )


def _small_files(folder: Path, count: int, size: int) -> list[Path]:
    paths = []
    for number in range(count):
        below = folder / f"{number // _FILES_IN_A_FOLDER}"
        below.mkdir(exist_ok=True)
        paths.append(below / f"{number}.bin")
        written(paths[-1], size)
    return paths


def _rows(place: Place) -> list[Row]:
    return [
        Row(
            place.path,
            what,
            spread.median,
            spread.relative,
            place.pieces[what] if what in (PIECES, FILES) else None,
            place.ratio(what) if what in (PIECES, FILES) else None,
        )
        for what, spread in place.rates.items()
    ]


def _notes(place: Place) -> list[str]:
    notes = []
    if is_memory(place.kind):
        notes.append(f"{place.path} is on {place.kind}, which is memory: there is no disk to measure.")
    elif place.held is None:
        notes.append(f"{place.path}: the system does not say what it holds in memory; reads may be from there.")
    elif not place.is_cold:
        notes.append(
            f"{place.path}: the page cache could not be dropped ({place.held:.0%} of a file stayed in memory): "
            "reads are faster than the disk."
        )
    if not is_memory(place.kind):
        notes.append(f"{place.path}: names of files stay in memory, and a server may hold files in its own.")
    return notes
