"""`mpirun gradus train` on this machine, with Open MPI: the same curve, a stop that saves, and exit codes that survive.

mpirun ends all processes when one leaves badly, so that each of these also shows that process 0 is left in peace.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gradus_command import rank_processes, status

from gradus.launcher.drill_request import DrillRequest, ask_for
from gradus.record.directory import RunDirectory
from gradus.record.metrics import read_metrics

pytestmark = pytest.mark.slow

PATIENCE_SECONDS = 300.0
RECIPE = """\
name: small
model: {{use: gpt, layers: 1, width: 16, heads: 2, context: 16}}
data: {{use: stdlib-text}}
batch: 8
steps: {steps}
optimizer: {{use: adamw, lr: 1.0e-3, clip: 1.0}}
evaluate: {{every: 1000, batches: 1}}
log_every: 1
plan: {{precision: fp64, workers: 0}}
"""


def command(count: int) -> list[str]:
    assert shutil.which("mpirun"), "these tests need Debian's openmpi-bin"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return ["mpirun", *root, "--oversubscribe", "-np", str(count), sys.executable, "-m", "gradus", "train"]


def started(folder: Path, *arguments: str, count: int = 2, steps: int = 5) -> subprocess.Popen[str]:
    (folder / "recipe.yaml").write_text(RECIPE.format(steps=steps))
    return subprocess.Popen(
        [*command(count), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, out, err


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(RunDirectory(run)) if row.get("loss") is not None]


def until_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not run.exists() or len(losses(run)) < step:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.2)


def test_four_processes_train_as_one_machine_does(tmp_path: Path):
    code, out, err = ended(started(tmp_path, "recipe.yaml", "--run-id", "mpi", count=4))
    assert code == 0, out + err
    alone = subprocess.run(
        [sys.executable, "-m", "gradus", "train", "recipe.yaml", "--run-id", "alone", "--here"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert alone.returncode == 0, alone.stderr
    runs = tmp_path / "runs" / "small"
    assert losses(runs / "mpi") == pytest.approx(losses(runs / "alone"), rel=1e-9)
    assert len(losses(runs / "mpi")) == 5
    assert out.count("validation loss") == 1  # told once, by process 0
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"small"}


def test_usr1_to_mpirun_saves_and_stops_and_the_run_goes_on_later(tmp_path: Path):
    process = started(tmp_path, "recipe.yaml", "--run-id", "mpi", steps=100_000)
    run = tmp_path / "runs" / "small" / "mpi"
    until_step(run, 3, process)
    process.send_signal(signal.SIGUSR1)  # which mpirun passes on to all processes
    code, out, err = ended(process)
    assert code == 75, out + err
    assert status(run)["state"] == "stopped"
    reached = losses(run)
    assert list((run / "checkpoints").glob("*/COMMITTED"))
    code, out, err = ended(started(tmp_path, "--resume", "mpi", "--set", f"steps={len(reached) + 2}"))
    assert code == 0, out + err
    assert losses(run)[: len(reached)] == reached
    assert len(losses(run)) == len(reached) + 2


@pytest.mark.parametrize("by", ["signal", "drill"])
def test_a_killed_rank_is_named_by_process_0(tmp_path: Path, by: str):
    process = started(tmp_path, "recipe.yaml", "--run-id", "mpi", steps=100_000)
    run = tmp_path / "runs" / "small" / "mpi"
    until_step(run, 3, process)
    if by == "signal":
        os.kill(rank_processes(run)[1], signal.SIGKILL)
    else:
        ask_for(RunDirectory(run), DrillRequest("kill-rank", rank=1, attempt=1, id="a"))
    code, out, err = ended(process)
    assert code == 1, out + err
    assert "rank 1" in err
    assert "SIGKILL" in err
    assert status(run)["state"] == "failed"
    assert rank_processes(run) == {}


def test_a_script_gets_a_rank_for_each_process_and_its_secrets(tmp_path: Path):
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "open(f'rank-{os.environ[\"RANK\"]}', 'w').write(' '.join([os.environ['WORLD_SIZE'], *sys.argv[1:]]))\n"
    )
    code, out, err = ended(started(tmp_path, "--", "script.py", "--token", "s3cret", count=3))
    assert code == 0, out + err
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(3)] == ["3 --token s3cret"] * 3
    texts: list[Any] = [path.read_text(errors="replace") for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert not any("s3cret" in text for text in texts)


def test_bad_input_is_said_once_and_leaves_nothing_behind(tmp_path: Path):
    code, out, err = ended(started(tmp_path, "recipe.yaml", "--set", "batch=-1"))
    assert code == 2, out + err
    assert err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()
