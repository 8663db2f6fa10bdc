"""Packing: WebDataset reads what was packed, and the bytes are the same however often it was stopped."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import signal
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from gradus.data.shards import packing
from gradus.data.shards.columns import file_digest
from gradus.data.shards.description import Description
from gradus.data.shards.destination import locked
from gradus.data.shards.origins import ImageFolders, Origin, OwnDataset, Records
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.shards.tar import ShardWriter
from gradus.data.split import Split, held_out_documents
from gradus.schema.errors import GradusError, InputError

SMALL = HowToPack(shard_bytes=2**16)


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """All samples, as WebDataset gives them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import webdataset

        urls = sorted(map(str, folder.glob("shard-*.tar")))
        return list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False))


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file_digest(file).xxh3_64 for file in sorted(folder.rglob("*")) if file.is_file()}


# --- what WebDataset reads


def test_webdataset_reads_pictures_and_classes(images: Path, tmp_path: Path) -> None:
    packed = pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1)
    assert packed.new > 1
    assert all(shard.bytes <= SMALL.shard_bytes for shard in packed.description.shards)
    found = samples_of(tmp_path / "d")
    assert len(found) == 61
    assert len({sample["__key__"] for sample in found}) == 61
    for sample in found:
        label = ("ant", "bee", "cat").index(sample["__key__"].split("/")[0])
        assert sample["cls"] == str(label).encode()
    by_key = {sample["__key__"]: sample for sample in found}
    assert by_key["bee/img_03"]["jpg"] == (images / "bee" / "img.03.jpg").read_bytes()
    assert by_key["ant/img_00-png"]["png"] == (images / "ant" / "img.00.png").read_bytes()
    description = packed.description
    assert (description.content, description.classes, description.label) == ("images", ("ant", "bee", "cat"), "label")
    assert [(part.name, part.suffixes) for part in description.parts] == [
        ("image", ("jpg", "png")),
        ("label", ("cls",)),
    ]


