"""The token cache: built once, whole or not at all, by one of many processes; another input is another entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gradus_command import wait_until

from gradus.data import token_cache
from gradus.data.source import open_source, prepare_source
from gradus.data.token_cache import STALE_SECONDS, DamagedEntry, cache_folder, cached, meta_of
from gradus.schema.errors import GradusError, InputError

BUILD = """
import sys, time
from pathlib import Path
from gradus.data.token_cache import cached

def build(work):
    with Path(sys.argv[2]).open("a") as log:
        log.write("built\\n")
    time.sleep(float(sys.argv[3]))
    (work / "tokens.bin").write_bytes(b"12345")
    return {}

print(cached(Path(sys.argv[1]), "key", build))
"""


def start(folder: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(folder), str(log), str(seconds)], stdout=subprocess.PIPE, text=True
    )


def builds(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def texts(path: Path, **options: Any) -> Any:
    return open_source("text", {"path": str(path), "context": 4, "validation": 0, **options}, "train", 1)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps({"text": f"text number {n}", "other": "else"}) + "\n" for n in range(20)))
    return file


def test_of_many_processes_one_builds_and_all_find_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start(tmp_path / "cache", log, 0.5) for _ in range(6)]
    outputs = {process.communicate(timeout=60)[0] for process in processes}
    assert outputs == {f"{tmp_path / 'cache' / 'key'}\n"}
    assert builds(log) == 1
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == ["key"], "no lock, no half-made folder"


def test_a_builder_that_was_killed_is_replaced_at_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "cache", tmp_path / "log"
    killed = start(folder, log, 60)
    wait_until(lambda: builds(log), killed)
    waiting = start(folder, log, 0)
    time.sleep(0.3)
    killed.kill()
    killed.communicate()
    assert waiting.communicate(timeout=0.8 * STALE_SECONDS)[0], "a builder elsewhere would be waited for for longer"
    assert meta_of(folder / "key")["files"] == {"tokens.bin": 5}
    assert [entry.name for entry in folder.iterdir()] == ["key"], "what the killed one left is gone"


def test_a_silent_lock_of_another_node_is_taken_over_and_a_beating_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "key.lock"
    lock.write_text("another-node-17")
    looks, beats = 0, 20

    def sleep(seconds: float) -> None:
        """Between two looks of the one who waits, a minute of a clock that nobody else has goes by."""
        nonlocal looks
        looks += 1
        if looks <= beats:
            os.utime(lock, ns=(looks, looks))

    monkeypatch.setattr(token_cache, "time", SimpleNamespace(monotonic=lambda: 60.0 * looks, sleep=sleep))
    assert cached(tmp_path, "key", lambda work: {}) == tmp_path / "key"
    silent = 60.0 * (looks - 1 - beats)  # from the look that saw its last sign of life, one after it was given
    assert looks > beats, "as long as its builder is alive, it is not taken over"
    assert STALE_SECONDS < silent <= STALE_SECONDS + 120


def test_a_failed_build_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    def fails(work: Path) -> dict[str, Any]:
        (work / "half.bin").write_bytes(b"half")
        raise InputError("broken line")

    with pytest.raises(InputError, match="broken line"):
        cached(tmp_path / "cache", "key", fails)
    assert not list((tmp_path / "cache").iterdir())
    assert cached(tmp_path / "cache", "key", lambda work: {}).is_dir()


def test_the_same_input_is_tokenised_once(corpus: Path, cache: Path) -> None:
    texts(corpus)
    before = {file: file.stat().st_mtime_ns for file in cache.rglob("*")}
    texts(corpus, context=2, limit=3)  # how it is cut up is not kept
    prepare_source("text", {"path": str(corpus), "context": 4, "validation": 0})
    assert {file: file.stat().st_mtime_ns for file in cache.rglob("*")} == before


@pytest.mark.parametrize("change", ["content", "field", "tokenizer", "validation"])
def test_another_input_is_another_entry(corpus: Path, cache: Path, change: str) -> None:
    first = texts(corpus)
    options: dict[str, Any] = {}
    if change == "content":
        corpus.write_text(corpus.read_text() + '{"text": "one more, and a long one"}\n')
    else:
        options = {
            "field": {"field": "other"},
            "tokenizer": {"tokenizer": {"train": "bpe", "vocabulary": 270}},
            "validation": {"validation": 0.2},
        }[change]
    second = texts(corpus, **options)
    assert first.text.filename != second.text.filename
    assert len(list(cache.glob("*/train.tokens.bin"))) == 2


def test_the_entry_says_what_it_was_made_from(corpus: Path) -> None:
    source = texts(corpus)
    meta = meta_of(Path(source.text.filename).parent)
    assert meta["tokenizer_hash"] == source.tokenizer_hash == "bytes-1"
    assert (meta["vocabulary"], meta["documents"]["train"], meta["path"]) == (256, 20, str(corpus))


def test_a_damaged_entry_is_not_trained_on(corpus: Path) -> None:
    file = Path(texts(corpus).text.filename)
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(GradusError, match=r"train.tokens.bin has \d+ bytes, expected \d+") as caught:
        texts(corpus)
    assert caught.value.hint == f"delete {file.parent}; it is made again"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, corpus: Path) -> None:
    source = texts(corpus, cache=str(tmp_path / "mine"))
    assert Path(source.text.filename).is_relative_to(tmp_path / "mine")
    assert cache_folder(None) == Path(os.environ["GRADUS_CACHE"]) / "tokens"
    monkeypatch.delenv("GRADUS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder(None) == Path("/x/gradus/tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder(None) == Path("/home/me/.cache/gradus/tokens")


def test_a_cache_that_cannot_be_written_says_how_to_choose_another(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"data.cache: tokens cannot be kept in .*file") as caught:
        texts(corpus, cache=str(tmp_path / "file"))
    assert "GRADUS_CACHE" in str(caught.value.hint)


def test_a_bit_that_flipped_in_the_cache_is_found_before_ranks_open_it(corpus: Path, tmp_path: Path) -> None:
    keys = {"path": str(corpus), "context": 4, "validation": 0, "cache": str(tmp_path / "cache")}
    mixed = {"sources": {"a": {"use": "text", "weight": 1, **keys}}}
    prepare_source("text", keys)
    prepare_source("text", keys)
    [file] = (tmp_path / "cache").glob("*/train.tokens.bin")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    for use, options in (("text", keys), ("mixture", mixed)):
        with pytest.raises(DamagedEntry, match=r"train.tokens.bin is not as it was written") as caught:
            prepare_source(use, options)
        assert str(file.parent) in str(caught.value.hint)


def test_a_bit_that_flipped_in_a_packing_plan_is_found_as_it_is_opened(corpus: Path, tmp_path: Path) -> None:
    keys = {"cache": str(tmp_path / "cache"), "packing": True}
    texts(corpus, **keys)
    [file] = (tmp_path / "cache").glob("*/begins.bin")
    data = bytearray(file.read_bytes())
    data[0] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedEntry, match=r"begins.bin is not as it was written"):
        texts(corpus, **keys)


def test_an_entry_of_an_earlier_version_has_no_digests_and_is_used(corpus: Path, tmp_path: Path) -> None:
    keys = {"path": str(corpus), "context": 4, "validation": 0, "cache": str(tmp_path / "cache")}
    prepare_source("text", keys)
    [file] = (tmp_path / "cache").glob("*/meta.json")
    meta = json.loads(file.read_text())
    del meta["digests"]
    file.write_text(json.dumps(meta))
    prepare_source("text", keys)
    assert len(open_source("text", keys, "train", 1)) > 0
