"""Containers on a real scheduler: a run inside charliecloud, and srun's view of what is written for pyxis."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm.jobs import Jobs
from slurm.lab import SYSTEM_FOLDERS, Lab, LabError
from slurm.whereabouts import jobs_that_tell, told_by

from gradus.launcher.container_runtimes import Bind, Inside, rendered
from gradus.launcher.containers import check_runtime
from gradus.launcher.image_names import image_from
from gradus.schema.errors import InputError
from gradus.schema.software import Container, Environment

pytestmark = pytest.mark.slow


@pytest.fixture
def jobs(lab: Lab, tmp_path: Path) -> Jobs:
    return jobs_that_tell(lab, tmp_path, "WORLD_SIZE", "TOLD")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An image without a registry: empty folders, into which the host's system and this environment are mounted."""
    folder = tmp_path / "image"
    for name in ("usr", "etc", "dev", "proc", "sys", "tmp", "root", "home", "opt/env", sys.base_prefix.lstrip("/")):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("etc/passwd", "etc/group", "etc/hosts", "etc/resolv.conf", "image-mark"):
        (folder / name).touch()
    return folder


def in_charliecloud(jobs: Jobs, image: Path, **more: Any) -> None:
    """The cluster file, with a container in which the image's Python is this environment under another name."""
    mounts = ["/usr", f"{sys.prefix}:/opt/env"]
    if sys.base_prefix != "/usr":
        mounts.append(sys.base_prefix)
    container = {
        "runtime": "charliecloud",
        "image": str(image),
        "mounts": mounts,
        "env": {"PATH": "/opt/env/bin:/usr/bin:/bin", "TOLD": "$(hello) 'you'"},
        **more,
    }
    cluster = yaml.safe_load(jobs.cluster.read_text())
    jobs.cluster.write_text(yaml.safe_dump({**cluster, "container": container}))


def test_two_nodes_in_charliecloud_have_the_loss_of_a_run_outside(jobs: Jobs, image: Path) -> None:
    recipe = jobs.recipe(steps=60)
    outside = jobs.undisturbed(recipe, ranks=4)
    in_charliecloud(jobs, image)
    run = jobs.submit(recipe, STEP_SECONDS="0.3")
    run.until(lambda: run.curve and run.curve[-1]["step"] >= 3)
    # What preemption and time limits send to all processes of a step must end nothing inside either.
    for signal in ("USR1", "TERM"):
        jobs.lab.run("scancel", f"--signal={signal}", f"{run.job_ids[0]}.0")
    assert run.finished() == outside
    told = told_by(jobs)
    assert [where["SLURMD_NODENAME"] for where in told] == ["n1", "n1", "n2", "n2"]
    for where in told:
        assert where["in_image"]
        assert where["python"].startswith("/opt/env/bin/python")
        assert where["gradus"].startswith(f"{jobs.runs}/.gradus-software/gradus-")
        assert where["TOLD"] == "$(hello) 'you'"
        assert where["WORLD_SIZE"] == "4"


def test_the_environment_outside_can_be_used_in_an_image_without_python(jobs: Jobs, image: Path) -> None:
    recipe = jobs.recipe(steps=5)
    in_charliecloud(jobs, image, python="environment", mounts=["/usr"])
    run = jobs.submit(recipe)
    run.finished()
    where = told_by(jobs)[3]
    assert where["in_image"]
    assert where["python"] == sys.executable


IMAGE_PATHS = {"PATH": "/opt/env/bin:/usr/bin:/bin", "PYTHONPATH": "/opt/old"}


def put_an_old_torch_into(image: Path) -> None:
    old = image / "opt" / "old" / "torch-2.4.1+cu124.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.4.1+cu124\n")


def test_an_image_whose_torch_is_too_old_is_refused_and_nothing_is_submitted(jobs: Jobs, image: Path) -> None:
    put_an_old_torch_into(image)
    in_charliecloud(jobs, image, env=IMAGE_PATHS)
    refused = jobs.gradus("submit", jobs.recipe(), "--cluster", str(jobs.cluster), "--nodes", "2", "--nproc", "2")
    assert refused.code == 2, refused.err
    said = " ".join(refused.err.split())  # however a terminal breaks it
    assert "the image has torch 2.4.1+cu124, and gradus needs torch" in said
    assert "container.python: environment" in said
    assert not list(jobs.runs.glob("own/*"))
    assert jobs.lab.run("squeue", "-h") == ""


def test_an_image_that_was_changed_while_the_job_waited_ends_it_for_good(jobs: Jobs, image: Path) -> None:
    in_charliecloud(jobs, image, env=IMAGE_PATHS)
    run = jobs.submit(jobs.recipe(steps=5), "--sbatch=--begin=now+1hour")
    put_an_old_torch_into(image)
    jobs.lab.run("scontrol", "update", f"JobId={run.job_ids[0]}", "StartTime=now")
    run.ended()
    assert "the image has torch 2.4.1+cu124, and gradus needs torch" in run.output()
    assert run.decisions == ["give-up"], run.output()


def test_a_runtime_that_is_not_here_is_refused_and_nothing_is_submitted(jobs: Jobs, image: Path) -> None:
    in_charliecloud(jobs, image, runtime="apptainer")
    refused = jobs.gradus("submit", jobs.recipe(), "--cluster", str(jobs.cluster), "--nodes", "2", "--nproc", "2")
    assert refused.code == 2
    assert "apptainer is not installed" in refused.err
    assert jobs.lab.run("squeue", "-h") == ""


# ---- pyxis ----

