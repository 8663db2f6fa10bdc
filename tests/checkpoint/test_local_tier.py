"""The local tier: the node's own disk takes a part first, its way into the run's folder is checked, nothing is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from writer_cases import CPU, disturb, kinds, process_of, saved, small_disk, state, value_of, writing

from gradus.checkpoint.local_tier import commit_drained, copy_part, drain
from gradus.checkpoint.part import read_record
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.writer import Writer

PART = "part-00000-of-00001.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shared" / "checkpoints"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "node" / "run-1"


@pytest.mark.parametrize("background", [True, False])
def test_a_part_goes_to_the_nodes_disk_first_and_from_there_into_the_runs_folder(
    folder: Path, local: Path, background: bool
) -> None:
    with writing(folder, local=local, background=background) as writer:
        told = saved(writer, 1)
    assert kinds(told) == ["written", "copied", "committed"]
    assert told[0].message == str(local / "step-00000001" / PART)
    assert told[1].message == str(folder / "step-00000001" / PART)
    assert (local / "step-00000001" / PART).read_bytes() == (folder / "step-00000001" / PART).read_bytes()
    assert sorted(path.name for path in (folder / "step-00000001").iterdir()) == ["COMMITTED", "MANIFEST.json", PART]
    assert value_of(folder, 1) == 1.0


def test_only_the_newest_stay_on_the_nodes_disk(folder: Path, local: Path) -> None:
    with writing(folder, local=local) as writer:
        for step in (1, 2, 3, 4):
            saved(writer, step)
    assert sorted(path.name for path in local.iterdir()) == ["step-00000003", "step-00000004"]
    assert CheckpointStore(folder).steps() == [1, 2, 3, 4]


def test_the_memory_is_free_while_the_shared_disk_is_slow_and_the_third_save_waits(
    folder: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "held", tmp_path / "let-go", where="shared")
    waits: list[bool] = []

    def waiting() -> None:
        waits.append((tmp_path / "let-go").exists())
        (tmp_path / "let-go").touch()

    with writing(folder, local=local, on_wait=waiting) as writer:
        for step in (1, 2):
            writer.save(step, state(float(step)), {"state": {}})
            assert writer.wait("written", 60) is not None
        assert not waits
        assert CheckpointStore(folder).steps() == []
        writer.save(3, state(3.0), {"state": {}})
        assert waits[:1] == [False], "else copies would pile up on the node's disk"
        writer.wait("committed", 60)
    assert [value_of(folder, step) for step in CheckpointStore(folder).steps()] == [1.0, 2.0, 3.0]


def test_a_nodes_disk_that_is_full_is_told_and_passed_by(folder: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "node", 2) as disk, writing(folder, local=disk / "run-1") as writer:
        told = saved(writer, 1, state(1.0, numbers=1_000_000))
        assert kinds(told) == ["retrying", "written", "copied", "committed"]
        assert "straight into the run's folder" in told[0].message
        assert "No space left" in told[0].message
        assert kinds(saved(writer, 2)) == ["written", "copied", "committed"]
    assert value_of(folder, 1) == 1.0


def test_a_byte_that_changes_on_the_nodes_disk_does_not_come_into_the_checkpoint(folder: Path, local: Path) -> None:
    with writing(folder, local=local) as writer:
        saved(writer, 1)
    source = local / "step-00000001"
    record = read_record(source, 0, 1)
    assert record is not None
    content = (source / PART).read_bytes()
    for place in (3, 50, record.header_bytes, len(content) - 1):
        (source / PART).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(OSError, match="are not those that were written"):
            copy_part(source, folder / "elsewhere", record, abandoned=lambda: False)
        assert not list((folder / "elsewhere").glob("*"))


def test_a_writer_process_that_is_killed_while_it_copies_loses_nothing(
    folder: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.2, where="shared")
    with writing(folder, local=local) as writer:
        writer.save(1, state(1.0), {"state": {}})
        assert writer.wait("written", 60) is not None
        os.kill(process_of(os.getpid()), signal.SIGKILL)
        report = writer.wait("committed", 60)
        assert report is not None
        assert report.kind == "committed"
        assert kinds(writer.poll()) == ["written", "retrying", "copied", "committed"]
    assert value_of(folder, 1) == 1.0


_DIES = """
import os, sys
from pathlib import Path
import torch
from gradus.checkpoint.writer import Writer

def save(step, until):
    folder, nodes = Path({folder!r}), Path({nodes!r})
    of_attempt = dict(device=torch.device("cpu"), attempt="2", began_from=1)
    writers = [Writer(folder, n, 2, local=nodes / f"node-{{n}}", **of_attempt) for n in (0, 1)]
    for rank, writer in enumerate(writers):
        tensors = {{f"rank-{{rank}}": torch.full((1000,), float(step))}}
        writer.save(step, tensors, {{"state": {{"at": step}}}} if rank == 0 else None)
    for writer in writers:
        writer.wait(until)
    print(step, flush=True)
    return writers

