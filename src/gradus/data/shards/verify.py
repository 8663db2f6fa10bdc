"""Verify: every byte of a packed dataset against its index, and the name of everything that is damaged."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import xxhash

from gradus.data.shards.columns import file_digest
from gradus.data.shards.crew import Tell, by_crew, cores
from gradus.data.shards.index import MISSING
from gradus.data.shards.packing import Report
from gradus.data.shards.reading import Shards
from gradus.data.shards.tar import BLOCK, END, header
from gradus.schema.errors import GradusError

READ_AHEAD_BYTES = 2**22
SHOWN_AT_MOST = 1000  # pieces of damage in one shard; a file full of zeros would name every sample of it


@dataclass(frozen=True)
class Damage:
    shard: str
    what: str
    sample: str | None = None
    number: int | None = None
    part: str | None = None

    def __str__(self) -> str:
        where = f", sample {self.sample!r} (number {self.number})" if self.sample is not None else ""
        return f"{self.shard}{where}{f', part {self.part!r}' if self.part else ''}: {self.what}"

    def document(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Verified:
    samples: int
    bytes: int
    damage: tuple[Damage, ...]


def verify(path: str, workers: int | None = None, report: Report = lambda done, total: None) -> Verified:
    """Read everything. Damage is a finding, not an error, unless the index itself has it: then nothing can be said."""
    shards = Shards(path)
    description = shards.description
    if not shards.storage.remote and file_digest(shards.index.file).xxh3_64 != description.index.xxh3_64:
        raise GradusError(f"{shards.index.file} is not as it was written", hint="copy it again, or pack the data again")
    total, done = sum(shard.bytes for shard in description.shards), 0

    def told(amount: int) -> None:
        nonlocal done
        done += amount
        report(min(done, total), total)

    numbers = range(len(description.shards))
    found: dict[int, list[Damage]] = {}
    for number, damage in by_crew(partial(_verify_shard, shards), numbers, workers or cores(), told):
        found[number] = damage
    return Verified(description.length, total, tuple(each for number in sorted(found) for each in found[number]))


class _Ahead:
    """A file read from its beginning to its end, in pieces that are worth a request."""

    def __init__(self, shards: Shards, file: str, size: int) -> None:
        self._storage, self._file, self._size = shards.storage, file, size
        self._at, self._buffer = 0, b""

    def read(self, start: int, end: int) -> bytes:
        if not self._at <= start <= end <= self._at + len(self._buffer):
            length = max(end - start, min(READ_AHEAD_BYTES, self._size - start))
            self._at, self._buffer = start, self._storage.open_range(self._file, start, length)
        return self._buffer[start - self._at : end - self._at]


def _verify_shard(shards: Shards, shard: int, tell: Tell) -> list[Damage]:
    about = shards.description.shards[shard]
    damage: list[Damage] = []
    try:
        size = shards.storage.size(about.file)
    except GradusError as error:
        tell(about.bytes)
        return [Damage(about.file, f"cannot be read: {error.message}")]
    if size != about.bytes:
        damage.append(Damage(about.file, f"it has {size} bytes, packed were {about.bytes}"))
    index, parts = shards.index, shards.description.parts
    digest, ahead = xxhash.xxh3_64(), _Ahead(shards, about.file, size)
    first, stop = index.samples_of(shard)
    at = 0  # everything before was read
    for number in range(first, stop):
        key = index.key(number)
        members = sorted(
            (int(index.offsets[number, p]), int(index.lengths[number, p]), p)
            for p in range(len(parts))
            if index.offsets[number, p] != MISSING
        )
        for offset, length, part in members:
            end = offset + length + -length % BLOCK
            damaged = partial(Damage, about.file, sample=key, number=number, part=parts[part].name)
            try:
                data = ahead.read(at, end)
            except GradusError:
                damage.append(damaged("its bytes are missing"))
                at = end
                continue
            digest.update(data)
            tell(end - at)
            head = header(f"{key}.{shards.suffix(number, part)}", length)
            content = data[offset - at : offset - at + length]
            if xxhash.xxh3_64_intdigest(content) != int(index.checksums[number, part]):
                damage.append(damaged("its bytes are not those that were packed"))
            elif data[: offset - at] != head or any(data[offset - at + length :]):
                damage.append(damaged("its header or the padding is not as it was written"))
            at = end
        if len(damage) >= SHOWN_AT_MOST:
            damage.append(Damage(about.file, "and more, which is not listed"))
            return damage
    if not damage:
        rest = shards.storage.open_range(about.file, at, size - at)
        digest.update(rest)
        if rest != END or digest.hexdigest() != about.xxh3_64:
            damage.append(Damage(about.file, "its end is not as it was written"))
    return damage