# A plugin with pyxis' options and none of its work: what srun made of them, tasks find in their environment.
PLUGIN = r"""
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct spank_handle *spank_t;                 /* as in slurm/spank.h */
int spank_setenv(spank_t, const char *, const char *, int);
struct spank_option { char *name, *arginfo, *usage; int has_arg, val; int (*callback)(int, const char *, int); };

const char plugin_name[] = "pyxis", plugin_type[] = "spank";
const unsigned int plugin_version = VERSION, spank_plugin_version = 1;

static const char *names[] = {"image", "mounts", "workdir", "mount_home", "env", "writable"};
static char values[6][4096];

static int given(int which, const char *value, int remote) {
    snprintf(values[which], sizeof values[which], "%s", value && *value ? value : "yes");
    return 0;
}

struct spank_option spank_options[] = {
    {"container-image", "IMAGE", "[pyxis]", 1, 0, given},
    {"container-mounts", "SRC:DST[:FLAGS][,SRC:DST...]", "[pyxis]", 1, 1, given},
    {"container-workdir", "PATH", "[pyxis]", 1, 2, given},
    {"no-container-mount-home", NULL, "[pyxis]", 0, 3, given},
    {"container-env", "NAME[,NAME...]", "[pyxis]", 1, 4, given},
    {"container-writable", NULL, "[pyxis]", 0, 5, given},
    {NULL, NULL, NULL, 0, 0, NULL}
};

int slurm_spank_task_init(spank_t task, int count, char *words[]) {
    for (int which = 0; which < 6; which++) {
        char name[64];
        snprintf(name, sizeof name, "GIVEN_%s", names[which]);
        if (values[which][0]) spank_setenv(task, name, values[which], 1);
    }
    return 0;
}
"""


@pytest.fixture(scope="module")
def pyxis_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("a Slurm lab needs root")
    assert shutil.which("gcc"), "gcc is needed to build a plugin of Slurm"
    folder = tmp_path_factory.mktemp("plugin")
    daemon = shutil.which("slurmd", path=f"{os.environ['PATH']}:{SYSTEM_FOLDERS}")
    assert daemon, "slurmd is not installed"
    year, month, patch = re.findall(r"\d+", subprocess.check_output([daemon, "-V"], text=True))[:3]
    version = int(year) << 16 | int(month) << 8 | int(patch)  # SLURM_VERSION_NUM of slurm.h
    (folder / "plugin.c").write_text(PLUGIN)
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-DVERSION={version}", "-o", str(folder / "pyxis.so"), str(folder / "plugin.c")],
        check=True,
    )
    (folder / "plugstack.conf").write_text(f"required {folder}/pyxis.so\n")
    with Lab(nodes=2, gpus=0, settings={"PlugStackConfig": str(folder / "plugstack.conf")}) as lab:
        yield lab


def pyxis_options(**more: Any) -> tuple[str, ...]:
    container = Container(runtime="pyxis", image="nvcr.io/nvidia/pytorch:25.01-py3", **more)
    binds = (Bind("/project/runs/a", "/project/runs/a"), Bind("/data", "/mnt/data", read_only=True))
    inside = Inside(binds, "/project", ("true",), variables=("NCCL_IB_HCA",))
    return rendered(container, image_from(container.image), inside).srun_options


def test_what_is_written_for_pyxis_is_parsed_by_srun_and_arrives_at_tasks(pyxis_lab: Lab) -> None:
    printed = pyxis_lab.run("srun", "-N2", *pyxis_options(writable=True), "env")
    given = dict(line.split("=", 1) for line in printed.splitlines() if line.startswith("GIVEN_"))
    assert given.pop("GIVEN_env").split(",")[:2] == ["MASTER_ADDR", "MASTER_PORT"]
    assert given == {
        "GIVEN_image": "nvcr.io#nvidia/pytorch:25.01-py3",
        "GIVEN_mounts": "/project/runs/a:/project/runs/a,/data:/mnt/data:ro",
        "GIVEN_workdir": "/project",
        "GIVEN_mount_home": "yes",
        "GIVEN_writable": "yes",
    }
    assert "GIVEN_writable" not in pyxis_lab.run("srun", *pyxis_options(), "env")


def test_a_slurm_without_pyxis_is_noticed_before_submission(
    pyxis_lab: Lab, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = Container(runtime="pyxis", image="nvcr.io/nvidia/pytorch:25.01-py3")
    with pytest.raises(LabError, match="container-image"):
        lab.run("srun", *pyxis_options(), "true")
    monkeypatch.setenv("SLURM_CONF", lab.environment["SLURM_CONF"])
    with pytest.raises(InputError, match="no pyxis plugin"):
        check_runtime(container, Environment())
    monkeypatch.setenv("SLURM_CONF", pyxis_lab.environment["SLURM_CONF"])
    assert check_runtime(container, Environment()) == []


def test_the_script_for_pyxis_has_its_options_on_srun_and_not_in_the_header(pyxis_lab: Lab, tmp_path: Path) -> None:
    jobs = Jobs(pyxis_lab, tmp_path)
    cluster = yaml.safe_load(jobs.cluster.read_text())
    container = {"runtime": "pyxis", "image": "nvcr.io/nvidia/pytorch:25.01-py3"}
    jobs.cluster.write_text(yaml.safe_dump({**cluster, "container": container}))
    words = ("submit", jobs.recipe(), "--cluster", str(jobs.cluster), "--nodes", "2", "--nproc", "2", "--dry-run")
    done = jobs.gradus(*words)
    assert done.code == 0, done.err
    header = [line for line in done.out.splitlines() if line.startswith("#SBATCH")]
    assert header
    assert not [line for line in header if "container" in line]
    assert "--container-image=nvcr.io#nvidia/pytorch:25.01-py3" in done.out
