"""A node's own copy of the data: the same bytes, once, whatever happens in between."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gradus.data import staged_copy, staging
from gradus.data.loader import Indexed, Slices
from gradus.data.node_share import shards_needed
from gradus.data.order import AsLaid, Shuffled
from gradus.data.orders import order_for
from gradus.data.position import specification_of
from gradus.data.shards.origins import ImageFolders
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.source import open_source
from gradus.data.staging import Job, Staged, stage_folder, stage_path, staged_block
from gradus.schema.errors import GradusError
from gradus.schema.recipe import DataBlock, Recipe
from gradus.training.building import open_data

# Another process that stages, slowly: `stage(source, folder, job name)`.
STAGE = """
import sys, time, json, dataclasses
from pathlib import Path
from gradus.data import staged_copy
from gradus.data.staging import Job, stage_path
moved = staged_copy._Work._moved
def slowly(self, count):
    time.sleep(float(sys.argv[4]))
    moved(self, count)
staged_copy._Work._moved = slowly
done = stage_path(sys.argv[1], Path(sys.argv[2]), sys.argv[2], Job(sys.argv[3]))
print(json.dumps(dataclasses.asdict(done)), flush=True)
sys.stdin.read()  # and uses it until it is told to leave
"""


def start(source: Path, to: Path, job: str = "a job", seconds: float = 0.0) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STAGE, str(source), str(to), job, str(seconds)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def outcome(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    found: dict[str, Any] = json.loads(process.stdout.readline())
    return found


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=60)


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    yield
    while staging._held:
        staging._held.pop().close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of two classes, one of which is a link to elsewhere."""
    root = tmp_path / "pictures"
    for name, at in (("ant", root), ("bee", tmp_path / "elsewhere")):
        (at / name).mkdir(parents=True)
        for number in range(6):
            pixels = np.random.default_rng(number + len(name)).integers(0, 255, (60, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(at / name / f"{number}.png")
    (root / "bee").symlink_to(tmp_path / "elsewhere" / "bee")
    return root


@pytest.fixture
def shards(folder: Path, tmp_path: Path) -> Path:
    pack(ImageFolders(folder), tmp_path / "packed", HowToPack(shard_bytes=2**16), workers=1)
    assert len(list((tmp_path / "packed").glob("*.tar"))) > 1
    return tmp_path / "packed"


def staged(path: Path | str, to: Path, job: str = "a job", wanted: set[str] | None = None) -> Staged:
    return stage_path(str(path), to, str(to), Job(job), wanted)


def contents(root: Path) -> dict[str, bytes]:
    found = {}
    for place, _, files in os.walk(root, followlinks=True):
        found |= {os.path.relpath(os.path.join(place, f), root): Path(place, f).read_bytes() for f in files}
    return found


def size(root: Path) -> int:
    return sum(map(len, contents(root).values()))


def test_a_copy_has_the_same_files_and_is_not_made_twice(folder: Path, tmp_path: Path):
    done = staged(folder, tmp_path / "node", "first")
    assert done.here
    assert contents(Path(done.path)) == contents(folder)
    assert (done.copied_bytes, done.reused_bytes) == (size(folder), 0)
    again = staged(folder, tmp_path / "node", "after a requeue")
    assert (again.path, again.copied_bytes, again.reused_bytes) == (done.path, 0, size(folder))


def test_other_ranks_of_a_job_do_not_look_at_the_source_again(folder: Path, tmp_path: Path, monkeypatch):
    done = staged(folder, tmp_path / "node")
    monkeypatch.setattr(staging, "_listing", lambda path: pytest.fail("looked at the source"))
    assert staged(folder, tmp_path / "node") == done


def test_a_damaged_or_missing_file_of_a_copy_is_made_again(folder: Path, tmp_path: Path):
    done = staged(folder, tmp_path / "node", "first")
    (Path(done.path) / "ant" / "0.png").write_bytes(b"short")
    (Path(done.path) / "ant" / "1.png").unlink()
    again = staged(folder, tmp_path / "node", "second")
    expected = sum((folder / "ant" / name).stat().st_size for name in ("0.png", "1.png"))
    assert again.copied_bytes == expected
    assert contents(Path(again.path)) == contents(folder)


def test_a_file_of_a_copy_that_was_written_to_since_is_made_again(folder: Path, tmp_path: Path):
    done = staged(folder, tmp_path / "node", "first")
    file, same = Path(done.path) / "bee" / "3.png", Path(done.path) / "bee" / "2.png"
    kept = file.read_bytes()
    file.write_bytes(b"\0" * len(kept))
    same.write_bytes(same.read_bytes())
    again = staged(folder, tmp_path / "node", "second")
    assert again.copied_bytes == len(kept)
    assert file.read_bytes() == kept
    assert "GiB" not in again.note
    assert "KiB" in again.note


def test_after_the_machine_went_down_every_byte_is_compared(folder: Path, tmp_path: Path, monkeypatch):
    done = staged(folder, tmp_path / "node", "before")
    file = Path(done.path) / "bee" / "3.png"
    kept = file.read_bytes()
    before = file.stat()
    file.write_bytes(b"\0" * len(kept))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a disk forgets what it was given
    assert staged(folder, tmp_path / "node", "same boot").copied_bytes == 0
    monkeypatch.setattr(staged_copy, "boot", lambda: "another")
    again = staged(folder, tmp_path / "node", "next boot")
    assert again.copied_bytes == len(kept)
    assert file.read_bytes() == kept


def test_a_process_that_is_killed_in_the_middle_is_completed_by_the_next(tmp_path: Path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number:02}.bin").write_bytes(os.urandom(1000 + number))
    process = start(source, tmp_path / "node", seconds=0.1)
    deadline = time.monotonic() + 60
    whole: list[str] = []
    while len(whole) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
        whole = [line for file in (tmp_path / "node").rglob("files.jsonl") for line in file.read_text().splitlines()]
    process.send_signal(signal.SIGKILL)
    end(process)
    assert 3 <= len(whole) < 20
    done = staged(source, tmp_path / "node", "next")
    assert contents(Path(done.path)) == contents(source)
    assert done.reused_bytes >= sum(json.loads(line)["bytes"] for line in whole)
    assert done.copied_bytes > 0


@pytest.mark.slow
def test_of_two_jobs_at_the_same_time_one_copies_and_both_have_all_of_it(folder: Path, tmp_path: Path):
    processes = [start(folder, tmp_path / "node", job, seconds=0.02) for job in ("one", "other")]
    found = [outcome(process) for process in processes]
    for process in processes:
        end(process)
    assert sorted(one["copied_bytes"] for one in found) == [0, size(folder)]
    assert len({one["path"] for one in found}) == 1
    assert contents(Path(found[0]["path"])) == contents(folder)


def test_a_source_that_changed_gets_a_copy_of_its_own_and_leaves_the_other_alone(folder: Path, tmp_path: Path):
    before = staged(folder, tmp_path / "node", "one")
    old = contents(Path(before.path))
    (folder / "ant" / "0.png").write_bytes(b"something else")
    after = staged(folder, tmp_path / "node", "other")
    assert after.path != before.path
    assert contents(Path(before.path)) == old
    assert contents(Path(after.path)) == contents(folder)


class Free:
    def __init__(self, free: int) -> None:
        self.free = free


def test_without_room_the_source_is_read_and_a_note_says_so(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: Free(1000))
    done = staged(folder, tmp_path / "node")
    assert (done.here, done.path) == (False, str(folder))
    assert "free are 1000 B" in done.note


@pytest.mark.parametrize(("files", "size"), [(8, 2**19), (1, 2**21)], ids=["no room for data", "none for the record"])
def test_a_disk_that_fills_up_meanwhile_is_left_as_it_was(tmp_path: Path, monkeypatch, files: int, size: int):
    source, node = tmp_path / "source", tmp_path / "node"
    source.mkdir()
    node.mkdir()
    for number in range(files):
        (source / f"{number}.bin").write_bytes(os.urandom(size))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(node)], check=True)
    try:
        monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: Free(2**40))
        done = staged(source, node)
        assert (done.here, done.path) == (False, str(source))
        assert "No space left" in done.note
        assert os.statvfs(node).f_bavail * os.statvfs(node).f_frsize > 1.8 * 2**20
    finally:
        subprocess.run(["umount", "--lazy", str(node)], check=True)