def test_every_document_of_jsonl_is_packed_once_and_in_order(jsonl: Path, tmp_path: Path) -> None:
    wanted = [
        json.loads(line)["text"]
        for file in sorted(jsonl.glob("*.jsonl"))
        for line in file.read_text().splitlines()
        if line
    ]
    packed = pack(Records(str(jsonl)), tmp_path / "d", SMALL, workers=1)
    assert [sample["txt"].decode() for sample in samples_of(tmp_path / "d")] == wanted
    assert packed.description.content == "text"
    (tmp_path / "zipped").mkdir()
    for file in jsonl.glob("*.jsonl"):
        (tmp_path / "zipped" / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    pack(Records(str(tmp_path / "zipped")), tmp_path / "z", SMALL, workers=1)
    assert [sample["txt"].decode() for sample in samples_of(tmp_path / "z")] == wanted


@pytest.mark.parametrize("size", [2**16, 2**16 + 1, 70_001])
def test_lines_that_cross_the_border_of_two_units_are_packed_once(tmp_path: Path, size: int) -> None:
    lines = [json.dumps({"text": f"{number} " + "x" * (number % 700)}) for number in range(800)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    origin = Records(str(tmp_path / "a.jsonl"))
    units = origin.units(size)
    assert len(units) > 3
    texts = [sample.document for number, unit in enumerate(units) for sample in origin.samples(number, unit)]
    assert [text[0].split()[0] for text in texts if text] == [str(number) for number in range(800)]


def test_each_column_of_parquet_is_a_part_and_bytes_keep_their_kind(tmp_path: Path) -> None:
    streams = []
    for number in range(12):
        stream = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 0, 0)).save(stream, "png" if number % 2 else "jpeg")
        streams.append(stream.getvalue())
    table = pyarrow.table(
        {
            "image": [{"bytes": data, "path": None} for data in streams],  # as Hugging Face stores them
            "caption": [f"picture {number}" for number in range(12)],
            "label": [number % 3 for number in range(12)],
            "score": [number / 2 for number in range(12)],
            "box": [[1, 2, number] for number in range(12)],
        }
    )
    features = {"info": {"features": {"label": {"names": ["ant", "bee", "cat"]}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(features)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    packed = pack(Records(str(tmp_path / "a.parquet")), tmp_path / "d", SMALL, workers=1)
    found = samples_of(tmp_path / "d")
    assert [sample.get("image.png", sample.get("image.jpg")) for sample in found] == streams
    assert found[7]["caption.txt"] == b"picture 7"
    assert (found[7]["label.cls"], found[7]["score.json"], found[7]["box.json"]) == (b"1", b"3.5", b"[1, 2, 7]")
    assert (packed.description.content, packed.description.classes) == ("samples", ("ant", "bee", "cat"))
    only = pack(Records(str(tmp_path / "a.parquet"), columns=("image", "label")), tmp_path / "e", SMALL, workers=1)
    assert only.description.content == "images"


class Own:
    """A dataset of a user's, with chance in it."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "x": torch.full((3,), index, dtype=torch.bfloat16),
            "noise": np.random.rand(2) + random.random() + torch.rand(2).numpy(),
            "title": f"number {index}",
            "picture": Image.new("L", (4, 4), index),
            "label": np.int64(index % 4),
            "nothing": None,
        }


def own_split(split: Split) -> Any:
    return Own(30) if split == "train" else Own(5)


def test_a_users_dataset_is_packed_by_its_keys(tmp_path: Path) -> None:
    pack(OwnDataset("own", own_split), tmp_path / "d", SMALL, workers=1)
    packed = pack(OwnDataset("own", own_split), tmp_path / "e", HowToPack(shard_bytes=2**17), workers=1)
    found = samples_of(tmp_path / "d")
    assert packed.description.samples == {"train": 30, "validation": 5}
    assert np.load(io.BytesIO(found[9]["x.npy"])).tolist() == [9, 9, 9]
    assert Image.open(io.BytesIO(found[9]["picture.png"])).getpixel((0, 0)) == 9
    assert (found[9]["title.txt"], found[9]["label.cls"]) == (b"number 9", b"1")
    # What is drawn at random depends on the sample alone.
    assert [s["noise.npy"] for s in found] == [s["noise.npy"] for s in samples_of(tmp_path / "e")]
    assert found[0]["noise.npy"] != found[1]["noise.npy"]


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"item 0: 'x' is object, which cannot be packed"):
        pack(OwnDataset("own", lambda split: [{"x": object()}]), tmp_path / "d", SMALL, workers=1)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(InputError, match=r"bad.jsonl, line 2: not valid JSON"):
        pack(Records(str(tmp_path / "bad.jsonl")), tmp_path / "e", SMALL, workers=1)


def test_an_origin_without_samples_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "folder" / "class").mkdir(parents=True)
    for origin in (Records(str(tmp_path / "empty.jsonl")), ImageFolders(tmp_path / "folder")):
        with pytest.raises(InputError, match="there is nothing to pack in it"):
            pack(origin, tmp_path / "d", SMALL, workers=1)
        assert not (tmp_path / "d").exists()


# --- the same bytes


def test_the_number_of_workers_does_not_show(images: Path, tmp_path: Path) -> None:
    pack(ImageFolders(images), tmp_path / "one", SMALL, workers=1)
    pack(ImageFolders(images), tmp_path / "three", SMALL, workers=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


def packed_until_killed(origin: Origin, folder: Path, after: int) -> int:
    """Pack in a child that is killed at one of the moments that could matter, counted; its exit status."""
    child = os.fork()
    if child == 0:
        left = after

        def moment(function: Any) -> Any:
            def counted(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **named)

            return counted

        for owner, name in ((ShardWriter, "add"), (ShardWriter, "close"), (Path, "replace"), (os, "fsync")):
            setattr(owner, name, moment(getattr(owner, name)))
        packing.shutil.rmtree = moment(shutil.rmtree)  # type: ignore[assignment]
        try:
            pack(origin, folder, SMALL, workers=1)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_goes_on_and_ends_with_the_same_bytes(images: Path, tmp_path: Path, every: int) -> None:
    origin = ImageFolders(images)
    whole = pack(origin, tmp_path / "whole", SMALL, workers=1)
    wanted = contents(tmp_path / "whole")
    for after in range(0, 400, every):
        folder = tmp_path / f"at-{after}"
        killed = os.WIFSIGNALED(packed_until_killed(origin, folder, after))
        packed = pack(origin, folder, SMALL, workers=1)
        assert contents(folder) == wanted
        assert packed.new + packed.kept == len(whole.description.shards)
        if not killed:
            break
    assert not killed
    assert after > 70


def test_killed_again_and_again_it_ends_with_the_same_bytes(images: Path, tmp_path: Path) -> None:
    origin = ImageFolders(images)
    pack(origin, tmp_path / "whole", SMALL, workers=1)
    for after in range(2, 400, 7):
        if not os.WIFSIGNALED(packed_until_killed(origin, tmp_path / "again", after)):
            break
    assert contents(tmp_path / "again") == contents(tmp_path / "whole")


def test_a_finished_shard_is_kept_only_if_it_is_whole(images: Path, tmp_path: Path) -> None:
    origin, folder = ImageFolders(images), tmp_path / "d"
    total = pack(origin, tmp_path / "whole", SMALL, workers=1).new
    packed_until_killed(origin, folder, 65)
    first, second = sorted((folder / ".packing").glob("*.tar"))[:2]
    data = bytearray(first.read_bytes())
    data[700] ^= 1
    first.write_bytes(data)
    second.write_bytes(second.read_bytes()[:-1])
    finished = len(list((folder / ".packing").glob("unit-*.index")))
    packed = pack(origin, folder, SMALL, workers=1)
    assert (packed.new, packed.kept) == (total - finished + 2, finished - 2)
    assert contents(folder) == contents(tmp_path / "whole")


def test_packing_again_writes_nothing_and_tells_of_damage(images: Path, tmp_path: Path) -> None:
    pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "d").iterdir()}
    again = pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1)
    assert (again.new, again.kept) == (0, len(again.description.shards))
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "d").iterdir()} == before
    (tmp_path / "d" / "shard-000001.tar").write_bytes(b"")
    with pytest.raises(GradusError, match=r"shard-000001.tar is not as it was written"):
        pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1)


# --- refusals


def test_a_folder_with_other_data_is_refused_and_left_alone(images: Path, jsonl: Path, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("five years")
    pack(ImageFolders(images), tmp_path / "packed", SMALL, workers=1)
    for folder, why in (("own", "has other data in it: thesis.tex"), ("packed", "of other data, or of the same with")):
        before = contents(tmp_path / folder)
        with pytest.raises(InputError, match=why):
            pack(Records(str(jsonl)), tmp_path / folder, SMALL, workers=1)
        assert contents(tmp_path / folder) == before
    with pytest.raises(InputError, match="with other options"):
        pack(ImageFolders(images), tmp_path / "packed", HowToPack(shard_bytes=2**17), workers=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        pack(ImageFolders(images), tmp_path / "file", SMALL, workers=1)


def test_an_unfinished_packing_of_something_else_is_refused(images: Path, jsonl: Path, tmp_path: Path) -> None:
    packed_until_killed(ImageFolders(images), tmp_path / "d", 65)
    with pytest.raises(InputError, match="holds an unfinished packing of other data"):
        pack(Records(str(jsonl)), tmp_path / "d", SMALL, workers=1)


def test_two_packings_into_one_folder_are_refused(images: Path, tmp_path: Path) -> None:
    with (
        locked(tmp_path / "d"),
        pytest.raises(GradusError, match="another process is packing into"),
    ):
        pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1)
    assert pack(ImageFolders(images), tmp_path / "d", SMALL, workers=1).new > 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_and_what_was_finished_counts(
    images: Path, tmp_path: Path, small_disk: Path, workers: int
) -> None:
    whole = pack(ImageFolders(images), tmp_path / "whole", SMALL, workers=1)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(150_000))
    with pytest.raises(GradusError, match=r"the disk is full: .* GiB are free"):
        pack(ImageFolders(images), small_disk / "d", SMALL, workers=workers)
    assert not list(small_disk.rglob("*.partial"))
    assert not (small_disk / "d" / "dataset.json").exists()
    finished = len(list((small_disk / "d" / ".packing").glob("unit-*.index")))
    filler.unlink()
    packed = pack(ImageFolders(images), small_disk / "d", SMALL, workers=workers)
    assert packed.kept == finished
    assert packed.new + packed.kept == whole.new
    assert contents(small_disk / "d") == contents(tmp_path / "whole")


# --- what is held out


def test_documents_are_held_out_as_the_text_source_would(jsonl: Path, tmp_path: Path) -> None:
    everything = pack(Records(str(jsonl)), tmp_path / "all", SMALL, workers=1)
    texts = [sample["txt"] for sample in samples_of(tmp_path / "all")]
    packed = pack(Records(str(jsonl), validation=0.05), tmp_path / "d", SMALL, workers=1)
    held_out = held_out_documents(len(texts), 0.05)
    assert held_out is not None
    chosen = [text for held in (False, True) for text, out in zip(texts, held_out, strict=True) if out == held]
    assert [sample["txt"] for sample in samples_of(tmp_path / "d")] == chosen
    assert everything.description.samples == {"train": 400, "validation": 0}
    assert packed.description.samples == {"train": 380, "validation": 20}
    with pytest.raises(InputError, match=r"--validation: 0.001 of 400 documents in .* is less than one"):
        pack(Records(str(jsonl), validation=0.001), tmp_path / "e", SMALL, workers=1)


def test_a_description_that_was_read_is_the_one_that_was_written(images: Path, tmp_path: Path) -> None:
    packed = pack(ImageFolders(images, 0.1), tmp_path / "d", SMALL, workers=1)
    document = json.loads((tmp_path / "d" / "dataset.json").read_text())
    assert Description.model_validate(document) == packed.description
    assert packed.description.samples == {"train": 55, "validation": 6}
