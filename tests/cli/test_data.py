"""`gradus data`: what is printed, and with which exit code."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gradus_command import Gradus


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server of the files in a folder `public`."""
    (tmp_path / "public").mkdir()
    (tmp_path / "public" / "texts.txt").write_bytes(b"to be fetched" * 1000)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    handler = partial(Quiet, directory=str(tmp_path / "public"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_file_is_fetched_and_its_checksum_is_told(gradus: Gradus, url: str, tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"to be fetched" * 1000).hexdigest()
    done = gradus("data", "fetch", f"{url}/texts.txt", "--sha256", sha256, "--to", str(tmp_path / "a"), "--json")
    assert (done.code, done.err) == (0, "")
    assert done.json["files"] == [
        {"path": str(tmp_path / "a" / "texts.txt"), "size_bytes": 13_000, "sha256": sha256, "new": True}
    ]
    again = gradus("data", "fetch", f"{url}/texts.txt", "--to", str(tmp_path / "b"))
    assert again.code == 0
    assert sha256 in again.out
    assert "not checked: no --sha256 was given" in again.out
    wrong = gradus("data", "fetch", f"{url}/texts.txt", "--sha256", "0" * 64, "--to", str(tmp_path / "c"), "--json")
    assert wrong.code == wrong.json["exit_code"] == 1
    assert not (tmp_path / "c").exists()


def test_offline_and_bad_input_have_their_exit_codes(gradus: Gradus, tmp_path: Path) -> None:
    offline = gradus("data", "fetch", "cifar10", "--from", "http://127.0.0.1:9/", "--to", str(tmp_path / "x"), "--json")
    assert offline.code == 1
    assert offline.json["error"]["files"] == [
        {
            "name": "cifar-10-binary.tar.gz",
            "url": "http://127.0.0.1:9/cifar-10-binary.tar.gz",
            "size_bytes": 170_052_171,
            "sha256": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            "to": str(tmp_path / "x" / "cifar-10-binary.tar.gz"),
        }
    ]
    unknown = gradus("data", "fetch", "mnits", "--json")
    assert (unknown.code, unknown.json["error"]["nearest"]) == (2, "mnist")


def chat_recipe(gradus: Gradus, **data: Any) -> str:
    records = [{"prompt": f"Say {n}", "answer": f"{n}!"} for n in range(20)]
    (gradus.folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    model = {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 48}
    return gradus.recipe("chat.yaml", model=model, data={"use": "chat", "path": "chat.jsonl", **data})


def test_show_tells_what_is_trained_on_and_marks_what_is_not_learnt(gradus: Gradus, tmp_path: Path) -> None:
    recipe = chat_recipe(gradus)
    done = gradus("data", "show", recipe, "--json", GRADUS_CACHE=str(tmp_path))
    assert (done.code, done.err) == (0, "")
    found = done.json
    assert (found["training_samples"], found["validation_samples"], found["vocabulary"]) == (18, 2, 256)
    assert found["tokenizer_hash"] == "bytes-1"
    assert [part["in_loss"] for part in found["sample"]] == [False, True]
    people = gradus("data", "show", recipe, "--sample", "17", GRADUS_CACHE=str(tmp_path))
    assert "[[<|user|>\nSay 19\n<|assistant|>\n]]19!<end of text>" in people.out
    beyond = gradus("data", "show", recipe, "--sample", "18", GRADUS_CACHE=str(tmp_path))
    assert beyond.code == 2
    assert "there are 18" in beyond.err


def test_show_works_for_any_data(gradus: Gradus) -> None:
    done = gradus("data", "show", gradus.recipe())
    assert done.code == 0
    assert "training samples" in done.out
    assert "0: torch.float32 [4]" in done.out


def test_a_trained_tokenizer_sizes_the_model_and_trains(gradus: Gradus, tmp_path: Path) -> None:
    (gradus.folder / "corpus").mkdir()
    for number in range(30):
        (gradus.folder / "corpus" / f"{number}.md").write_text(f"# Page {number}\nthe same words again and again\n" * 9)
    model = {"use": "gpt", "layers": 1, "width": 16, "heads": 2, "context": 16}
    data = {"use": "text", "path": "corpus", "tokenizer": {"train": "bpe", "vocabulary": 280}}
    recipe = gradus.recipe("text.yaml", name="text", model=model, data=data, steps=2)
    done = gradus("train", recipe, "--nproc", "2", "--run-id", "text", "--json", GRADUS_CACHE=str(tmp_path))
    assert done.code == 0, done.err
    written = (gradus.run("text", "text") / "attempts" / "1" / "recipe.yaml").read_text()
    assert "vocabulary: 280" in written.split("data:")[0], "the model knows the tokens of its data"
    small = gradus("train", recipe, "--set", "model.vocabulary=100", "--json", GRADUS_CACHE=str(tmp_path))
    assert small.code == 2
    assert small.json["error"]["field"] == "model.vocabulary"
    assert small.json["error"]["hint"] == "--set model.vocabulary=280"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "x", "answer": "y"}\n{"prompt": "x"\n', "line 2: not valid JSON"),
        ('{"q": "x"}\n', "no key 'prompt'"),
    ],
)
def test_a_broken_file_stops_a_run_with_its_line(gradus: Gradus, tmp_path: Path, content: str, message: str) -> None:
    recipe = chat_recipe(gradus)
    (gradus.folder / "chat.jsonl").write_text(content)
    done = gradus("train", recipe, "--json", GRADUS_CACHE=str(tmp_path))
    assert done.code == 2
    assert message in done.json["error"]["message"]
