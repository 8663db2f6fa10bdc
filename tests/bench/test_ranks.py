"""Ranks of a benchmark: what rank 0 says arrives, and what goes wrong in a rank is the command's own error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradus.bench.ranks import _of_place, _said_by
from gradus.bench.synthetic import Synthetic, trained
from gradus.launcher.gathering import Invitation, Place
from gradus.schema.errors import GradusError, InputError


def said(code: str) -> list[dict]:
    return list(_said_by([sys.executable, "-c", code], {}))


def test_lines_of_json_arrive_and_others_are_passed_over():
    assert said("print('hello'); print('{\"a\": 1}'); print('[2]'); print('{\"b\": 2}')") == [{"a": 1}, {"b": 2}]


def test_an_error_that_a_rank_says_is_raised_with_its_kind():
    bad = json.dumps({"error": {"kind": "bad-input", "message": "no", "hint": "yes", "field": "x"}, "exit_code": 2})
    with pytest.raises(InputError, match="no") as raised:
        said(f"print({bad!r})")
    assert raised.value.hint == "yes"
    assert raised.value.details["field"] == "x"
    with pytest.raises(GradusError) as raised:
        said(f"print({bad.replace('2}', '1}')!r})")
    assert raised.value.exit_code == 1


def test_a_rank_that_dies_is_an_error_with_its_last_words():
    with pytest.raises(GradusError, match="exit code 7") as raised:
        said("import sys; print('{}'); print('the disk is full', file=sys.stderr); sys.exit(7)")
    assert "the disk is full" in raised.value.details["output"]


def test_who_stops_listening_ends_the_ranks(tmp_path):
    mark = tmp_path / "pid"
    code = (
        f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); print('{{}}', flush=True); time.sleep(600)"
    )
    lines = _said_by([sys.executable, "-c", code], {})
    assert next(lines) == {}
    lines.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)


def test_a_failure_elsewhere_ends_this_rank_and_is_what_is_told():
    code = "import time; print('{}', flush=True); time.sleep(600)"
    lines = _said_by([sys.executable, "-c", code], {}, failed=lambda: GradusError("process 1 on b left"))
    with pytest.raises(GradusError, match="process 1 on b left"):
        list(lines)


def test_an_invited_process_becomes_the_rank_that_it_was_given():
    place = Place(3, 1, 4, 1, 2, 1, 2, own_gpu=True, own_cores=False)
    command, variables = _of_place(Invitation("runs", 1, "10.0.0.1", 4242, place), "a.module", {"x": 1})
    assert command == [sys.executable, "-m", "a.module", '{"x": 1}']
    assert variables["RANK"] == "3"
    assert (variables["LOCAL_RANK"], variables["WORLD_SIZE"]) == ("1", "4")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.1", "4242")
    assert variables["GRADUS_GPU"] == "own"
    several, none = _of_place(
        Invitation("runs", 1, "10.0.0.1", 4242, Place(4, 4, 8, 0, 4, 1, 2, False, False)), "m", {}
    )
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--master-addr=10.0.0.1"} <= set(several)
    assert none == {}


def test_a_precision_that_the_device_lacks_is_bad_input_of_the_command():
    work = Synthetic("simple-cnn", batch_size=1, precision="fp8", warm_up_batches=0, batches=1, iterations=1)
    with pytest.raises(InputError, match="fp8"):
        trained(work.asked(), 1)


@pytest.mark.slow
@pytest.mark.parametrize("starter", ["mpirun", "torchrun"])
def test_processes_that_were_started_together_are_ranks_and_the_first_speaks(tmp_path: Path, starter):
    arguments = [
        "bench",
        "synthetic",
        "--model",
        "gpt",
        "--set",
        "model.layers=1",
        "--set",
        "model.width=16",
        "--set",
        "model.context=8",
    ]
    arguments += ["--batch-size", "2", "--num-iters", "2", "--num-batches-per-iter", "2", "--num-warmup-batches", "1"]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    start = {
        "mpirun": ["mpirun", *root, "--oversubscribe", "-np", "2", sys.executable],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"],
    }
    done = subprocess.run(
        [*start[starter], "-m", "gradus", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Total seq/sec on 2 CPU(s): ") == 1
    assert done.stdout.count("Iter #1: ") == 1
    assert list(tmp_path.iterdir()) == []
