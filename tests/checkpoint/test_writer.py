"""The writer: training stops for the copy only, and what is committed is the state as it was then."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from writer_cases import CPU, disturb, eventually, kinds, process_of, saved, state, value_of, writing

from gradus.checkpoint import snapshot as snapshot_module
from gradus.checkpoint.retention import Retention
from gradus.checkpoint.snapshot import NotEnoughMemory, Snapshot
from gradus.checkpoint.store import CheckpointStore
from gradus.checkpoint.writer import Writer

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each write and flush takes a fifth of a second; a save has about twelve of them."""
    disturb(monkeypatch, tmp_path / "disturbed", "slow", 0.2)


@pytest.mark.parametrize("background", [True, False])
def test_what_is_saved_comes_back(folder: Path, background: bool) -> None:
    tensors = {
        "fp32": torch.randn(300, 40),
        "bf16": torch.randn(7).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nothing": torch.empty(0, 4),
        "transposed": torch.randn(30, 50).t(),
        "channels_last": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(5)),
    }
    with writing(folder, background=background) as writer:
        stall = writer.save(7, tensors, {"samples": 224, "state": {"training": {"step": 7}}})
        report = writer.wait("committed", 60)
        assert report is not None
        assert (report.kind, report.step, report.bytes) == ("committed", 7, stall.bytes)
        assert kinds(writer.poll()) == ["written", "committed"]
        assert writer.poll() == []
    opened = CheckpointStore(folder).open(7)
    assert opened.state == {"training": {"step": 7}}
    assert opened.manifest["samples"] == 224
    assert opened.manifest["versions"]["torch"] == torch.__version__
    found = opened.tensors()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor.detach()), name


def test_the_state_of_the_save_is_written_and_not_that_of_later_steps(folder: Path, slow: None) -> None:
    tensors = state(1.0)
    with writing(folder) as writer:
        writer.save(1, tensors, {"state": {}})
        tensors["weight"].fill_(2.0)  # training goes on
        assert writer.in_flight == 1
        assert not (folder / "step-00000001" / "COMMITTED").exists()
        writer.wait("committed", 60)
        assert writer.in_flight is None
    assert value_of(folder, 1) == 1.0


def test_asking_never_waits_and_a_second_save_waits_for_the_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(monkeypatch, tmp_path / "disturbed", "held", tmp_path / "let-go")
    waits: list[bool] = []

    def waiting() -> None:
        waits.append((tmp_path / "let-go").exists())
        (tmp_path / "let-go").touch()

    with writing(folder, on_wait=waiting) as writer:
        writer.save(1, state(1.0), {"state": {}})
        for _ in range(100):
            writer.poll()
        assert writer.wait("committed", 0.0) is None
        assert writer.in_flight == 1, "the disk has not taken a byte of it"
        stall = writer.save(2, state(2.0), {"state": {}})
        assert waits[:1] == [False], "it waited while the disk was held"
        assert stall.waited_seconds > 0
        writer.wait("committed", 60)
    assert [value_of(folder, step) for step in CheckpointStore(folder).steps()] == [1.0, 2.0]


def test_a_state_that_grows_and_changes_its_names_is_saved_all_the_same(folder: Path) -> None:
    with writing(folder) as writer:
        writer.prepare(1000)
        saved(writer, 1)
        large = {**state(2.0, numbers=6_000_000), "new": torch.ones(3)}  # more than the room beside the tensors
        saved(writer, 2, large)
        saved(writer, 3)
    assert [value_of(folder, step) for step in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert torch.equal(CheckpointStore(folder).open(2).tensors()["new"], torch.ones(3))


def test_memory_that_was_prepared_is_there_before_the_first_save() -> None:
    room = Snapshot(CPU)
    room.reserve(50_000_000)
    assert os.fstat(room.descriptor).st_blocks * 512 >= 50_000_000, "its pages are there, and not only its size"
    room.close()


def test_without_memory_for_a_copy_it_says_so_and_writes_while_training_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "available_memory", lambda: 0)
    tensors = {**state(1.0, numbers=5_000_000), "transposed": torch.randn(30, 50).t(), "more": torch.randn(2_000_000)}
    with writing(folder) as writer:
        writer.prepare(20_000_000)
        writer.save(1, tensors, {"state": {}})
        assert (folder / "step-00000001" / "part-00000-of-00001.safetensors").exists(), "it is written by now"
        tensors["more"].zero_()
        writer.wait("committed", 60)
        told = writer.poll()
        assert kinds(told) == ["note", "written", "committed"]
        assert "GiB of host memory" in told[0].message
        monkeypatch.undo()  # whoever took it is gone
        assert kinds(saved(writer, 2, tensors)) == ["written", "committed"]
    found = CheckpointStore(folder).open(1).tensors()
    assert torch.equal(found["transposed"], tensors["transposed"])
    assert bool(found["more"].any())


