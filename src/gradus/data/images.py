"""Pictures: encoded bytes in, pixels of one size out. Decoded, cut, resized, perhaps mirrored.

JPEGs are decoded by simplejpeg where it is installed, everything else by Pillow; both have libjpeg-turbo inside and
give the same pixels, so that the choice decides about speed alone (figures: benchmarks/README.md). Torch resizes,
with the triangle filter that Pillow calls bilinear, in a fraction of its time. Other libraries can do all of it where a
recipe asks for one (adapters/).
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, Literal

import numpy as np

from gradus.data.adapters import dali, spdl
from gradus.data.cuts import Content, Cut, Pixels, middle, random_cut, uniform
from gradus.data.order import Words
from gradus.schema.errors import GradusError, InputError

Augment = Literal["none", "standard"]
Decoder = Literal["auto", "dali", "spdl"]

ADAPTERS: dict[str, ModuleType] = {"dali": dali, "spdl": spdl}
JPEG = b"\xff\xd8\xff"
REDUCED = (8, 4, 2)  # a JPEG can be decoded at a fraction of its size, in a fraction of the time

CutOf = Callable[[int, int], Cut]  # from width and height
Decode = Callable[[Content, int, CutOf], tuple[Pixels, Cut]]


def check_decoder(decoder: Decoder) -> None:
    """Refuse one that is not installed, with the command that installs it."""
    adapter = ADAPTERS.get(decoder)
    if adapter is None:
        return
    top, *_ = adapter.PACKAGE.split(".")
    if importlib.util.find_spec(top) is None or importlib.util.find_spec(adapter.PACKAGE) is None:
        message = f"data.decoder: {decoder} needs the package {adapter.PACKAGE}, which is not installed"
        raise InputError(message, hint=adapter.INSTALL, field="data.decoder", found=decoder, allowed="auto")


def pictures(
    contents: Iterable[Content],
    count: int,
    size: int,
    draws: Words | None,
    name: Callable[[int], str],
    decoder: Decoder = "auto",
) -> Pixels:
    """[count, 3, size, size], RGB: the middle of each picture or, with a random word for each in `draws`, a random cut.

    `name` says which picture it is when one cannot be decoded.
    """
    numbers = uniform(draws) if draws is not None else None

    def cut_of(row: int, width: int, height: int) -> Cut:
        return middle(width, height) if numbers is None else random_cut(numbers[row], width, height)

    if decoder == "auto":
        return _decoded(contents, count, size, cut_of, name)
    contents = list(contents)
    try:
        cuts = [cut_of(row, *_sides(content)) for row, content in enumerate(contents)]
        found: Pixels = ADAPTERS[decoder].pictures(contents, cuts, size)
        return found
    except Exception as error:
        _decoded(contents, count, size, cut_of, name)  # names the picture, if it is one that nobody can decode
        message = f"data.decoder: {decoder} fails where Pillow does not: {type(error).__name__}: {error}"
        raise GradusError(message, hint="use data.decoder=auto", field="data.decoder") from error


def _decoded(
    contents: Iterable[Content],
    count: int,
    size: int,
    cut_of: Callable[[int, int, int], Cut],
    name: Callable[[int], str],
) -> Pixels:
    from torch import from_numpy  # late: a launcher checks recipes without torch
    from torch.nn.functional import interpolate

    decode = _decoder()
    found = np.empty((count, 3, size, size), np.uint8)
    for row, content in enumerate(contents):
        try:
            pixels, cut = decode(content, size, partial(cut_of, row))
        except ValueError as error:
            message = f"data.path: {name(row)} cannot be decoded: {error}"
            raise InputError(message, field="data.path", found=name(row)) from error
        part = pixels[cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
        if part.shape[:2] != (size, size):
            tensor = from_numpy(part).permute(2, 0, 1)[None]
            resized = interpolate(tensor, size=(size, size), mode="bilinear", antialias=True)
            part = resized[0].permute(1, 2, 0).numpy()
        found[row] = (part[:, ::-1] if cut.mirrored else part).transpose(2, 0, 1)
    return found


def _decoder() -> Decode:
    try:
        import simplejpeg
    except ImportError:
        return _by_pillow

    def by_simplejpeg(content: Content, size: int, cut_of: CutOf) -> tuple[Pixels, Cut]:
        if bytes(content[:3]) != JPEG:
            return _by_pillow(content, size, cut_of)
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
            if colours in ("CMYK", "YCCK"):  # which the two would convert differently
                return _by_pillow(content, size, cut_of)
            cut = cut_of(width, height)
            step = _reduced(cut, size)
            least = {"min_height": -(-height // step), "min_width": -(-width // step)} if step > 1 else {}
            pixels = simplejpeg.decode_jpeg(content, **least)
        except ValueError:  # Pillow has the last word on what cannot be decoded
            return _by_pillow(content, size, cut_of)
        return pixels, _scaled(cut, width, height, pixels)

    return by_simplejpeg


def _by_pillow(content: Content, size: int, cut_of: CutOf) -> tuple[Pixels, Cut]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as picture:
            width, height = picture.size
            cut = cut_of(width, height)
            step = _reduced(cut, size)
            if step > 1:
                picture.draft("RGB", (width // step, height // step))  # does nothing unless it is a JPEG
            pixels: Any = np.array(picture.convert("RGB"))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(str(error)) from error
    return pixels, _scaled(cut, width, height, pixels)


def _sides(content: Content) -> tuple[int, int]:
    """Width and height, from the beginning of a file."""
    from PIL import Image

    with Image.open(io.BytesIO(content)) as picture:
        width, height = picture.size
    return width, height


def _reduced(cut: Cut, size: int) -> int:
    """The fraction at which a JPEG is decoded: as small as possible while the cut has the pixels that are wanted."""
    return next((step for step in REDUCED if min(cut.width, cut.height) >= step * size), 1)


def _scaled(cut: Cut, width: int, height: int, pixels: Pixels) -> Cut:
    """The cut of a picture of this size, in the pixels that were decoded of it."""
    if pixels.shape[:2] == (height, width):
        return cut
    across, down = pixels.shape[1] / width, pixels.shape[0] / height
    left, top = round(cut.left * across), round(cut.top * down)
    right, bottom = round((cut.left + cut.width) * across), round((cut.top + cut.height) * down)
    return Cut(left, top, max(1, right - left), max(1, bottom - top), cut.mirrored)
