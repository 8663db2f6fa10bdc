"""The same samples from a folder, from memory:// and from a web server, through fsspec."""

from __future__ import annotations

import http.server
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradus.data.shards.origins import ImageFolders, Records
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.shards.storage import Storage
from gradus.data.shards.verify import verify
from gradus.data.source import open_source
from gradus.schema.errors import GradusError, InputError
from gradus.schema.recipe import Recipe


@pytest.fixture(scope="module")
def packed(images: Path, jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    pack(ImageFolders(images), folder / "images", HowToPack(2**16), workers=1)
    pack(Records(str(jsonl)), folder / "tokens", HowToPack(2**16, tokenizer="bytes"), workers=1)
    pack(Records(str(jsonl)), folder / "text", HowToPack(2**16), workers=1)
    return folder


class Ranged(http.server.SimpleHTTPRequestHandler):
    """Python's own server knows no ranges; one that holds data does."""

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        file = Path(self.translate_path(self.path))
        if wanted is None or not file.is_file():
            super().do_GET()
            return
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        content = file.read_bytes()
        part = content[int(first) : int(last or len(content) - 1) + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


@pytest.fixture(scope="module", params=["memory", "http"])
def remote(packed: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "memory":
        import fsspec

        fsspec.filesystem("memory").put(f"{packed}/", "/data", recursive=True)
        yield "memory://data"
        return
    handler = partial(Ranged, directory=str(packed))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("what", "options"), [("images", {"size": 8}), ("tokens", {"context": 32}), ("text", {"context": 32})]
)
def test_far_away_samples_are_those_of_the_folder(
    packed: Path, remote: str, what: str, options: dict[str, Any]
) -> None:
    numbers = np.array([3, 40, 0, 17])
    here = open_source("shards", {"path": str(packed / what), **options}, "train", 1)
    there = open_source("shards", {"path": f"{remote}/{what}", "verify": True, **options}, "train", 1)
    assert (len(here), here.fingerprint) == (len(there), there.fingerprint)
    one, other = here.fetch(numbers), there.fetch(numbers)
    pairs = zip(*(batch.values() if isinstance(batch, dict) else batch for batch in (one, other)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_far_away_data_can_be_verified(remote: str) -> None:
    assert verify(f"{remote}/images", workers=1).damage == ()


def _first_bytes(storage: Storage, queue: Any) -> None:
    queue.put(storage.open_range("images/shard-000000.tar", 0, 10))


def test_a_worker_that_was_forked_opens_its_own_connections(packed: Path, remote: str) -> None:
    storage = Storage(remote)
    before = storage.open_range("images/shard-000000.tar", 0, 10)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    worker = context.Process(target=_first_bytes, args=(storage, queue))
    worker.start()
    assert queue.get(timeout=30) == before == (packed / "images" / "shard-000000.tar").read_bytes()[:10]
    worker.join()


def test_what_is_not_there_is_named(packed: Path, remote: str) -> None:
    with pytest.raises(InputError, match=r"nowhere has no dataset.json"):
        open_source("shards", {"path": f"{remote}/nowhere"}, "train", 1)
    for storage in (Storage(remote), Storage(str(packed))):
        assert not storage.exists("images/nothing")
        with pytest.raises(InputError, match=r"images/nothing does not exist"):
            storage.open_range("images/nothing", 0, 1)
        with pytest.raises(GradusError, match=r"dataset.json ends too early: \d+ of 10000000 bytes at 2 are there"):
            storage.open_range("images/dataset.json", 2, 10_000_000)


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(InputError, match="s3:// needs the package s3fs, which is not installed") as caught:
        Storage("s3://bucket/data").exists("dataset.json")
    assert caught.value.hint == "pip install fsspec s3fs"
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InputError, match="needs the package aiohttp"):
        Storage("https://somewhere/data").exists("dataset.json")


def test_an_unknown_kind_of_address_is_refused() -> None:
    with pytest.raises(InputError, match="Protocol not known: gopher"):
        Storage("gopher://somewhere").exists("dataset.json")


def test_an_address_in_a_recipe_stays_as_it_is(tmp_path: Path) -> None:
    document = {"name": "a", "data": {"use": "shards", "path": "s3://bucket/data"}, "batch": 1, "steps": 1}
    assert Recipe.from_document(document, folder=tmp_path).data.options["path"] == "s3://bucket/data"


def test_more_shards_than_files_that_may_be_open(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("shards", {"path": str(packed / "images"), "size": 8}, "train", 1)
    wanted = source.fetch(np.arange(len(source)))[0]  # type: ignore[index]
    few = open_source("shards", {"path": str(packed / "images"), "size": 8}, "train", 1)
    storage = few.shards.storage  # type: ignore[attr-defined]
    storage._at_once = 1
    assert np.array_equal(few.fetch(np.arange(len(few)))[0], wanted)  # type: ignore[index]
    assert len(storage._open) == 1