def test_copies_that_nobody_uses_make_room_and_others_stay(tmp_path: Path, monkeypatch):
    sources = {}
    for name in ("used", "unused", "new"):
        sources[name] = tmp_path / name
        sources[name].mkdir()
        (sources[name] / "file").write_bytes(os.urandom(1000))
    node = tmp_path / "node"
    places = {name: staged(sources[name], node).path for name in ("used", "unused")}
    staging._let_go(Path(places["unused"]).parents[1])  # as when its process ends

    def usage(path: Path) -> Free:
        taken = sum(1000 for place in places.values() if Path(place).exists())
        return Free(2500 - taken)

    monkeypatch.setattr(staging.shutil, "disk_usage", usage)
    assert staged(sources["new"], node).here
    assert Path(places["used"]).exists()
    assert not Path(places["unused"]).exists()


def test_a_folder_that_cannot_be_written_is_no_failure(folder: Path, tmp_path: Path):
    (tmp_path / "node").write_text("a file")
    done = staged(folder, tmp_path / "node")
    assert (done.here, done.path) == (False, str(folder))
    assert "cannot be used" in done.note


def test_a_request_to_stop_is_heard_in_the_middle_and_what_is_copied_stays(folder: Path, tmp_path: Path):
    seen: list[int] = []
    job = Job("stopped", lambda done, total: seen.append(done), lambda: bool(seen and seen[-1] > 0))
    done = stage_path(str(folder), tmp_path / "node", "here", job)
    assert not done.here
    assert "asked to stop" in done.note
    assert staged(folder, tmp_path / "node", "next").reused_bytes > 0


