"""Parts: a value of a sample as the bytes of a tar member, whose suffix says what it is, and back again."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gradus.data.shards.tar import Member
from gradus.schema.errors import InputError

IMAGES = ("jpg", "png", "webp", "gif", "bmp", "tif", "ppm")
# How files of these kinds begin.
_SIGNATURES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"BM", "bmp"),
    (b"%PDF", "pdf"),
    (b"OggS", "ogg"),
    (b"fLaC", "flac"),
    (b"ID3", "mp3"),
    (b"\x93NUMPY", "npy"),
)


def kind_of(suffix: str) -> str:
    """The kind of a member, from the end of its suffix: `jpg` of `picture.jpg`."""
    kind = suffix.rpartition(".")[2].lower()
    return {"jpeg": "jpg", "tiff": "tif"}.get(kind, kind)


def is_image(suffix: str) -> bool:
    return kind_of(suffix) in IMAGES


def kind_of_bytes(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] in (b"WEBP", b"WAVE"):
        return "webp" if data[8:12] == b"WEBP" else "wav"
    return next((kind for start, kind in _SIGNATURES if data.startswith(start)), "bin")


def encoded(name: str, value: Any, where: str) -> Member | None:
    """A named value as a member; None if it has none."""
    if value is None:
        return None
    kind, data = _encoded(value, f"{where}: {name!r}")
    return Member(f"{name}.{kind}", data)


def _encoded(value: Any, what: str) -> tuple[str, bytes]:
    if isinstance(value, str):
        return "txt", value.encode("utf-8", errors="replace")
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        return kind_of_bytes(data), data
    if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # Hugging Face's pictures and sounds
        return kind_of_bytes(value["bytes"]), value["bytes"]
    if isinstance(value, (bool, np.bool_)):
        return "json", json.dumps(bool(value)).encode()
    if isinstance(value, (int, np.integer)):
        return "cls", str(int(value)).encode()
    if isinstance(value, (float, np.floating)):
        return "json", json.dumps(float(value)).encode()
    if hasattr(value, "detach") and hasattr(value, "numpy"):  # a tensor
        tensor = value.detach().cpu()
        value = tensor.float().numpy() if str(tensor.dtype) == "torch.bfloat16" else tensor.numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        stream = io.BytesIO()
        np.save(stream, np.ascontiguousarray(value).reshape(value.shape), allow_pickle=False)
        return "npy", stream.getvalue()
    if hasattr(value, "save") and hasattr(value, "mode"):  # a picture of Pillow's
        stream = io.BytesIO()
        value.save(stream, "png")
        return "png", stream.getvalue()
    if isinstance(value, (list, tuple, Mapping)):
        try:
            return "json", json.dumps(value, ensure_ascii=False, sort_keys=True).encode()
        except (TypeError, ValueError):
            pass
    allowed = "text, bytes, numbers, arrays, tensors, pictures, and lists or dicts of text and numbers"
    message = f"{what} is {type(value).__name__}, which cannot be packed. Allowed: {allowed}"
    raise InputError(message, field="SOURCE", found=type(value).__name__, allowed=allowed)


def numbers_in(data: bytes) -> NDArray[Any] | None:
    """What a `.cls` or `.json` member holds, if that is a number or a list of numbers."""
    value = json.loads(data)
    try:
        found = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return None
    return found if found.dtype.kind in "bif" else None


def array(data: bytes) -> NDArray[Any]:
    """The array in an `.npy` member. Nothing is ever unpickled."""
    loaded: NDArray[Any] = np.load(io.BytesIO(data), allow_pickle=False)
    return loaded
