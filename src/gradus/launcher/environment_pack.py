"""Packing: a Python environment as one archive, which each node of a job unpacks to its own disk before Python starts.

Thousands of processes that each open a thousand small files keep a shared file system busy for minutes; one archive for
each node is one long read. The archive's name has a digest of names, sizes and times of its files: it is made once,
found again by the next job, and made anew when something was installed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gradus.launcher.software import Interpreter, guarded, interpreter_of
from gradus.record.format import bytes_text
from gradus.schema.cluster import Storage
from gradus.schema.errors import GradusError, InputError
from gradus.schema.software import Environment

_UNPACK = Path(__file__).with_name("unpack_environment.sh")
# Of the interpreter that a virtual environment is built on: what no job imports.
_NO_USE = r"share|lib/python3\.\d+/(test|idlelib|turtledemo|ensurepip|config-.*)|.*\.a"
_USELESS = re.compile(_NO_USE)
_USELESS_AND_PACKAGES = re.compile(rf"{_NO_USE}|lib/python3\.\d+/site-packages")
_EDITABLE_GRADUS = re.compile(r"/__editable__[^/]*gradus[^/]*$")
_SYSTEM_PREFIXES = ("/usr", "/usr/local", "/")


@dataclass(frozen=True)
class Entry:
    """A file or link of the archive."""

    name: str
    source: str
    link: str | None = None  # where it leads, if the archive's says other than the disk's


@dataclass(frozen=True)
class Packed:
    """An environment's archive, and how a job uses it."""

    archive: Path
    prefix: str  # where the environment was
    conda: bool
    local: str | None
    notes: tuple[str, ...] = ()

    @property
    def python(self) -> str:
        """The interpreter, as a word of the shell that has run the lines."""
        return '"$gradus_environment/env/bin/python"'

    @property
    def lines(self) -> list[str]:
        """Lines of bash that unpack it on every node of a job, and make it this shell's environment."""
        local = shlex.quote(self.local) if self.local else '"${SLURM_TMPDIR:-${TMPDIR:-/tmp}}"'
        name = self.archive.name.partition(".")[0]
        words = f'bash {shlex.quote(str(self.script))} {shlex.quote(str(self.archive))} "$gradus_environment"'
        lines = [
            f"gradus_environment={local}/gradus-$(id -u)/{name}",
            "gradus_on_each_node=(env); "
            '[ -z "${SLURM_JOB_NUM_NODES:-}" ] || gradus_on_each_node=(srun --nodes="$SLURM_JOB_NUM_NODES" '
            '--ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)',
            f'"${{gradus_on_each_node[@]}}" {words} {shlex.quote(self.prefix)} '
            "|| gradus_fail environment.pack: see above",
        ]
        if self.conda:
            lines += [
                'export CONDA_PREFIX="$gradus_environment/env"',
                'for gradus_file in "$CONDA_PREFIX"/etc/conda/activate.d/*.sh; do '
                'if [ -r "$gradus_file" ]; then . "$gradus_file"; fi; done',
            ]
        else:
            lines.append('export VIRTUAL_ENV="$gradus_environment/env"')
        lines.append(
            '[ ! -d "$gradus_environment/library" ] || '
            'export LD_LIBRARY_PATH="$gradus_environment/library${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"'
        )
        return guarded([*lines, 'export PATH="$gradus_environment/env/bin:$PATH"; unset PYTHONHOME'])

    @property
    def script(self) -> Path:
        return self.archive.with_name(f"unpack-{_digest_of_script()}.sh")


def packed(environment: Environment, storage: Storage, place: Path, dry_run: bool = False) -> Packed | None:
    """The environment's archive, made now in `place` (which all nodes see) unless it is there; None without `pack`."""
    if not environment.pack:
        return None
    found = interpreter_of(environment)
    if found is None or found.prefix in _SYSTEM_PREFIXES:
        raise InputError(
            "environment.pack: nothing to pack: it needs a venv or a conda environment that is on this machine",
            hint="name one in environment.venv or environment.conda",
            field="environment.pack",
            found=found.prefix if found else environment.conda,
        )
    entries, digest = _listed(found, os.stat(found.packages).st_mtime_ns)
    compressed = environment.pack is True and shutil.which("zstd") is not None
    name = f"environment-{digest}.tar{'.zst' if compressed else ''}"
    result = Packed(
        Path(os.path.abspath(place)) / name,
        found.prefix,
        conda=not os.path.exists(f"{found.prefix}/pyvenv.cfg"),
        local=storage.local,
        notes=tuple(_notes(found)),
    )
    if not dry_run:
        _make(result, entries)
    return result


@functools.cache
def _listed(found: Interpreter, installed_at: int) -> tuple[tuple[Entry, ...], str]:
    """Once for a script that names the archive and for the archive itself, even if a file is written in between."""
    entries = tuple(entries_of(found))
    return entries, _digest(entries)


