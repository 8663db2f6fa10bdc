"""Containers: one description in the words of five runtimes, what gets into an image, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.launcher.container_runtimes import Bind, Inside, rendered
from gradus.launcher.containers import check_runtime, contained, folders_of
from gradus.launcher.image_entry import chosen, fits, satisfies
from gradus.launcher.image_names import RegistryImage, check_image_is_there, image_from
from gradus.launcher.image_software import image_software
from gradus.schema.cluster import Cluster, GpuNumbers, LinkNumbers, Links
from gradus.schema.errors import InputError
from gradus.schema.loading import validated
from gradus.schema.software import Container, Environment

NGC = "nvcr.io/nvidia/pytorch:25.01-py3"
INSIDE = Inside(
    binds=(
        Bind("/project/runs/a", "/project/runs/a"),
        Bind("/data", "/data"),
        Bind("/ref", "/mnt/ref", read_only=True),
    ),
    workdir="/project",
    entry=("env", "A=1 2", "/bin/sh", "/project/software/image_entry.sh", "image"),
    variables=("NCCL_IB_HCA",),
    gpus="nvidia",
    infiniband=True,
    user="ada",
    enroot_settings="/project/software/enroot.sh",
)


def lines_of(runtime: str, image: str = NGC, inside: Inside = INSIDE, **more: object) -> list[str]:
    container = validated(Container, {"runtime": runtime, "image": image, **more}, "cluster.yaml")
    result = rendered(container, image_from(image), inside)
    return [*result.srun_options, "|", *result.prefix]


# ---- golden renderings ----


def test_pyxis_has_options_of_srun_and_nothing_else():
    assert lines_of("pyxis", options=["--container-remap-root"]) == [
        "--container-image=nvcr.io#nvidia/pytorch:25.01-py3",
        "--container-mounts=/project/runs/a:/project/runs/a,/data:/data,/ref:/mnt/ref:ro",
        "--container-workdir=/project",
        "--no-container-mount-home",
        "--container-env=MASTER_ADDR,MASTER_PORT,OMP_NUM_THREADS,CUDA_VISIBLE_DEVICES,"
        "TORCH_FR_BUFFER_SIZE,TORCH_NCCL_DUMP_ON_TIMEOUT,NCCL_IB_HCA",
        "--container-remap-root",
        "|",
        *INSIDE.entry,
    ]
    assert lines_of("pyxis", "/images/a.sqsh", writable=True)[0] == "--container-image=/images/a.sqsh"
    assert "--container-writable" in lines_of("pyxis", writable=True)


def test_enroot_starts_a_file():
    assert lines_of("enroot", "/images/a.sqsh", writable=True) == [
        "|",
        *("enroot", "start", "--rw"),
        *("--conf", "/project/software/enroot.sh"),
        *("--mount", "/project/runs/a:/project/runs/a:none:x-create=auto,rbind"),
        *("--mount", "/data:/data:none:x-create=auto,rbind"),
        *("--mount", "/ref:/mnt/ref:none:x-create=auto,rbind,ro"),
        "/images/a.sqsh",
        *("/bin/sh", "-c", 'cd "$0" && exec "$@"', "/project"),
        *INSIDE.entry,
    ]
    with pytest.raises(InputError, match="in a registry") as caught:
        lines_of("enroot")
    assert "enroot import -o pytorch.sqsh 'docker://nvcr.io#nvidia/pytorch:25.01-py3'" in str(caught.value.hint)


def test_apptainer():
    assert lines_of("apptainer") == [
        "|",
        *("apptainer", "exec", "--nv", "--no-home"),
        *("--bind=/project/runs/a:/project/runs/a", "--bind=/data:/data", "--bind=/ref:/mnt/ref:ro"),
        "--pwd=/project",
        "docker://nvcr.io/nvidia/pytorch:25.01-py3",
        *INSIDE.entry,
    ]
    assert "/images/a.sif" in lines_of("apptainer", "/images/a.sif")
    assert "--writable-tmpfs" in lines_of("apptainer", writable=True)


def test_charliecloud_of_any_age():
    inside = Inside(INSIDE.binds[:2], "/project", INSIDE.entry, user="ada")
    assert lines_of("charliecloud", "/images/pytorch", inside) == [
        "|",
        *("env", "USER=ada", "TMPDIR=/tmp", "ch-run"),
        *("--unset-env=LD_LIBRARY_PATH", "--unset-env=LD_PRELOAD"),
        *("--bind=/project/runs/a:/project/runs/a", "--bind=/data:/data"),
        "--cd=/project",
        "/images/pytorch",
        "--",
        *INSIDE.entry,
    ]
    assert "--write" in lines_of("charliecloud", "/images/pytorch", inside, writable=True)
    newer = Inside(inside.binds, "/project", (), can_write_fake=True, has_own_variables=True)
    assert {"--write-fake", "--set-env"} < set(lines_of("charliecloud", "/images/pytorch", newer))
    # The host's /tmp is the container's, and nothing can be mounted in it.
    shared = Inside((Bind("/tmp/run", "/tmp/run"),), "/project", ())
    assert not [word for word in lines_of("charliecloud", "/images/pytorch", shared) if "--bind" in word]
    with pytest.raises(InputError, match="no folder read-only"):
        lines_of("charliecloud", "/images/pytorch")


def test_podman_shares_network_memory_limits_and_user():
    words = lines_of("podman", options=["--pull=never"])
    crossing = [word for word in words if word.startswith("--env=")]
    assert [word for word in words if word not in crossing] == [
        "|",
        *("podman", "run", "--rm", "--network=host", "--ipc=host", "--pid=host"),
        *("--userns=keep-id", "--cgroups=disabled", "--ulimit=host", "--security-opt=label=disable"),
        "--log-driver=none",
        *("--device=nvidia.com/gpu=all", "--device=/dev/infiniband"),
        *("--volume=/project/runs/a:/project/runs/a", "--volume=/data:/data", "--volume=/ref:/mnt/ref:ro"),
        "--workdir=/project",
        *("--entrypoint=", "--read-only", "--read-only-tmpfs", "--pull=never"),
        "nvcr.io/nvidia/pytorch:25.01-py3",
        *INSIDE.entry,
    ]
    assert {"--env=SLURM*", "--env=MASTER_*", "--env=GRADUS_*", "--env=CUDA_*", "--env=NCCL_*"} < set(crossing)
    assert "docker.io/library/python:3.12" in lines_of("podman", "python:3.12")
    assert lines_of("podman", "/images/pytorch")[-7:-5] == ["--rootfs", "/images/pytorch"]


@pytest.mark.parametrize(
    ("runtime", "folder"),
    [("pyxis", "/a b"), ("pyxis", "/a,b"), ("enroot", "/$x"), ("apptainer", "/a,b"), ("podman", "/a:b")],
)
def test_a_folder_whose_name_the_runtime_would_misread_is_refused(runtime: str, folder: str):
    with pytest.raises(InputError, match=f"{runtime} cannot be given the folder"):
        lines_of(runtime, "/images/a.sqsh", Inside((Bind(folder, folder),), "/", ()))


# ---- names of images ----


@pytest.mark.parametrize("form", ["nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io#nvidia/pytorch:25.01-py3"])
@pytest.mark.parametrize("before", ["", "docker://"])
def test_an_image_of_ngc_is_the_same_in_each_form(before: str, form: str):
    image = image_from(before + form)
    assert image == RegistryImage("nvidia/pytorch", "nvcr.io", "25.01-py3")
    assert image.docker == "nvcr.io/nvidia/pytorch:25.01-py3"
    assert image.enroot == "nvcr.io#nvidia/pytorch:25.01-py3"


def test_names_without_a_registry_are_docker_hubs():
    assert image_from("nvidia/cuda:12.4.1") == RegistryImage("nvidia/cuda", None, "12.4.1")
    assert image_from("localhost:5000/a/b") == RegistryImage("a/b", "localhost:5000")
    digest = f"sha256:{'0' * 64}"
    assert image_from(f"python@{digest}") == RegistryImage("python", digest=digest)


@pytest.mark.parametrize("name", ["A b", "x;rm -rf", "$(touch x)", "nvcr.io/", "-v", "a\nb"])
def test_what_is_no_name_of_an_image_is_refused(name: str):
    with pytest.raises(InputError, match=r"container.image|image"):
        image_from(validated(Container, {"runtime": "pyxis", "image": name}, "cluster.yaml").image)


def test_a_kind_of_file_that_a_runtime_cannot_run_is_refused_with_how_to_make_one(tmp_path: Path):
    with pytest.raises(InputError, match=r"pyxis does not run a .sif file") as caught:
        check_image_is_there(image_from("/images/a.sif"), "pyxis")
    assert "enroot import" in str(caught.value.hint)
    with pytest.raises(InputError, match="no such file or folder"):
        check_image_is_there(image_from(str(tmp_path / "a.sqsh")), "pyxis")


# ---- what gets inside ----


def test_folders_of_a_recipe_are_those_of_its_data_code_and_weights(tmp_path: Path):
    for name in ("data/train/0.tar", "code/model.py", "weights/model.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    recipe = {
        "model": {"use": f"{tmp_path}/code/model.py:build", "weights": f"{tmp_path}/weights/model.safetensors"},
        "data": {"mix": [{"path": f"{tmp_path}/data/train/*.tar"}, {"path": "s3://bucket/x"}], "context": 8},
    }
    assert set(folders_of(recipe)) == {tmp_path / "code", tmp_path / "weights", tmp_path / "data" / "train"}


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    image = tmp_path / "image.sif"
    image.touch()
    return Cluster(
        name="here",
        cpu_cores=2,
        memory_gib=4,
        gpus_per_node=8,
        gpu=GpuNumbers(name="MI300X", memory_gib=192),
        links=Links(inter=LinkNumbers(name="InfiniBand NDR", gb_per_second=50)),
        container=Container(runtime="apptainer", image=str(image), command=str(program), env={"A": "1 2"}),
    )


def test_run_data_code_and_caches_are_bound_and_gradus_with_them(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
):
    run, data, link = tmp_path / "runs" / "a", tmp_path / "data", tmp_path / "link"
    for folder in (run, data / "inner", tmp_path / "cache", tmp_path / "home"):
        folder.mkdir(parents=True)
    link.symlink_to(data)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    place = tmp_path / "software"
    result = contained(cluster, folders=[run, data / "inner", link], directory=run, place=place, dry_run=True)
    assert result is not None
    bound = [word.removeprefix("--bind=").split(":")[0] for word in result.prefix if word.startswith("--bind=")]
    software = str(image_software(place).folder)
    assert bound == sorted([str(run), str(data), str(link), str(tmp_path / "cache"), software])
    assert "--rocm" in result.prefix  # an AMD GPU
    assert f"--pwd={run}" in result.prefix
    inside = list(result.prefix[result.prefix.index("env") :])
    assert inside == ["env", f"HF_HOME={tmp_path / 'cache'}", "A=1 2", "/bin/sh", f"{software}/image_entry.sh", "image"]
    assert not place.exists()  # a dry run makes nothing


def test_images_that_do_not_ask_for_gpus_get_them_all_the_same(tmp_path: Path, cluster: Cluster):
    image = tmp_path / "image.sqsh"
    image.touch()
    container = Container(runtime="enroot", image=str(image), command="/usr/bin/enroot")
    nvidia = GpuNumbers(name="H100", memory_gib=80)
    result = contained(
        cluster.model_copy(update={"container": container, "gpu": nvidia}),
        folders=[],
        directory=tmp_path,
        place=tmp_path,
        dry_run=True,
    )
    assert result is not None
    assert result.lines[0] == "export NVIDIA_VISIBLE_DEVICES=${NVIDIA_VISIBLE_DEVICES:-all}"


def test_no_container_is_no_container(cluster: Cluster, tmp_path: Path):
    plain = cluster.model_copy(update={"container": None})
    assert contained(plain, folders=[], directory=tmp_path, place=tmp_path) is None


def test_a_runtime_that_is_not_installed_is_refused_before_submission(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    for runtime, program in [("apptainer", "apptainer"), ("charliecloud", "ch-run"), ("podman", "podman")]:
        container = Container(runtime=runtime, image=NGC)  # type: ignore[arg-type]
        with pytest.raises(InputError, match=f"{runtime} is not installed: there is no {program}") as caught:
            check_runtime(container, Environment())
        assert f"container.command: /usr/bin/{program}" in str(caught.value.hint)
    with pytest.raises(InputError, match="no pyxis plugin"):
        check_runtime(Container(runtime="pyxis", image=NGC), Environment())
    on_nodes = Container(runtime="podman", image=NGC, command="/opt/only/on/nodes/podman")
    [note] = check_runtime(on_nodes, Environment())
    assert "the job will say" in note


def test_the_script_checks_the_runtime_on_the_first_node(tmp_path: Path, cluster: Cluster):
    name = f"/nonexistent/'$(touch {tmp_path}/canary)"
    container = Container(runtime="podman", image=NGC, command=name)
    result = contained(
        cluster.model_copy(update={"container": container}),
        folders=[],
        directory=tmp_path,
        place=tmp_path,
        dry_run=True,
    )
    assert result is not None
    done = subprocess.run(["bash", "-c", "\n".join(result.lines)], capture_output=True, text=True)
    assert done.returncode == 93
    assert "podman is not installed" in done.stderr
    assert not (tmp_path / "canary").exists()


# ---- which packages an image gets from outside ----

PACKAGES = {
    "gradus": {"version": "0.1.0", "tags": ["py3-none-any"], "requires": [["torch", ">=2.11"], ["pydantic", ">=2.7"]]},
    "pydantic": {"version": "2.12", "tags": ["py3-none-any"], "requires": [["pydantic-core", "==2.41.5"]]},
    "pydantic-core": {"version": "2.41.5", "tags": ["cp311-cp311-manylinux_2_17_x86_64"], "requires": []},
}


def choose(python: tuple[int, int] = (3, 11), **inside: str) -> tuple[list[str], list[str]]:
    return chosen(PACKAGES, {name.replace("_", "-"): version for name, version in inside.items()}.get, python)


def test_an_image_gets_gradus_and_only_what_it_lacks():
    assert choose(torch="2.11.0", pydantic="2.9.1") == (["gradus"], [])
    assert choose(torch="2.11.0a0+df5.nv25.1") == (["gradus", "pydantic", "pydantic-core"], [])
    # What comes along must fit what comes along: the image's own core is of another pydantic.
    assert choose(torch="2.12", pydantic="1.10", pydantic_core="2.3") == (["gradus", "pydantic", "pydantic-core"], [])


def test_an_image_with_an_old_torch_or_none_is_refused_with_the_reason():
    assert choose(torch="2.6.0a0+df5bbc09d1.nv24.11", pydantic="2.9")[1] == [
        "the image has torch 2.6.0a0+df5bbc09d1.nv24.11, and gradus needs torch >=2.11"
    ]
    assert choose(pydantic="2.9")[1] == ["the image has no torch, and gradus needs torch >=2.11"]


def test_a_package_that_is_built_for_another_python_is_not_used():
    _, problems = choose(python=(3, 12), torch="2.11")
    assert "pydantic-core" in problems[0]
    assert "the image has 3.12" in problems[0]
    assert fits(["cp310-abi3-manylinux_2_17_x86_64"], (3, 12))
    assert not fits(["cp313-abi3-manylinux_2_17_x86_64"], (3, 12))


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("2.10.0", ">=2.7,<3", True),
        ("3.0", ">=2.7,<3", False),
        ("2.7", ">=2.7.0", True),
        ("2.41.5", "==2.41.5", True),
        ("2.41.50", "==2.41.5", False),
        ("2.41.5", "==2.41.*", True),
        ("1.4.9", "~=1.4.2", True),
        ("1.5.0", "~=1.4.2", False),
        ("1.5", "!=1.5", False),
        ("6.0.2", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, specifier: str, expected: bool):
    assert satisfies(version, specifier) is expected


def test_the_software_for_images_has_gradus_and_its_dependencies_but_no_torch(tmp_path: Path):
    software = image_software(tmp_path)
    names = {package.name for package in software.packages}
    assert {"gradus", "pydantic", "pydantic-core", "pyyaml", "typer", "rich", "numpy"} <= names
    assert not {name for name in names if name == "torch" or name.startswith("nvidia-cu") or name == "triton"}
    assert software.folder.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_the_entry_says_what_the_image_lacks_and_leaves_with_93(tmp_path: Path):
    source = Path(sys.modules["gradus.launcher.image_entry"].__file__ or "").parent
    for name in ("image_entry.sh", "image_entry.py"):
        shutil.copy(source / name, tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sh").symlink_to("/bin/sh")

    def enter(
        requires: list[list[str]], *words: str, path: str = os.path.dirname(sys.executable)
    ) -> tuple[int, str, str]:
        packages = {"gradus": {"version": "1", "tags": ["py3-none-any"], "requires": requires}}
        (tmp_path / "software.json").write_text(json.dumps({"python": ">=3.10", "packages": packages}))
        command = ["/bin/sh", str(tmp_path / "image_entry.sh"), "image", "/outside/python", *words]
        variables = {"PATH": path, "HOME": "/nonexistent", "PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    code, _, said = enter([["torch", ">=99"]], "-c", "print('went on')")
    assert code == 93
    assert "and gradus needs torch >=99" in said
    assert "container.python: environment" in said
    code, _, said = enter([], "-c", "", path=str(tmp_path / "bin"))
    assert code == 93
    assert "the image has no Python" in said
    # Signals that a runtime passes on do not end it, the home folder can be written to, and its arguments are its own.
    program = "import os, signal, sys; os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGUSR1); "
    program += "print(sys.argv[1], os.environ['HOME'], os.environ['PYTHONPATH'])"
    code, printed, said = enter([], "-c", program, "a 'b' $(c)")
    assert (code, printed.strip()) == (0, f"a 'b' $(c) {tmp_path}/home {tmp_path}/packages/gradus"), said


def test_the_prefix_is_words_that_a_shell_takes_as_they_are():
    words = lines_of("pyxis")[6:]
    assert shlex.split(shlex.join(words)) == words
