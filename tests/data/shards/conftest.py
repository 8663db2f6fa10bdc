"""Small datasets to be packed, the same ones each time."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

WORDS = ("the", "step", "of", "a", "gradient", "is", "small", "when", "its", "curvature", "is", "large", "é")


def picture(seed: int, size: tuple[int, int] = (40, 30)) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize(size).save(stream, "jpeg")
    return stream.getvalue()


def text(seed: int) -> str:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 80))) + " é."


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 pictures of 3 classes; two of them differ only in their suffix, and names have dots in them."""
    root = tmp_path_factory.mktemp("images")
    for label, name in enumerate(("ant", "bee", "cat")):
        (root / name).mkdir()
        for number in range(20):
            (root / name / f"img.{number:02d}.jpg").write_bytes(picture(100 * label + number, (40 + number, 30)))
    Image.open(root / "ant" / "img.00.jpg").save(root / "ant" / "img.00.png")
    return root


@pytest.fixture(scope="session")
def jsonl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files with 400 documents."""
    root = tmp_path_factory.mktemp("jsonl")
    for number, count in enumerate((250, 1, 149)):
        lines = [json.dumps({"text": text(1000 * number + i)}, ensure_ascii=False) for i in range(count)]
        (root / f"part-{number}.jsonl").write_text("\n".join(lines) + "\n\n")
    return root
