"""Statistics say what there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradus.data.shards.origins import ImageFolders, Records
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.shards.reading import Shards
from gradus.data.shards.stats import dataset_stats, lengths_stats


def test_pictures_are_counted_by_class_and_size(images: Path, tmp_path: Path) -> None:
    pack(ImageFolders(images), tmp_path / "d", HowToPack(2**16), workers=1)
    found = dataset_stats(Shards(str(tmp_path / "d")))
    assert found["samples"] == {"train": 61, "validation": 0}
    assert found["classes"] == {"ant": 21, "bee": 20, "cat": 20}
    assert found["image_sizes"]["width"] == {"min": 40, "median": 49, "max": 59}
    assert found["image_sizes"]["height"] == {"min": 30, "median": 30, "max": 30}
    assert found["image_sizes"]["looked_at"] == 61
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "d").glob("*.tar"))
    assert [(part["name"], part["samples"]) for part in found["parts"]] == [("image", 61), ("label", 61)]


def test_documents_are_counted_in_bytes_and_tokens(tmp_path: Path) -> None:
    for number, length in enumerate((1, 2, 3, 200)):
        (tmp_path / f"{number}.txt").write_text("é" * length)
    pack(Records(str(tmp_path)), tmp_path / "d", HowToPack(2**16, tokenizer="bytes"), workers=1)
    found = dataset_stats(Shards(str(tmp_path / "d")))
    assert found["tokens"] == 2 * 206 + 4  # a token for each byte, and one that ends each document
    assert found["document_bytes"]["sum"] == 412
    assert {name: found["document_tokens"][name] for name in ("min", "median", "max")} == {
        "min": 3,
        "median": 5,
        "max": 401,
    }


def test_a_histogram_counts_everything_once() -> None:
    found = lengths_stats(np.array([0, 1, 2, 3, 4, 5, 1000, 1024, 1025]))
    assert [(row["up_to"], row["count"]) for row in found["histogram"] if row["count"]] == [
        (1, 2),
        (2, 1),
        (4, 2),
        (8, 1),
        (1024, 2),
        (2048, 1),
    ]
    assert (found["median"], found["p95"], found["max"]) == (4, 1024, 1025)