def test_progress_ends_with_all_bytes(folder: Path, tmp_path: Path):
    seen: list[tuple[int, int | None]] = []
    stage_path(str(folder), tmp_path / "node", "here", Job("a", lambda done, total: seen.append((done, total))))
    assert seen[-1] == (size(folder), size(folder))
    assert seen == sorted(seen)


# --- shards


def test_shards_are_compared_with_their_checksums(shards: Path, tmp_path: Path):
    done = staged(shards, tmp_path / "node", "good")
    assert contents(Path(done.path)) == contents(shards)
    damaged = next(shards.glob("*.tar"))
    with damaged.open("r+b") as file:
        file.seek(700)
        file.write(b"\xff\x00\xff")
    with pytest.raises(GradusError, match=damaged.name):
        staged(shards, tmp_path / "other node", "bad")


def test_shards_from_an_address_are_staged(shards: Path, tmp_path: Path):
    import fsspec

    files = fsspec.filesystem("memory")
    for file in shards.iterdir():
        if file.is_file():
            files.pipe_file(f"/staging/{file.name}", file.read_bytes())
    done = staged("memory://staging", tmp_path / "node")
    assert done.here
    assert {name: data for name, data in contents(shards).items() if name in contents(Path(done.path))} == contents(
        Path(done.path)
    )
    assert len(open_source("shards", {"path": done.path}, "train", 1)) > 0


def test_a_node_takes_only_the_shards_it_needs_and_reads_the_rest_where_they_are(shards: Path, tmp_path: Path):
    options = {"validation": 0.0, "size": 8}
    data = Indexed(open_source("shards", {"path": str(shards), **options}, "train", 1))
    source: Any = data.source
    # One sample in each of two steps: those of the first of two ranks, each on its own node.
    wanted = shards_needed(data, AsLaid(data.length), [Slices(2, 1, 1, 0, 4)], range(2))
    numbers = [int(source.part.locate(np.array([number]))[0]) for number in (0, 2)]
    needed = {f"shard-{source.shards.index.shard_of(number):06}.tar" for number in numbers}
    assert wanted == {"": needed}
    done = staged(shards, tmp_path / "node", wanted=wanted[""])
    here = Path(done.path)
    assert {file.name for file in here.glob("*.tar") if not file.is_symlink()} == needed
    assert done.copied_bytes + done.linked_bytes == size(here)
    assert done.linked_bytes > 0
    copy = open_source("shards", {"path": done.path, **options}, "train", 1)
    everything = np.arange(data.length)
    assert all(np.array_equal(a, b) for a, b in zip(source.fetch(everything), copy.fetch(everything), strict=True))
    more = staged(shards, tmp_path / "node", "a run that needs all")
    assert not any(file.is_symlink() for file in here.glob("*.tar"))
    assert more.copied_bytes == done.linked_bytes


