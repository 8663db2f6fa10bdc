"""Libraries that decode and resize JPEGs, on one core: what `gradus.data.images` was chosen by.

    python benchmarks/image_decoders.py

Measured is whatever is installed of Pillow, simplejpeg, OpenCV, PyTurboJPEG, torch, DALI and SPDL. Pillow-SIMD takes
the place of Pillow: it needs an environment of its own.

Seconds of the processor for one picture, the best of many passes in turn, because other processes only add to it.
"whole path" is what a loader needs of a picture: the middle square, resized with a filter that does not alias, in
[3, size, size]. Two ways are in the table for comparison only: `linear` of OpenCV skips pixels when it makes a picture
smaller, and so gives another one.
"""

from __future__ import annotations

import importlib
import io
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

PASSES = 25
Way = Callable[[Any, int], Any]


def noisy(rng: np.random.Generator, height: int, width: int) -> np.ndarray:
    """Slopes of colour with noise of three grains: at quality 90 as large as a photograph of that size, roughly."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([128 + 80 * (rng.uniform(-1) * x / width + rng.uniform(-1) * y / height) for _ in range(3)], -1)
    for cell, strength in ((32, 40), (8, 25), (3, 12)):
        grains = rng.integers(0, 256, (height // cell + 2, width // cell + 2, 3)).astype(np.uint8)
        grown = Image.fromarray(grains).resize((width, height), Image.Resampling.BILINEAR)
        pixels = pixels + strength * (np.asarray(grown, np.float32) - 128) / 128
    return np.clip(pixels, 0, 255).astype(np.uint8)


def jpegs(count: int, smallest: int, largest: int) -> list[bytes]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        stream = io.BytesIO()
        height, width = (int(side) for side in rng.integers(smallest, largest + 1, 2))
        Image.fromarray(noisy(rng, height, width)).save(stream, "JPEG", quality=90)
        found.append(stream.getvalue())
    return found


SETS = {"64–100 px to 64": (jpegs(200, 64, 100), 64), "100–250 px to 96": (jpegs(100, 100, 250), 96)} | {
    "375–500 px to 224": (jpegs(40, 375, 500), 224)
}


def box(height: int, width: int) -> tuple[int, int, int]:
    side = min(height, width)
    return (height - side) // 2, (width - side) // 2, side


def ways() -> dict[str, dict[str, Way]]:
    """By what is measured and by whom."""
    decode: dict[str, Way] = {}
    resize: dict[str, Way] = {}  # of what is decoded already, see `measured`
    whole: dict[str, Way] = {}

    def by_pillow(content: bytes, size: int) -> Any:
        with Image.open(io.BytesIO(content)) as picture:
            return np.asarray(picture.convert("RGB"))

    def resized_by_pillow(pixels: Any, size: int) -> Any:
        top, left, side = box(*pixels.shape[:2])
        picture = Image.fromarray(pixels)
        square = picture.resize((size, size), Image.Resampling.BILINEAR, box=(left, top, left + side, top + side))
        return np.asarray(square).transpose(2, 0, 1)

    def all_by_pillow(content: bytes, size: int) -> Any:
        with Image.open(io.BytesIO(content)) as picture:
            picture.draft("RGB", (size, size))
            rgb = picture.convert("RGB")
        left, top = ((extent - min(rgb.size)) / 2 for extent in rgb.size)
        square = (left, top, left + min(rgb.size), top + min(rgb.size))
        return np.array(np.asarray(rgb.resize((size, size), Image.Resampling.BILINEAR, box=square)).transpose(2, 0, 1))

    decode["Pillow"], resize["Pillow"], whole["Pillow"] = by_pillow, resized_by_pillow, all_by_pillow

    simplejpeg = installed("simplejpeg")
    if simplejpeg:
        decode["simplejpeg"] = lambda content, size: simplejpeg.decode_jpeg(content)
    turbojpeg = installed("turbojpeg")
    if turbojpeg:
        turbo = turbojpeg.TurboJPEG()
        decode["PyTurboJPEG"] = lambda content, size: turbo.decode(content, pixel_format=turbojpeg.TJPF_RGB)
    cv2 = installed("cv2")
    if cv2:
        cv2.setNumThreads(1)

        def by_opencv(content: bytes, size: int) -> Any:
            return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)

        def resized_by(interpolation: int, pixels: Any, size: int) -> Any:
            top, left, side = box(*pixels.shape[:2])
            part = pixels[top : top + side, left : left + side]
            return cv2.resize(part, (size, size), interpolation=interpolation).transpose(2, 0, 1)

        decode["OpenCV"] = by_opencv
        resize["OpenCV, area"] = lambda pixels, size: resized_by(cv2.INTER_AREA, pixels, size)
        resize["OpenCV, linear (aliases)"] = lambda pixels, size: resized_by(cv2.INTER_LINEAR, pixels, size)
        whole["OpenCV, area"] = lambda content, size: np.array(
            resized_by(cv2.INTER_AREA, by_opencv(content, size), size)
        )
    torch = installed("torch")
    if torch:
        torch.set_num_threads(1)

        def resized_by_torch(pixels: Any, size: int) -> Any:
            top, left, side = box(*pixels.shape[:2])
            part = torch.from_numpy(pixels[top : top + side, left : left + side]).permute(2, 0, 1)[None]
            return torch.nn.functional.interpolate(part, size=(size, size), mode="bilinear", antialias=True)

        resize["torch"] = resized_by_torch
    # From here on, all pictures in one call: some libraries have much to do for each.
    for name, way in list(whole.items()):
        whole[name] = lambda contents, size, way=way: [way(content, size) for content in contents]
    gradus = installed("gradus.data.images") if torch else None
    if gradus:

        def all_by_gradus(decoder: str) -> Way:
            return lambda contents, size: gradus.pictures(contents, len(contents), size, None, str, decoder)

        whole["gradus: simplejpeg and torch" if simplejpeg else "gradus: Pillow and torch"] = all_by_gradus("auto")
        for decoder, adapter in gradus.ADAPTERS.items():
            if installed(adapter.PACKAGE):
                whole[f"gradus with {decoder}"] = all_by_gradus(decoder)
    return {"decode": decode, "resize": resize, "whole path": whole}


def installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError):
        return None


def measured(ways: dict[str, Way], items: list[Any], size: int, pictures: int) -> dict[str, float]:
    """Microseconds for one of so many pictures."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(PASSES):
        for name, way in ways.items():
            begun = time.process_time()
            for item in items:
                way(item, size)
            best[name] = min(best[name], (time.process_time() - begun) / pictures * 1e6)
    return best


def main() -> None:
    for what, of_kind in ways().items():
        print(f"\n| {what}, µs | {' | '.join(SETS)} |\n|---|{'---|' * len(SETS)}")
        columns = []
        for contents, size in SETS.values():
            items: list[Any] = contents
            if what == "resize":
                items = [np.array(Image.open(io.BytesIO(content)).convert("RGB")) for content in contents]
            if what == "whole path":
                items = [contents]
            columns.append(measured(of_kind, items, size, len(contents)))
        for name in of_kind:
            print(f"| {name} | {' | '.join(f'{column[name]:,.0f}' for column in columns)} |", flush=True)


if __name__ == "__main__":
    main()
