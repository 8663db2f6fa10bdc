"""Fetch: a file is there whole and checked or not at all, over a real HTTP server that may misbehave."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import http.server
import io
import os
import socket
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradus.data import download as downloads
from gradus.data.download import DownloadError, download
from gradus.data.fetch import Fetched, fetch
from gradus.data.published import PUBLISHED, Published, RemoteFile
from gradus.data.source import open_source
from gradus.data.unpack import unpack
from gradus.schema.errors import GradusError, InputError

CONTENT = os.urandom(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` by their paths; `cut_after` breaks the connection after so many bytes of each answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"/data.bin": CONTENT}
        self.etag = '"one"'
        self.cut_after: list[int] = []
        self.ranges: list[str | None] = []
        self.ignores_ranges = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted, server = self.headers.get("Range"), self.server
        server.ranges.append(wanted)
        content = server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        if self.headers.get("If-Range") not in (None, server.etag) or server.ignores_ranges:
            wanted = None
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted else 0
        if wanted and start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("ETag", server.etag)
        self.end_headers()
        stop = server.cut_after.pop(0) if server.cut_after else len(content)
        self.wfile.write(content[start : start + stop])

    def log_message(self, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloads, "PAUSE_SECONDS", 0.0)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def get(what: str, folder: Path, sha256: str | None = None, base: str | None = None, unpacks: bool = False) -> Fetched:
    return fetch(what, folder, sha256, base, unpacks, lambda name: lambda done, total: None)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_good_download_is_there_with_its_checksum(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    file = RemoteFile("data.bin", len(CONTENT), SHA256)
    done = download(f"{server.url}/data.bin", file, tmp_path / "new", lambda *progress: seen.append(progress))
    assert done.path.read_bytes() == CONTENT
    assert (done.sha256, done.size_bytes, done.new) == (SHA256, len(CONTENT), True)
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert names(tmp_path) == ["new/data.bin"]
    assert not download(f"{server.url}/data.bin", file, tmp_path / "new").new
    assert len(server.ranges) == 1, "what is there is not downloaded again"


def test_a_wrong_checksum_leaves_nothing_in_place(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=f"has SHA-256 {SHA256}, expected {'0' * 64}") as caught:
        get(f"{server.url}/data.bin", tmp_path / "new", sha256="0" * 64)
    assert caught.value.exit_code == 1
    assert not (tmp_path / "new").exists()


def test_a_wrong_size_leaves_nothing_in_place(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match=r"has 300000 bytes, expected 7"):
        download(f"{server.url}/data.bin", RemoteFile("data.bin", 7), tmp_path)
    assert names(tmp_path) == []


def test_a_broken_connection_is_resumed_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.cut_after = [100_000, 50_000]
    assert get(f"{server.url}/data.bin", tmp_path, SHA256).files[0].path.read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-", "bytes=150000-"]


def test_a_server_that_sends_less_than_promised_is_not_believed_and_the_next_call_goes_on(
    server: Server, tmp_path: Path
) -> None:
    server.cut_after = [100_000, 0, 0]
    with pytest.raises(
        DownloadError, match=r"broke off after 100000 bytes: the server sent 100000 of 300000"
    ) as caught:
        get(f"{server.url}/data.bin", tmp_path)
    assert "run it again" in str(caught.value.hint)
    assert not (tmp_path / "data.bin").exists()
    assert (tmp_path / "data.bin.part").stat().st_size == 100_000
    assert get(f"{server.url}/data.bin", tmp_path, SHA256).files[0].path.read_bytes() == CONTENT
    assert server.ranges[-1] == "bytes=100000-"
    assert names(tmp_path) == ["data.bin"]


def test_a_file_that_has_changed_in_between_starts_anew(server: Server, tmp_path: Path) -> None:
    server.cut_after = [100_000, 0, 0]
    with pytest.raises(DownloadError):
        get(f"{server.url}/data.bin", tmp_path)
    server.files["/data.bin"], server.etag = CONTENT[::-1], '"two"'
    assert get(f"{server.url}/data.bin", tmp_path).files[0].path.read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("left", [len(CONTENT), len(CONTENT) + 5, 1000])
def test_a_server_without_ranges_and_a_part_too_long_are_survived(server: Server, tmp_path: Path, left: int) -> None:
    url = f"{server.url}/data.bin"
    (tmp_path / "data.bin.part").write_bytes((CONTENT * 2)[:left])
    (tmp_path / "data.bin.part.json").write_text(f'{{"url": "{url}", "validator": null}}')
    server.ignores_ranges = left == 1000
    assert get(url, tmp_path, SHA256).files[0].path.read_bytes() == CONTENT


def test_a_part_of_another_address_is_not_continued(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(b"something else")
    assert get(f"{server.url}/data.bin", tmp_path, SHA256).files[0].path.read_bytes() == CONTENT
    assert server.ranges == [None]


@pytest.mark.parametrize("path", ["/a%20b.bin", "/a%23b.bin", "/data.bin/", "/x%2Fdata.bin?from=here"])
def test_an_address_is_asked_for_as_it_is(server: Server, tmp_path: Path, path: str) -> None:
    server.files = {path: CONTENT}
    [file] = get(f"{server.url}{path}", tmp_path).files
    assert file.path.read_bytes() == CONTENT
    assert file.path.name == {"/a%20b.bin": "a b.bin", "/a%23b.bin": "a#b.bin"}.get(path, "data.bin")


def test_an_address_is_told_as_it_is(closed_port: str, tmp_path: Path) -> None:
    with pytest.raises(GradusError, match="no connection") as caught:
        get(f"{closed_port}/data.bin#part", tmp_path)
    [file] = caught.value.details["files"]
    assert (file["url"], file["to"]) == (f"{closed_port}/data.bin#part", str(tmp_path / "data.bin"))


def test_a_part_that_another_process_has_just_begun_stays(server: Server, tmp_path: Path) -> None:
    part = tmp_path / "data.bin.part"
    notes = tmp_path / "data.bin.part.json"
    notes.write_text("{}")
    with part.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(DownloadError, match="another process is writing it"):
            get(f"{server.url}/data.bin", tmp_path)
        assert part.exists()
        assert notes.exists()
    assert get(f"{server.url}/data.bin", tmp_path).files[0].path.read_bytes() == CONTENT, "and can be taken over"


def test_a_missing_file_is_told_with_the_servers_words(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DownloadError, match="the server says 404 Not Found"):
        get(f"{server.url}/other.bin", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_an_existing_file_with_another_content_is_left_alone(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.bin").write_text("precious")
    with pytest.raises(DownloadError, match="is there, but it is another file"):
        get(f"{server.url}/data.bin", tmp_path, SHA256)
    assert (tmp_path / "data.bin").read_text() == "precious"


def test_without_a_network_it_says_what_to_copy_where(closed_port: str, tmp_path: Path) -> None:
    with pytest.raises(GradusError, match=r"no connection: .*Connection refused") as caught:
        get("mnist", tmp_path / "mnist", base=f"{closed_port}/mirror/")
    assert caught.value.exit_code == 1
    for file in PUBLISHED["mnist"].files:
        assert f"{file.name}  ({file.size_bytes:,} bytes)" in caught.value.message
        assert f"from    {closed_port}/mirror/{file.name}" in caught.value.message
        assert f"sha256  {file.sha256}" in caught.value.message
        assert f"to      {tmp_path}/mnist/{file.name}" in caught.value.message
    assert len(caught.value.details["files"]) == 4
    assert not (tmp_path / "mnist").exists()


def test_the_next_place_is_asked_where_one_does_not_answer(
    server: Server, closed_port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Published("tiny", (RemoteFile("data.bin", len(CONTENT), SHA256),), (closed_port, server.url))
    monkeypatch.setitem(PUBLISHED, "tiny", data)
    assert get("tiny", tmp_path).files[0].path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("what", "options", "message"),
    [
        ("minst", {}, r"unknown dataset 'minst'; did you mean 'mnist'"),
        ("ftp://a/b", {}, r"unknown dataset"),
        ("http://host/", {}, r"names no file"),
        ("http://host/file", {"sha256": "abc"}, r"--sha256: found 'abc', allowed: 64 hexadecimal digits"),
        ("http://host/file", {"base": "http://x"}, r"--from: an address has its own place"),
        ("mnist", {"sha256": "0" * 64}, r"--sha256: mnist is known"),
        ("mnist", {"base": "/somewhere"}, r"--from: found '/somewhere'"),
    ],
)
def test_bad_input_changes_nothing(tmp_path: Path, what: str, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        get(what, tmp_path / "new", **options)
    assert caught.value.exit_code == 2
    assert not (tmp_path / "new").exists()


# --- the known datasets, in small, where their sources look


def remote(name: str, content: bytes) -> RemoteFile:
    return RemoteFile(name, len(content), hashlib.sha256(content).hexdigest())


def test_mnist_lies_where_its_source_looks(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for known in PUBLISHED["mnist"].files:
        count = 5 if known.name.startswith("train") else 2
        header = [0, 0, 8, 3] if "images" in known.name else [0, 0, 8, 1]
        shape = (count, 28, 28) if "images" in known.name else (count,)
        content = gzip.compress(bytes(header) + np.array(shape, ">u4").tobytes() + bytes(int(np.prod(shape))))
        server.files[f"/mnist/{known.name}"] = content
        files.append(remote(known.name, content))
    monkeypatch.setitem(PUBLISHED, "mnist", Published("mnist", tuple(files), ("http://nowhere.invalid/",)))
    fetched = get("mnist", tmp_path / "here", base=f"{server.url}/mnist")
    assert fetched.recipe == f"data: {{use: mnist, path: {tmp_path}/here}}"
    assert len(open_source("mnist", {"path": str(tmp_path / "here")}, "train", 1)) == 5
    assert len(open_source("mnist", {"path": str(tmp_path / "here")}, "validation", 1)) == 2


def tar_of(members: dict[str, bytes], link: tuple[str, str] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
        if link:
            entry = tarfile.TarInfo(link[0])
            entry.type, entry.linkname = tarfile.SYMTYPE, link[1]
            tar.addfile(entry)
    return out.getvalue()


def test_cifar10_lies_where_its_source_looks_and_nothing_else_is_unpacked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = PUBLISHED["cifar10"]
    members = {name: bytes(size) for name, size in known.members}
    content = tar_of({**members, "cifar-10-batches-bin/readme.html": b"hello", "other.sh": b"rm"})
    server.files["/cifar-10-binary.tar.gz"] = content
    small = Published("cifar10", (remote("cifar-10-binary.tar.gz", content),), (server.url,), known.members)
    monkeypatch.setitem(PUBLISHED, "cifar10", small)
    get("cifar10", tmp_path)
    assert names(tmp_path) == sorted(["cifar-10-binary.tar.gz", *members])
    assert len(open_source("cifar10", {"path": str(tmp_path), "limit": 7}, "train", 1)) == 7
    (tmp_path / "cifar-10-binary.tar.gz").unlink()
    asked = len(server.ranges)
    get("cifar10", tmp_path)
    assert len(server.ranges) == asked, "what is unpacked is not fetched again"


def test_the_checksums_of_known_files_are_checksums() -> None:
    for data in PUBLISHED.values():
        for file in data.files:
            assert file.sha256 is not None
            assert len(bytes.fromhex(file.sha256)) == 32
            assert file.size_bytes


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside-6f1d", "a/../../outside"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    archive, folder = tmp_path / "bad", tmp_path / "inner"
    folder.mkdir()
    if kind == "tar":
        archive.write_bytes(tar_of({"good": b"x", name: b"evil"}))
    else:
        with zipfile.ZipFile(archive, "w") as out:
            out.writestr("good", b"x")
            out.writestr(name, b"evil")
    with pytest.raises(GradusError, match="is refused: it wants to write"):
        unpack(archive, folder)
    assert names(tmp_path) == ["bad"]


def test_an_archive_with_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(tar_of({"good": b"x"}, link=("way-out", "/etc")))
    with pytest.raises(GradusError, match="'way-out' is a link or a device"):
        unpack(tmp_path / "bad", tmp_path)
    assert names(tmp_path) == ["bad"]


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_an_archive_from_an_address_is_unpacked_when_asked(server: Server, tmp_path: Path, kind: str) -> None:
    members = {"texts/a.txt": b"one", "texts/b.txt": b"two"}
    if kind == "tar":
        content = tar_of(members)
    else:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            for name, text in members.items():
                archive.writestr(name, text)
        content = out.getvalue()
    server.files["/archive"] = content
    assert len(get(f"{server.url}/archive", tmp_path / "no").unpacked) == 0
    get(f"{server.url}/archive", tmp_path / "yes", unpacks=True)
    assert names(tmp_path / "yes") == ["archive", "texts/a.txt", "texts/b.txt"]
    (tmp_path / "yes" / "archive").write_bytes(content[:-20])
    with pytest.raises(GradusError, match="cannot be unpacked"):
        unpack(tmp_path / "yes" / "archive", tmp_path / "yes")