def test_the_shards_that_a_node_needs_are_those_of_the_samples_that_its_ranks_take(shards: Path):
    data = Indexed(open_source("shards", {"path": str(shards), "validation": 0.0, "size": 8}, "train", 1))
    source: Any = data.source
    order = Shuffled(3, data.length)
    for rank, first, end in itertools.product((0, 1, 2), (0, 1), (2, 3)):
        slices = Slices(6, 1, 2, rank, 17, ((3, 5),))
        positions = [slices.positions(request)[0] for s in range(first, end) for request in slices.of_step(s)]
        needed = {source.shards.index.shard_of(int(n)) for n in source.part.locate(order.at(np.array(positions)))}
        names = {f"shard-{shard:06}.tar" for shard in needed}
        expected = {} if len(names) == len(source.shards.description.shards) else {"": names}
        assert shards_needed(data, order, [slices], range(first, end)) == expected


def test_all_shards_are_needed_where_the_order_leaves_none_out(shards: Path):
    data = Indexed(open_source("shards", {"path": str(shards), "validation": 0.0, "size": 8}, "train", 1))
    slices = [Slices(2, 1, 1, rank, data.length) for rank in (0, 1)]
    assert shards_needed(data, Shuffled(1, data.length), slices, range(data.length // 2)) == {}


# --- archives


def archive(folder: Path, to: Path) -> Path:
    if to.suffix == ".zip":
        with zipfile.ZipFile(to, "w") as packed:
            for name, data in contents(folder).items():
                packed.writestr(f"{folder.name}/{name}", data)
        return to
    with tarfile.open(to, "w:gz" if to.suffix == ".gz" else "w") as tar:
        for name, data in contents(folder).items():
            member = tarfile.TarInfo(f"{folder.name}/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return to


@pytest.mark.parametrize("name", ["pictures.tar", "pictures.tar.gz", "pictures.zip"])
def test_an_archive_of_pictures_is_unpacked_once(folder: Path, tmp_path: Path, name: str):
    packed = archive(folder, tmp_path / name)
    done = staged(packed, tmp_path / "node", "first")
    assert contents(Path(done.path)) == contents(folder)
    again = staged(packed, tmp_path / "node", "second")
    assert (again.path, again.copied_bytes, again.reused_bytes) == (done.path, 0, size(folder))
    images = {"path": done.path, "size": 16}
    assert len(open_source("images", images, "train", 1)) == len(
        open_source("images", {**images, "path": str(folder)}, "train", 1)
    )


def test_what_was_half_unpacked_is_unpacked_anew(folder: Path, tmp_path: Path):
    packed = archive(folder, tmp_path / "pictures.tar")
    done = staged(packed, tmp_path / "node", "first")
    copy = next((tmp_path / "node").glob("gradus-*/pictures-*"))
    (copy / "unpacked.json").unlink()  # as if it had been killed before the end
    (Path(done.path) / "ant" / "0.png").unlink()
    (Path(done.path) / "left over").write_text("of a killed process")
    assert contents(Path(staged(packed, tmp_path / "node", "second").path)) == contents(folder)


def test_an_archive_without_room_is_an_error_with_numbers(folder: Path, tmp_path: Path, monkeypatch):
    packed = archive(folder, tmp_path / "pictures.tar")
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda path: Free(1000))
    with pytest.raises(GradusError, match="cannot be unpacked"):
        staged(packed, tmp_path / "node")


# --- recipes


def recipe(**data: Any) -> Recipe:
    return Recipe.from_document({"name": "x", "batch": 4, "steps": 10, "data": data})


def samples(recipe: Recipe) -> list[Any]:
    data = open_data(recipe, "train")
    assert data is not None
    batch = data.fetch(np.arange(data.length))
    return [part.tolist() for part in (batch.values() if isinstance(batch, dict) else batch)]


def specification(recipe: Recipe, opened_with: Recipe) -> dict[str, Any]:
    data = open_data(opened_with, "train")
    assert data is not None
    return specification_of(recipe, data, order_for(data, opened_with.data, recipe.seed, recipe.batch))


def same_after_staging(recipe: Recipe) -> DataBlock:
    block, results = staged_block(recipe.data, Job("a job"))
    assert all(result.here for result in results), results
    moved = recipe.model_copy(update={"data": block})
    assert samples(moved) == samples(recipe)
    assert specification(recipe, moved) == specification(recipe, recipe)
    return block


def test_staging_changes_where_data_is_read_and_nothing_else(folder: Path, shards: Path, tmp_path: Path):
    node = str(tmp_path / "node")
    block = same_after_staging(recipe(use="images", path=str(folder), size=16, stage=node))
    assert block.options["path"].startswith(node)
    same_after_staging(recipe(use="shards", path=str(shards), size=16, stage=node))


def test_of_text_the_tokens_are_staged_with_a_tokenizer_that_was_trained(tmp_path: Path):
    (tmp_path / "web.txt").write_text("of cats and dogs and of the bird that sang " * 40)
    given = {
        "path": str(tmp_path / "web.txt"),
        "context": 8,
        "tokenizer": {"train": "bpe", "vocabulary": 270},
        "stage": str(tmp_path / "node"),
    }
    block = same_after_staging(recipe(use="text", **given))
    assert block.options["path"] == given["path"]
    assert block.options["cache"].startswith(given["stage"])


def test_the_sources_of_a_mixture_are_staged(folder: Path, shards: Path, tmp_path: Path):
    sources = {
        "a": {"use": "images", "path": str(folder), "weight": 1},
        "b": {"use": "shards", "path": str(shards), "weight": 2},
    }
    given = {"sources": sources, "size": 16, "stage": str(tmp_path / "node")}
    block = same_after_staging(recipe(use="mixture", **given))
    assert all(keys["path"].startswith(given["stage"]) for keys in block.options["sources"].values())


def test_data_that_is_made_on_the_spot_has_nothing_to_stage(tmp_path: Path):
    block, results = staged_block(recipe(use="stdlib-text", context=8, stage=str(tmp_path)).data, Job("a job"))
    assert results == []
    assert block.options == {"context": 8}


# --- where to


def test_auto_is_the_folder_of_the_job(tmp_path: Path, monkeypatch):
    for name in ("SLURM_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    assert stage_folder("auto")[0] is None
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(staging, "_is_in_memory", lambda folder: False)
    assert stage_folder("auto")[0] == tmp_path / "tmp"
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "job"))
    assert stage_folder("auto")[0] == tmp_path / "job"


def test_auto_does_not_stage_into_memory_nor_onto_the_disk_where_the_data_is(folder: Path, tmp_path: Path, monkeypatch):
    done = stage_path(str(folder), tmp_path / "node", "auto", Job("a job"))
    assert (done.here, done.path) == (False, str(folder))
    assert "same disk" in done.note
    node = tmp_path / "memory"
    node.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(node)], check=True)
    try:
        monkeypatch.setenv("SLURM_TMPDIR", str(node))
        found, why = stage_folder("auto")
        assert found is None
        assert "memory" in why
        assert stage_folder(str(node))[0] == node
    finally:
        subprocess.run(["umount", "--lazy", str(node)], check=True)


def test_a_variable_in_the_name_of_a_folder_is_filled_in(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("SCRATCH", str(tmp_path))
    assert stage_folder("$SCRATCH/mine")[0] == tmp_path / "mine"
