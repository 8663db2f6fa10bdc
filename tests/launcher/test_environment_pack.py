"""Packing: an environment that runs from a node's own disk, with nothing left of where it was made."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from gradus.launcher import environment_pack
from gradus.launcher.environment_pack import Packed, entries_of, packed
from gradus.launcher.job_software import job_software
from gradus.launcher.software import Interpreter, interpreter
from gradus.schema.cluster import Cluster, Storage
from gradus.schema.errors import InputError
from gradus.schema.software import Environment

PACKAGES = f"lib/python3.{sys.version_info.minor}/site-packages"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """A small environment with a package, a program, a link to sources elsewhere, and gradus as developers have it."""
    folder = tmp_path / "home" / "my venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / PACKAGES
    (packages / "small").mkdir()
    (packages / "small" / "__init__.py").write_text("answer = 42\n")
    source = Path(environment_pack.__file__).parents[2]
    (packages / "__editable__.gradus-0.1.0.pth").write_text(f"{source}\n")
    program = folder / "bin" / "program"
    program.write_text(f"#!{folder}/bin/python\nimport small, sys; print(small.answer, sys.prefix)\n")
    program.chmod(0o755)
    return folder


def run(made: Packed, local: Path, then: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The lines of a job's script, outside of a job: unpacked on this machine only."""
    lines = replace(made, local=str(local)).lines
    script = "\n".join(["set -u", *lines, then])
    clean = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **variables}
    return subprocess.run(["bash", "-c", script], env=clean, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_packed_environment_runs_with_its_original_gone(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_pack, "_USELESS_AND_PACKAGES", _NOT_NEEDED_HERE)
    made = packed(Environment(venv=str(venv), pack=True), Storage(), tmp_path / "place")
    assert made is not None
    venv.rename(venv.with_name("gone"))
    (tmp_path / "ask.py").write_text(
        "import gradus, json, small, sys\n"
        "loaded = {line.split()[-1] for line in open('/proc/self/maps') if '/' in line}\n"
        "print(json.dumps([sys.prefix, sys.base_prefix, small.__file__, gradus.__file__, sorted(loaded)]))\n"
    )
    then = f"{made.python} '{tmp_path}/ask.py'; program; command -v python"
    done = run(made, tmp_path / "node-disk", then)
    assert done.returncode == 0, done.stderr
    found, program, python = done.stdout.splitlines()
    [unpacked] = (tmp_path / "node-disk").glob("gradus-*/environment-*[!k]")
    inside = f"{unpacked}/env/{PACKAGES}"
    *where, loaded = json.loads(found)
    expected = [f"{unpacked}/env", f"{unpacked}/base", f"{inside}/small/__init__.py", f"{inside}/gradus/__init__.py"]
    assert where == expected
    assert not [library for library in loaded if library.startswith(sys.base_prefix)]
    assert program == f"42 {unpacked}/env"
    assert python == f"{unpacked}/env/bin/python"

    # The next job on this node finds it there, and does not even need the archive.
    made.archive.unlink()
    assert run(made, tmp_path / "node-disk", f"{made.python} -c 'print(1)'").stdout == "1\n"


def test_the_archive_is_made_once_and_anew_after_an_installation(venv: Path, tmp_path: Path):
    found = replace(interpreter(f"{venv}/bin/python"), base_prefix=str(venv))  # without the interpreter: quicker

    def name() -> str:
        return environment_pack._digest(list(entries_of(found)))

    before = name()
    cache = venv / PACKAGES / "small" / "__pycache__"
    cache.mkdir()
    (cache / "x.pyc").touch()
    assert name() == before  # that a module was imported changes nothing
    (venv / PACKAGES / "other.py").write_text("")
    assert name() != before


def test_a_dry_run_names_the_archive_and_makes_nothing(venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment_pack, "_USELESS_AND_PACKAGES", _NOT_NEEDED_HERE)
    cluster = Cluster(name="here", cpu_cores=2, memory_gib=4, environment=Environment(venv=str(venv), pack=True))
    software = job_software(cluster, 1, tmp_path / "runs", dry_run=True)
    assert software.python == '"$gradus_environment/env/bin/python"'
    assert any("environment-" in line and "srun" not in line for line in software.lines)
    assert not (tmp_path / "runs").exists()


def test_nodes_that_unpack_at_the_same_moment_do_not_disturb_each_other(tmp_path: Path):
    archive = small_archive(tmp_path)
    made = Packed(archive, "/old", conda=True, local=None)
    made.script.write_bytes(environment_pack._UNPACK.read_bytes())
    command = ["bash", str(made.script), str(archive), str(tmp_path / "disk" / "environment-1"), "/old"]
    racing = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(6)]
    assert [process.communicate()[1] or process.returncode for process in racing] == [0] * 6
    assert sorted(p.name for p in (tmp_path / "disk").iterdir()) == ["environment-1", "environment-1.lock"]