def test_memory_that_others_take_in_the_meantime_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    answers = iter([total, total, 0])  # before, at the first pages, and at the next ones
    monkeypatch.setattr(snapshot_module, "available_memory", lambda: next(answers))
    monkeypatch.setattr(snapshot_module, "_CHUNK_BYTES", 10_000_000 // 4096 * 4096)
    room = Snapshot(CPU)
    with pytest.raises(NotEnoughMemory, match="are left"):
        room.reserve(20_000_000)
    assert os.fstat(room.descriptor).st_blocks == 0, "what was taken is given back"
    room.close()


def test_the_writer_process_has_neither_torch_nor_numpy(folder: Path) -> None:
    with writing(folder) as writer:
        saved(writer, 1)
        maps = Path(f"/proc/{process_of(os.getpid())}/maps").read_text()
        assert "xxhash" in maps, "this check would see a library"
        assert "torch" not in maps
        assert "numpy" not in maps
        assert "pydantic" not in maps


def test_rank_0_commits_when_all_have_written_and_not_before(folder: Path) -> None:
    with writing(folder, 0, 2) as first, writing(folder, 1, 2) as second:
        first.save(5, {"a": torch.ones(3)}, {"state": {}})
        assert first.wait("written", 60) is not None
        assert first.wait("committed", 0.3) is None
        assert first.in_flight == 5
        second.save(5, {"b": torch.zeros(4)}, None)
        for writer in (first, second):
            report = writer.wait("committed", 60)
            assert report is not None
            assert report.kind == "committed"
        assert kinds(second.poll()) == ["written"]
    assert CheckpointStore(folder).open(5).tensors().keys() == {"a", "b"}


def test_a_part_that_an_earlier_attempt_left_is_not_taken(folder: Path) -> None:
    with writing(folder, 1, 2, attempt="1") as died:
        died.save(5, {"b": torch.full((4,), 1.0)}, None)
        died.wait("written", 60)
    with writing(folder, 0, 2, attempt="2") as first, writing(folder, 1, 2, attempt="2") as second:
        first.save(5, {"a": torch.ones(3)}, {"state": {}})
        assert first.wait("committed", 0.3) is None
        second.save(5, {"b": torch.full((4,), 2.0)}, None)
        assert first.wait("committed", 60) is not None
    assert CheckpointStore(folder).open(5).tensors()["b"].tolist() == [2.0] * 4


def test_a_rank_that_cannot_write_is_named_by_rank_0_and_the_next_save_is_committed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(folder, 0, 2) as first, writing(folder, 1, 2, background=False) as second:
        first.save(1, {"a": torch.ones(3)}, {"state": {}})
        first.wait("written", 60)
        with monkeypatch.context() as full:
            full.setattr("gradus.checkpoint.job.write_part", _raising(OSError(28, "No space left on device")))
            second.save(1, {"b": torch.ones(3)}, None)
        report = first.wait("committed", 60)
        assert report is not None
        assert report.kind == "failed"
        assert "rank 1" in report.message
        assert "no room" in report.message
        assert second.in_flight is first.in_flight is None
        first.save(2, {"a": torch.ones(3)}, {"state": {}})
        second.save(2, {"b": torch.ones(3)}, None)
        report = first.wait("committed", 60)
        assert report is not None
        assert report.kind == "committed"
    assert CheckpointStore(folder).steps() == [2]


def test_a_part_that_never_comes_holds_nobody_up(folder: Path) -> None:
    """Rank 1 saved step 1 and lost it without a word. Rank 0 goes on, and gives it up when step 2 is complete."""
    with writing(folder, 0, 2) as first, writing(folder, 1, 2) as second:
        first.save(1, {"a": torch.ones(3)}, {"state": {}}, Retention(1))
        second._number += 1
        first.save(2, {"a": torch.ones(3)}, {"state": {}}, Retention(1))
        second.save(2, {"b": torch.ones(3)}, None)
        report = first.wait("committed", 60)
        assert report is not None
        assert report.kind == "committed"
        told = [report for report in first.poll() if report.kind == "failed"]
        assert [report.step for report in told] == [1]
        assert "not all ranks" in told[0].message
    assert CheckpointStore(folder).steps() == [2]


def test_a_save_that_is_given_up_is_never_committed_and_its_step_can_be_saved_again(folder: Path, slow: None) -> None:
    with writing(folder) as writer:
        writer.save(1, state(1.0), {"state": {}})
        writer.abandon(1, "a number was not finite")
        report = writer.wait("committed", 60)
        assert report is not None
        assert report.kind == "failed"
        assert "a number was not finite" in report.message
        assert CheckpointStore(folder).steps() == []
        assert kinds(saved(writer, 1, state(2.0)))[-1] == "committed"
    assert value_of(folder, 1) == 2.0


@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_is_interrupted_does_not_hold_up_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    with writing(folder, background=background) as writer:
        with monkeypatch.context() as interrupted:
            interrupted.setattr(Snapshot, "copy", _raising(KeyboardInterrupt()))
            interrupted.setattr(Writer, "_settle", _raising(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                writer.save(1, state(1.0), {"state": {}})
        assert writer.in_flight is None
        assert kinds(saved(writer, 2)) == ["written", "committed"]
    assert CheckpointStore(folder).steps() == [2]


def test_closing_gives_up_what_is_not_committed(folder: Path, slow: None) -> None:
    writer = Writer(folder, 0, 1, CPU)
    writer.save(1, state(1.0), {"state": {}})
    child = eventually(lambda: process_of(os.getpid()))
    writer.close()
    assert kinds(writer.poll())[-1] == "failed"
    assert writer.in_flight is None
    assert not Path(f"/proc/{child}").exists()
    assert CheckpointStore(folder).steps() == []
    writer.close()


@pytest.mark.parametrize("background", [True, False])
def test_older_ones_go_when_the_new_one_is_there(folder: Path, background: bool) -> None:
    writer = Writer(folder, 0, 1, CPU, background=background)
    for step in (1, 2, 3, 4):
        writer.save(step, state(float(step)), {"state": {}}, Retention(keep=2, best=1))
        writer.wait("committed", 60)
    writer.close()  # lets what is being deleted be deleted
    assert CheckpointStore(folder).steps() == [1, 3, 4]
    assert [(r.step, r.message) for r in writer.poll() if r.kind == "pruned"] == [(4, "step 2")]


def test_a_step_that_is_not_as_it_was_written_makes_nothing_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradus.checkpoint import job

    with writing(folder, background=False) as writer:
        saved(writer, 1)
        committed = job.commit

        def truncating(path: Path, *arguments: Any, **keywords: Any) -> None:
            committed(path, *arguments, **keywords)
            os.truncate(path / "part-00000-of-00001.safetensors", 100)

        monkeypatch.setattr(job, "commit", truncating)
        writer.save(2, state(2.0), {"state": {}}, Retention(1))
        report = writer.wait("committed", 60)
        assert report is not None
        assert report.kind == "failed"
    assert 1 in CheckpointStore(folder).steps()
    assert value_of(folder, 1) == 1.0


def _raising(error: BaseException) -> Any:
    def raising(*_: Any, **__: Any) -> Any:
        raise error

    return raising
