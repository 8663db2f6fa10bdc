"""Tensor files and weights: a header is believed only where everything adds up, and each kind of folder is known."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradus.checkpoint.reading import read_tensor
from gradus.checkpoint.tensor_file import read_header
from gradus.checkpoint.weights import open_weights
from gradus.checkpoint.writing import Writable, write_tensors
from gradus.schema.errors import InputError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64),
]


def written(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any = (2,), start: Any = 0, end: Any = 8, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_what_the_library_writes_is_read_for_every_type(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "nothing": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "a.safetensors", "x")
    assert header.tensors.keys() == tensors.keys()
    assert header.metadata == {"format": "pt"}
    for name, tensor in tensors.items():
        found = read_tensor(header.tensors[name])
        assert found.dtype == tensor.dtype
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found, tensor.view(torch.uint8) if tensor.dim() else tensor
        )


def test_what_is_written_here_is_read_by_the_library(tmp_path: Path) -> None:
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}
    tensors = {f"t{i}": torch.randint(0, 2, (3, i)).to(dtype) for i, dtype in enumerate(names)}
    file = tmp_path / "b.safetensors"
    write_tensors(file, {n: Writable(names[t.dtype], tuple(t.shape), t.clone) for n, t in tensors.items()})
    found = load_file(file)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert list(tmp_path.iterdir()) == [file], "nothing half-written is left"


HEADERS: dict[str, tuple[Any, bytes]] = {
    "no JSON": (b"{nonsense", b""),
    "deeply nested": (b"[" * 100_000, b""),
    "not a mapping": ([1, 2], b""),
    "a number for a tensor": ({"a": 3}, b""),
    "unknown type": ({"a": entry(dtype="F13")}, bytes(8)),
    "a type that is no text": ({"a": entry(dtype=["F32"])}, bytes(8)),
    "negative shape": ({"a": entry(shape=(-2,))}, bytes(8)),
    "shape of booleans": ({"a": entry(shape=(True, 2))}, bytes(8)),
    "shape beyond the bytes": ({"a": entry(shape=(2**40, 2**40))}, bytes(8)),
    "offsets backwards": ({"a": entry(start=8, end=0)}, bytes(8)),
    "offsets beyond the file": ({"a": entry(start=8, end=16)}, bytes(8)),
    "three offsets": ({"a": {**entry(), "data_offsets": [0, 4, 8]}}, bytes(8)),
    "overlapping": ({"a": entry(), "b": entry(start=4, end=12)}, bytes(12)),
    "a gap": ({"a": entry(), "b": entry(start=12, end=20)}, bytes(20)),
    "cut off": ({"a": entry()}, bytes(7)),
    "more than it says": ({"a": entry()}, bytes(9)),
    "a name twice": (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{}}', bytes(8)),
    "metadata of numbers": ({"__metadata__": {"n": 1}, "a": entry()}, bytes(8)),
    "a further key": ({"a": {**entry(), "code": "x"}}, bytes(8)),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_does_not_add_up_is_refused(tmp_path: Path, case: str) -> None:
    header, data = HEADERS[case]
    with pytest.raises(InputError, match="is not a safetensors file") as caught:
        read_header(written(tmp_path / "x.safetensors", header, data), "model.weights")
    assert caught.value.details["field"] == "model.weights"


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 8, b"\xff" * 200, (10**9).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_none_is_refused_without_reading_what_it_promises(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(InputError, match="is not a safetensors file"):
        read_header(tmp_path / "x.safetensors", "model.weights")


def shards(folder: Path) -> dict[str, Any]:
    save_file({"a": torch.ones(2)}, folder / "m-1.safetensors")
    save_file({"b": torch.zeros(3)}, folder / "m-2.safetensors")
    return {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}


def indexed(folder: Path, index: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_a_folder_of_shards_is_one_set_of_weights(tmp_path: Path) -> None:
    folder = indexed(tmp_path, shards(tmp_path))
    assert {n: t.shape for n, t in open_weights(folder).tensors.items()} == {"a": (2,), "b": (3,)}
    assert open_weights(folder / "model.safetensors.index.json").tensors.keys() == {"a", "b"}


def test_an_index_that_points_elsewhere_or_to_nothing_is_refused(tmp_path: Path) -> None:
    index = shards(tmp_path)
    cases = {
        "names a file elsewhere": {"weight_map": {"a": "../m-1.safetensors"}},
        "promises tensors": {"weight_map": {**index["weight_map"], "c": "m-1.safetensors"}},
        "No such file": {"weight_map": {"a": "m-3.safetensors"}},
        "has no weight_map": {"weights": {}},
        "is not a mapping": [],
    }
    for message, document in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            open_weights(indexed(tmp_path, document))
        assert caught.value.details["field"] == "model.weights"


def test_a_folder_must_say_which_file_is_meant(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(InputError, match=r"a\.safetensors, b\.safetensors") as caught:
        open_weights(tmp_path)
    assert caught.value.hint == "name one of the files"
    assert open_weights(tmp_path / "b.safetensors").tensors.keys() == {"b"}


def test_what_is_not_there_is_named_with_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder") as caught:
        open_weights(tmp_path / "nowhere")
    assert "a checkpoint, or a run" in caught.value.details["allowed"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "attempts").mkdir()
    with pytest.raises(InputError, match="has no checkpoint yet"):
        open_weights(tmp_path)


def test_a_pickled_file_is_not_opened_but_the_command_to_import_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(InputError, match="pickled file") as caught:
            open_weights(path)
        assert f"gradus checkpoint import {tmp_path}/pytorch_model.bin" in str(caught.value.hint)


def test_headers_are_read_without_torch(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    code = (
        "import sys; from pathlib import Path; from gradus.checkpoint.weights import open_weights;"
        f"open_weights(Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