def test_what_was_not_used_for_a_day_goes_and_the_rest_stays(tmp_path: Path):
    archive = small_archive(tmp_path)
    disk = tmp_path / "disk"
    for name, hours in (("old", 25), ("new", 23)):
        folder = disk / f"environment-{name}"
        folder.mkdir(parents=True)
        (folder / ".used").touch()
        then = (folder / ".used").stat().st_mtime - hours * 3600
        os.utime(folder / ".used", (then, then))
    unpack = str(environment_pack._UNPACK)
    subprocess.run(["bash", unpack, str(archive), str(disk / "environment-1"), "/old"], check=True)
    assert {p.name for p in disk.iterdir()} == {"environment-1", "environment-1.lock", "environment-new"}


def test_a_damaged_archive_ends_the_job_and_leaves_nothing_that_looks_whole(tmp_path: Path):
    archive = small_archive(tmp_path)
    archive.write_bytes(archive.read_bytes()[:700])
    unpack = str(environment_pack._UNPACK)
    target = tmp_path / "disk" / "environment-1"
    done = subprocess.run(["bash", unpack, str(archive), str(target), "/old"], capture_output=True, text=True)
    assert done.returncode == 93
    assert "the environment cannot be unpacked" in done.stderr
    assert not target.exists()


def test_a_packed_conda_environment_is_activated_as_conda_would(tmp_path: Path):
    (tmp_path / "env" / "etc" / "conda" / "activate.d").mkdir(parents=True)
    (tmp_path / "env" / "etc" / "conda" / "activate.d" / "tool.sh").write_text('export OF_TOOL="$CONDA_PREFIX$UNSET"\n')
    archive = small_archive(tmp_path)
    made = Packed(archive, "/old", conda=True, local=None)
    made.script.write_bytes(environment_pack._UNPACK.read_bytes())
    done = run(made, tmp_path / "disk", 'echo "$OF_TOOL"; head -n 1 "$(command -v tool)"; echo $-')
    [unpacked] = (tmp_path / "disk").glob("gradus-*/environment-1")
    folder, first_line, options = done.stdout.splitlines()
    assert folder == f"{unpacked}/env", done.stderr
    assert first_line == f"#!{unpacked}/env/bin/python"
    assert "u" in options


def test_an_environment_of_the_system_is_not_packed(monkeypatch: pytest.MonkeyPatch):
    system = Interpreter("/usr/bin/python3", "3.11.2", "/usr", "/usr", (), "/usr/lib", None, None)
    monkeypatch.setattr(environment_pack, "interpreter_of", lambda environment: system)
    with pytest.raises(InputError, match="nothing to pack"):
        packed(Environment(pack=True), Storage(), Path("/nonexistent"))


def small_archive(folder: Path) -> Path:
    (folder / "env" / "bin").mkdir(parents=True)
    tool = folder / "env" / "bin" / "tool"
    tool.write_text("#!/old/bin/python\nprint(1)\n" + "# long\n" * 1000)
    tool.chmod(0o755)
    archive = folder / "environment-1.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(folder / "env", "env")
    return archive


# Of the interpreter's own library, what these tests do not import: the rest of its 4,000 files only takes time.
_NEEDED = "json|encodings|collections|re|importlib|lib-dynload|sysconfig|email|urllib"
_NOT_NEEDED_HERE = re.compile(rf"share|include|.*\.a|lib/pkgconfig|lib/python3\.\d+/(?!{_NEEDED})[^/.]+(/.*)?")
