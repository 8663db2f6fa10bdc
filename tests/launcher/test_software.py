"""The software environment of a job: what its lines of bash do, in a real bash with a real Lmod."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.launcher.software import check_environment, environment_lines, interpreter_folders, python_of
from gradus.launcher.software_warnings import environment_warnings, names_in
from gradus.schema.cluster import Cluster
from gradus.schema.errors import InputError
from gradus.schema.loading import validated
from gradus.schema.software import Container, Environment

LMOD = Path("/usr/share/lmod/lmod/init/bash")
needs_lmod = pytest.mark.skipif(not LMOD.exists() and os.geteuid() != 0, reason="Lmod is not installed")


def bash(environment: Environment, then: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The lines as a batch script has them: in a shell that is no login shell and stops at unset variables."""
    script = "\n".join(["set -u", *environment_lines(environment), then])
    clean = {"PATH": os.defpath, "HOME": "/nonexistent", "LMOD_ALLOW_ROOT_USE": "yes", **variables}
    return subprocess.run(["bash", "-c", script], env=clean, capture_output=True, text=True, timeout=60)


def cluster(environment: Environment, **more: object) -> Cluster:
    return Cluster(name="here", cpu_cores=2, memory_gib=4, environment=environment, **more)  # type: ignore[arg-type]


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    folder = tmp_path / "modules"
    for name in ("cuda/11.8", "cuda/12.4", "gcc/12.3.0", "flat"):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'#%Module\nsetenv LOADED_{name[:3].upper()} "{name}"\n')
    return folder


def test_nothing_in_the_file_means_the_interpreter_that_submits():
    assert environment_lines(Environment()) == []
    assert shlex.split(python_of(Environment())) == [sys.executable]


def test_variables_arrive_as_they_were_written_and_run_nothing(tmp_path: Path):
    canary = tmp_path / "canary"
    value = f"a 'b' \"c\" $(touch {canary}) `touch {canary}` ; touch {canary} # \\ $HOME"
    done = bash(Environment(variables={"VALUE": value}), 'printf %s "$VALUE"')
    assert done.stdout == value
    assert not canary.exists()


@pytest.mark.parametrize("field", ["venv", "conda", "modules", "module_use"])
def test_no_name_of_a_folder_or_module_can_become_a_command(field: str, tmp_path: Path):
    canary = tmp_path / "canary"
    name = f"/x'; touch {canary}; $(touch {canary}) `touch {canary}`"
    value: object = [name] if field in ("modules", "module_use") else name
    try:
        environment = validated(Environment, {field: value}, "cluster.yaml")
    except InputError:
        assert field == "modules"  # a module's name has no such characters
        return
    done = bash(environment, "true", CONDA_EXE="/bin/false")
    assert not canary.exists()
    assert done.returncode == 93


def test_names_of_secrets_are_refused_with_where_to_keep_them():
    with pytest.raises(InputError, match=r"HF_TOKEN looks like one.*Export HF_TOKEN") as caught:
        validated(Environment, {"variables": {"HF_TOKEN": "hf_123"}}, "cluster.yaml")
    assert "hf_123" not in str(caught.value.document())
    with pytest.raises(InputError, match="WANDB_API_KEY"):
        validated(Container, {"runtime": "podman", "image": "x", "env": {"WANDB_API_KEY": "1"}}, "cluster.yaml")


def test_a_venv_is_first_in_the_path_and_one_that_is_gone_ends_the_job(tmp_path: Path):
    folder = tmp_path / "my venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    environment = Environment(venv=str(folder))
    done = bash(environment, f'command -v python; {python_of(environment)} -c "print(1)"; echo "$-"')
    assert done.stdout.split("\n")[:2] == [f"{folder}/bin/python", "1"], done.stderr
    assert "u" in done.stdout.split("\n")[2]  # the script's own strictness is back
    (folder / "bin" / "python").unlink()
    done = bash(environment, "echo went on")
    assert done.returncode == 93
    assert "environment.venv" in done.stderr
    assert "went on" not in done.stdout


def test_conda_and_venv_together_are_refused():
    with pytest.raises(InputError, match="and not both"):
        validated(Environment, {"conda": "a", "venv": "/b"}, "cluster.yaml")


@pytest.fixture
def conda(tmp_path: Path) -> Path:
    """As much of conda as a shell sees of it: a program that knows its folder, and a file that defines a function."""
    base = tmp_path / "conda base"
    (base / "bin").mkdir(parents=True)
    (base / "etc" / "profile.d").mkdir(parents=True)
    (base / "envs" / "torch" / "bin").mkdir(parents=True)
    (base / "envs" / "torch" / "bin" / "python").symlink_to(sys.executable)
    program = base / "bin" / "conda"
    program.write_text(f'#!/bin/bash\n[ "$*" = "info --base" ] && echo {shlex.quote(str(base))}\n')
    program.chmod(0o755)
    (base / "etc" / "profile.d" / "conda.sh").write_text(
        f'conda() {{ local d={shlex.quote(str(base))}/envs/$2; [ -d "$d" ] && export CONDA_PREFIX="$d$UNSET"; }}\n'
    )
    return program


