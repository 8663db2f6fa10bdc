"""`gradus bench`: tables and lines of real ranks on this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from gradus_command import Gradus
from typer.testing import CliRunner

from gradus.bench.result import BenchResult
from gradus.cli.main import app


@pytest.mark.slow
def test_collectives_are_timed_and_right(tmp_path):
    done = Gradus(tmp_path)("bench", "collectives", "all-reduce", "broadcast", "--from", "64", "--to", "1024", "--json")
    assert done.code == 0, done.err
    assert [(row["operation"], row["bytes"]) for row in done.json["rows"]] == [
        (operation, size) for operation in ("all-reduce", "broadcast") for size in (64, 256, 1024)
    ]
    assert done.json["wrong"] == 0
    assert all(row["seconds"] > 0 and row["ranks"] == 2 for row in done.json["rows"])


def test_an_unknown_operation_is_bad_input(tmp_path):
    done = Gradus(tmp_path)("bench", "collectives", "all-reduse", "--json")
    assert done.code == 2
    assert done.json["error"]["nearest"] == "all-reduce"


def test_the_synthetic_benchmark_prints_the_lines_of_the_lab_and_of_a_cpu(tmp_path):
    sizes = ["--batch-size", "2", "--num-iters", "2", "--num-batches-per-iter", "1", "--num-warmup-batches", "1"]
    done = Gradus(tmp_path)("bench", "synthetic", "--model", "mnist-cnn", "--nproc", "1", *sizes)
    assert done.code == 0, done.err
    rate = r"\d+\.\d"
    expected = [
        "Model: mnist-cnn",
        "Batch size: 2",
        "Number of CPUs: 1",
        r"Running warmup\.\.\.",
        r"Running benchmark\.\.\.",
        f"Iter #0: {rate} img/sec per CPU",
        f"Iter #1: {rate} img/sec per CPU",
        rf"Img/sec per CPU: {rate} \+-{rate}",
        rf"Total img/sec on 1 CPU\(s\): {rate} \+-{rate}",
    ]
    assert re.fullmatch("\n".join(expected) + "\n", done.out), done.out
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_kept_result_can_be_read_again_and_the_document_is_alone_on_stdout(tmp_path):
    sizes = [
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-batches-per-iter",
        "1",
        "--num-warmup-batches",
        "0",
        "--set",
        "model.layers=1",
    ]
    done = Gradus(tmp_path)("bench", "synthetic", "--model", "bert", *sizes, "--nproc", "2", "--json", "--save")
    assert done.code == 0, done.err
    assert done.json["settings"]["ranks"] == 2
    assert done.json["summary"]["tokens_per_second"] == pytest.approx(256 * done.json["summary"]["samples_per_second"])
    (saved,) = (tmp_path / "runs" / "bench").iterdir()
    assert BenchResult.load(saved).rows == done.json["rows"]


def test_without_mpi4py_the_backend_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    done = CliRunner().invoke(app, ["bench", "collectives", "--backend", "mpi"])
    assert done.exit_code == 2, done.output
    assert "pip install mpi4py" in done.output


@pytest.mark.slow
def test_mpi_with_one_process_is_refused_with_how_to_start_more(tmp_path):
    done = Gradus(tmp_path)("bench", "collectives", "--backend", "mpi", "--json")
    assert done.code == 2, done.err
    assert "mpirun -n 2" in done.json["error"]["hint"]


@pytest.mark.slow
def test_collectives_through_mpi_are_timed_and_right(tmp_path):
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-np", "2", sys.executable, "-m", "gradus", "bench", "collectives"]
    done = subprocess.run(
        [*command, "--backend", "mpi", "--from", "64", "--to", "1024", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["backend"], document["wrong"]) == ("mpi", 0)
    assert len(document["rows"]) == 6 * 3
    assert all(row["ranks"] == 2 and row["seconds"] > 0 for row in document["rows"])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["collectives", "--backend", "mpi", "--dtype", "bfloat16"], "float64"),
        (["collectives", "--backend", "smoke"], "gloo"),
        (["synthetic", "--model", "resnet49"], "resnet50"),
        (["synthetic", "--precision", "fp31"], "fp32"),
        (["synthetic", "--model", "huggingface"], "--model"),
        (["synthetic", "--set", "model.depht=18"], "depth"),
    ],
)
def test_bad_input_is_refused(arguments, found):
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2, done.output
    assert found in done.output