def entries_of(found: Interpreter) -> Iterator[Entry]:
    """What goes into the archive: the environment, the interpreter below it, and a gradus that is not in it."""
    prefix, base = found.prefix, found.base_prefix
    base_comes_along = base != prefix and base not in _SYSTEM_PREFIXES
    outside = found.gradus if found.gradus and not Path(found.gradus).is_relative_to(prefix) else None
    for name, source in _files(prefix):
        if outside and _EDITABLE_GRADUS.search(name):
            continue  # leads to a folder that a copy stands in for
        yield Entry(f"env/{name}", source, _moved(source, name, prefix, base if base_comes_along else None))
    if outside:
        packages = os.path.relpath(found.packages, prefix)
        for name, source in _files(outside):
            yield Entry(f"env/{packages}/gradus/{name}", source)
    if base_comes_along:
        packages_too = "true" in _setting(prefix, "include-system-site-packages")
        for name, source in _files(base, _USELESS if packages_too else _USELESS_AND_PACKAGES):
            yield Entry(f"base/{name}", source, _moved(source, name, base, None))


def _files(folder: str, without: re.Pattern[str] | None = None, below: str = "") -> Iterator[tuple[str, str]]:
    """Names of files and links below a folder, and where they are."""
    with os.scandir(os.path.join(folder, below)) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        name = f"{below}{entry.name}"
        if without is not None and without.fullmatch(name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(folder, without, f"{name}/")
        elif entry.is_symlink() or entry.is_file():
            yield name, entry.path


def _moved(source: str, name: str, prefix: str, base: str | None) -> str | None:
    """Where a link leads in the archive, if it leads to a place that moves along."""
    if not os.path.islink(source) or not os.path.isabs(target := os.readlink(source)):
        return None
    up = "../" * name.count("/")
    if Path(target).is_relative_to(prefix):
        return f"{up}{os.path.relpath(target, prefix)}"
    if base is None:
        return None
    # A virtual environment names its interpreter by any of the links to it.
    real, real_base = os.path.realpath(target), os.path.realpath(base)
    return f"{up}../base/{os.path.relpath(real, real_base)}" if Path(real).is_relative_to(real_base) else None


def _setting(prefix: str, key: str) -> str:
    with contextlib.suppress(OSError):
        for line in Path(prefix, "pyvenv.cfg").read_text().splitlines():
            if line.partition("=")[0].strip() == key:
                return line.partition("=")[2].strip()
    return ""


def _notes(found: Interpreter) -> Iterator[str]:
    """What is used from where it is: packages that are installed as links to their sources."""
    outside = [
        folder
        for folder in found.path
        if not Path(folder).is_relative_to(found.prefix)
        and not Path(folder).is_relative_to(found.base_prefix)
        and os.path.isdir(folder)
        and not (found.gradus and Path(found.gradus).parent == Path(folder))
    ]
    if outside:
        yield f"environment.pack: not packed, and imported from where it is: {', '.join(outside)}"


def _digest(entries: Sequence[Entry]) -> str:
    digest = hashlib.sha256()
    for entry in entries:
        # Compiled modules come along, but whether a module was imported yet makes no other environment.
        if "/__pycache__/" in entry.name:
            continue
        status = os.lstat(entry.source)
        link = entry.link or (os.readlink(entry.source) if stat.S_ISLNK(status.st_mode) else "")
        digest.update(
            f"{entry.name}\0{status.st_size}\0{status.st_mtime_ns}\0{link}\n".encode(errors="surrogateescape")
        )
    return digest.hexdigest()[:16]


def _digest_of_script() -> str:
    return hashlib.sha256(_UNPACK.read_bytes()).hexdigest()[:16]


def _make(result: Packed, entries: Sequence[Entry]) -> None:
    place = result.archive.parent
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    _appear(result.script, lambda file: file.write(_UNPACK.read_bytes()))
    if result.archive.exists():
        return
    size = sum(os.lstat(entry.source).st_size for entry in entries)
    told = f"{len(entries):,} files, {bytes_text(size)}"
    print(f"note: packing the environment, once: {told} -> {result.archive}", file=sys.stderr)
    compressed = result.archive.suffix == ".zst"
    try:
        _appear(result.archive, lambda file: _compress(entries, file) if compressed else _write(entries, file))
    except OSError as error:
        raise GradusError(
            f"environment.pack: {result.archive} cannot be written: {error}", hint="give --runs a folder with more room"
        ) from None


def _appear(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """A file that is there whole or not at all, whoever else makes it at the same time."""
    if path.exists():
        return
    building = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with open(building, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(building, path)
    finally:
        building.unlink(missing_ok=True)


def _compress(entries: Sequence[Entry], file: IO[bytes]) -> None:
    with subprocess.Popen(["zstd", "-q", "-T0", "-c"], stdin=subprocess.PIPE, stdout=file) as zstd:
        assert zstd.stdin is not None
        _write(entries, zstd.stdin)
        zstd.stdin.close()
    if zstd.returncode:
        raise OSError(f"zstd left with exit code {zstd.returncode}")


def _write(entries: Sequence[Entry], file: IO[bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT) as archive:
        for entry in entries:
            header = archive.gettarinfo(entry.source, arcname=entry.name)
            if entry.link is not None:
                header.linkname = entry.link
            if header.islnk():  # the same file under two names: the other one may not be in the archive
                header.type, header.linkname, header.size = tarfile.REGTYPE, "", os.stat(entry.source).st_size
            if header.isreg():
                with open(entry.source, "rb") as content:
                    archive.addfile(header, content)
            else:
                archive.addfile(header)