def test_conda_is_activated_without_conda_init(conda: Path):
    environment = Environment(conda="torch")
    done = bash(environment, f"echo {python_of(environment)}", CONDA_EXE=str(conda))
    assert done.stdout.strip() == f"{conda.parent.parent}/envs/torch/bin/python", done.stderr
    done = bash(Environment(conda="jax"), "echo went on", CONDA_EXE=str(conda))
    assert done.returncode == 93
    assert "environment.conda: jax could not be activated" in done.stderr


def test_an_environment_without_gradus_is_refused_before_submission(tmp_path: Path):
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    with pytest.raises(InputError, match="does not start"):
        check_environment(Environment(venv=str(folder)))
    base = Path(os.path.realpath(sys.executable))
    (folder / "bin" / "python").symlink_to(base)  # an interpreter with nothing installed
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    with pytest.raises(InputError, match="has no gradus") as caught:
        check_environment(Environment(venv=str(folder)))
    assert "pip install gradus" in str(caught.value.hint)
    check_environment(Environment())


def test_a_container_gets_all_folders_that_an_interpreter_lives_in():
    folders = [str(folder) for folder in interpreter_folders(Environment())]
    assert sys.prefix in folders
    assert sys.base_prefix in folders


# ---- modules, with the real Lmod ----


@needs_lmod
def test_modules_are_loaded_after_a_purge(modules: Path):
    environment = Environment(module_use=[str(modules)], modules=["cuda/12.4", "gcc/12.3.0"])
    before = f"module use {shlex.quote(str(modules))}; module load flat; echo before $LOADEDMODULES;"
    script = "\n".join([f". {LMOD}", before, "set -u", *environment_lines(environment), 'echo "$LOADEDMODULES"'])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["before flat", "cuda/12.4:gcc/12.3.0"], done.stderr


@needs_lmod
@pytest.mark.parametrize("missing", ["cuda/9", "nosuch/1.0"])
def test_a_missing_module_ends_the_job_and_is_named(modules: Path, missing: str):
    done = bash(Environment(module_use=[str(modules)], modules=[missing, "cuda/12.4"]), "echo went on")
    assert done.returncode == 93
    assert f"the module {missing} could not be loaded" in done.stderr
    assert "went on" not in done.stdout


@needs_lmod
def test_a_module_without_its_version_is_warned_of_with_the_versions_there_are(modules: Path):
    [warning] = [w for w in warnings_for(modules, "cuda") if "environment.modules" in w]
    assert "cuda/11.8, cuda/12.4" in warning
    assert not [w for w in warnings_for(modules, "cuda/12.4", "flat") if "environment.modules" in w]


@needs_lmod
def test_a_module_that_the_site_has_not_is_refused_before_submission(modules: Path):
    with pytest.raises(InputError, match="no module 'nosuch'"):
        warnings_for(modules, "nosuch")
    with pytest.raises(InputError, match=r"there is no cuda/12.5; did you mean cuda/12.4\?") as caught:
        warnings_for(modules, "cuda/12.5")
    assert caught.value.details["allowed"] == ["cuda/11.8", "cuda/12.4"]


def warnings_for(folder: Path, *names: str) -> list[str]:
    return environment_warnings(cluster(Environment(module_use=[str(folder)], modules=list(names))), nodes=1)


def test_the_listing_of_modules_is_read_without_folders_marks_and_other_names():
    # `module -t avail` of Lmod, and of the Tcl program (Modules 5 manual), which marks defaults.
    lines = ["/apps/modules:", "cuda/", "cuda/11.8", "cuda/12.4(default)", "cudnn/9.0-cuda-12", "cuda/11.8"]
    assert names_in(lines, "cuda") == ["cuda", "cuda/11.8", "cuda/12.4"]


# ---- other warnings ----


def test_software_that_is_loaded_by_startup_files_is_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / ".bashrc").write_text("# module load nothing\nalias ll='ls -l'\nmodule load cuda\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    [warning] = environment_warnings(cluster(Environment()), nodes=1)
    assert "~/.bashrc, line 3" in warning


def test_an_environment_at_home_is_warned_of_from_eight_nodes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(Path(sys.prefix).parent))
    assert environment_warnings(cluster(Environment()), nodes=7) == []
    [warning] = environment_warnings(cluster(Environment()), nodes=8)
    assert "environment.pack: true" in warning
    assert environment_warnings(cluster(Environment(pack=True)), nodes=8) == []
    image = Container(runtime="podman", image="pytorch")
    assert environment_warnings(cluster(Environment(), container=image), nodes=8) == []


def test_the_systems_interpreter_and_other_versions_are_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    answer = (
        '{"executable": "/usr/bin/python3", "version": "3.9.2", "prefix": "/usr", "base_prefix": "/usr", "path": [], '
    )
    answer += '"packages": "", "torch": "2.4.1", "gradus": "/x"}'
    python.write_text(f"#!/bin/sh\necho {shlex.quote(answer)}\n")
    python.chmod(0o755)
    told = "\n".join(environment_warnings(cluster(Environment(venv=str(tmp_path))), nodes=1))
    assert "the system's own interpreter" in told
    assert "has Python 3.9" in told
    assert "has torch 2.4.1" in told