for writer in save(1, "committed"):
    writer.close()
os.environ["DISTURBANCE"] = "slow:30:shared"
writers = save(2, "written")
os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on two nodes were killed when step 2 was on the nodes' disks and not yet in the run's folder."""
    path = tmp_path_factory.mktemp("died")
    with pytest.MonkeyPatch.context() as monkeypatch:
        disturb(monkeypatch, path / "disturbed", "slow", 0, where="shared")
        script = _DIES.format(folder=str(path / "shared"), nodes=str(path / "nodes"))
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n2\n", done.stderr
    assert CheckpointStore(path / "shared").steps() == [1]
    return path


@pytest.fixture
def died(left: Path, folder: Path, tmp_path: Path) -> Path:
    """The nodes' disks, and `folder` as it was left."""
    shutil.copytree(left / "shared", folder)
    return shutil.copytree(left / "nodes", tmp_path / "nodes")


def test_what_was_whole_on_the_nodes_disks_when_a_run_died_becomes_a_checkpoint(folder: Path, died: Path) -> None:
    for node in ("node-1", "node-0"):
        assert kinds(drain(died / node, folder, attempt="2")) == ["copied"]
        assert drain(died / node, folder, attempt="2") == [], "once is enough"
    assert kinds(commit_drained(folder, attempt="2")) == ["committed"]
    assert commit_drained(folder, attempt="2") == []
    opened = CheckpointStore(folder).open(2)
    assert opened.state == {"at": 2}
    assert {name: t[0].item() for name, t in opened.tensors().items()} == {"rank-0": 2.0, "rank-1": 2.0}
    assert drain(died / "node-0", folder, attempt="2") == [], "what is committed needs no help"


def test_a_node_that_is_gone_or_damaged_leaves_the_checkpoint_before(folder: Path, died: Path) -> None:
    part = died / "node-1" / "step-00000002" / "part-00001-of-00002.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"!")
    assert kinds(drain(died / "node-0", folder, attempt="2")) == ["copied"]
    (told,) = drain(died / "node-1", folder, attempt="2")
    assert told.kind == "failed"
    assert "rank 1" in told.message
    (told,) = commit_drained(folder, attempt="2")
    assert told.kind == "failed"
    assert "1 of 2 ranks" in told.message
    assert CheckpointStore(folder).steps() == [1]


def test_what_another_attempt_has_passed_by_does_not_come_back(folder: Path, died: Path) -> None:
    """Attempt 3 ran on other nodes, and went on from step 1. Attempt 4 is here again, where 2 left its step 2."""
    for node in ("node-0", "node-1"):
        (told,) = drain(died / node, folder, attempt="3")
        assert told.kind == "note"
        assert "an attempt has started since" in told.message
    assert commit_drained(folder, attempt="3") == []
    assert CheckpointStore(folder).steps() == [1]
    for node in ("node-0", "node-1"):  # nor if attempt 3 was killed when all parts were in the run's folder
        drain(died / node, folder, attempt="2")
    assert commit_drained(folder, attempt="3") == []
    assert CheckpointStore(folder).steps() == [1]


def test_nor_does_what_came_after_a_checkpoint_that_somebody_has_taken_away(folder: Path, died: Path) -> None:
    """To go back to an earlier state, one deletes the later ones."""
    shutil.rmtree(folder / "step-00000001")
    for node in ("node-0", "node-1"):
        drain(died / node, folder, attempt="2")
    for told in commit_drained(folder, attempt="2"):
        assert told.kind == "note"
        assert "began from step 1, which is gone" in told.message
    assert CheckpointStore(folder).steps() == []


def test_a_finished_run_leaves_nothing_on_the_nodes_disk(folder: Path, local: Path) -> None:
    writer = Writer(folder, 0, 1, CPU, local=local)
    saved(writer, 1)
    writer.close()
    assert local.is_dir(), "a run that was stopped goes on"
    writer = Writer(folder, 0, 1, CPU, local=local, attempt="2")
    saved(writer, 2)
    writer.close(finished=True)
    assert not local.exists()
    assert value_of(folder, 2) == 2.0


def test_what_is_not_committed_stays_on_the_nodes_disk_even_so(
    folder: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.3, where="shared")
    writer = Writer(folder, 0, 1, CPU, local=local)
    writer.save(1, state(1.0), {"state": {}})
    assert writer.wait("written", 60) is not None
    writer.close(finished=True)
    assert CheckpointStore(folder).steps() == []
    assert (local / "step-00000001" / PART).exists()


def test_where_nothing_is_left_there_is_nothing_to_do(folder: Path, local: Path) -> None:
    assert drain(local, folder, attempt="2") == []
    assert commit_drained(folder, attempt="2") == []
