"""Loading 100,000 small pictures: gradus from tar shards beside a plain DataLoader and WebDataset, in turn in one run.

    python benchmarks/loader.py                          # makes the pictures (a minute), then measures; prints tables
    python benchmarks/loader.py --images 5000 --rounds 1 # a quick check that it runs
    python benchmarks/loader.py --folder DIR             # keeps the pictures there for the next time

Every side gives the same: batches of normalised float32 [128, 3, 64, 64] and labels in the process that trains, from
JPEGs of 64 to 100 pixels a side, shorter side resized to 64 with an antialiasing bilinear filter, middle kept. Each has
two workers and four batches in advance for each of them. All files are in the page cache: this is about processors.
WebDataset reads the very shards that gradus reads. The process that trains computes with one thread: the cores are for
the workers, and threads that wait for each other would take them away.
"""

from __future__ import annotations

import argparse
import io
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from gradus.data import images
from gradus.data.loader import Indexed, Loader, Slices
from gradus.data.shards.origins import ImageFolders
from gradus.data.shards.packing import HowToPack, pack
from gradus.data.source import Source, open_source
from gradus.data.sources.folder import DEVIATION, MEAN

BATCH, SIZE, WORKERS, AHEAD, CLASSES = 128, 64, 2, 4, 10
SHARD_SAMPLES = 8192  # in a shard, about, or fewer if there would be less than four: WebDataset divides them by worker
SAMPLE_BYTES = 4096  # of a sample in a tar file: a header and what fills up the last block for each of two members
BUFFER = 1000  # samples that WebDataset shuffles among, as in its examples

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


# --- the pictures


def picture(number: int) -> bytes:
    """A slope of colours with noise of two grains: about 2 kB as a JPEG, always the same for a number."""
    rng = np.random.default_rng(number)
    width, height = (int(side) for side in rng.integers(64, 101, 2))
    x, y = np.linspace(-1, 1, width, dtype=np.float32), np.linspace(-1, 1, height, dtype=np.float32)
    pixels = 128 + 60 * (x[None, :, None] * rng.uniform(-1, 1, 3) + y[:, None, None] * rng.uniform(-1, 1, 3))
    for cell, strength in ((16, 40), (4, 20)):
        grains = rng.integers(0, 256, (height // cell + 2, width // cell + 2, 3)).astype(np.uint8)
        grown = Image.fromarray(grains).resize((width, height), Image.Resampling.BILINEAR)
        pixels = pixels + strength * (np.asarray(grown, np.float32) - 128) / 128
    stream = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def make_pictures(folder: Path, numbers: range) -> None:
    for number in numbers:
        (folder / f"class{number % CLASSES}" / f"{number:06d}.jpg").write_bytes(picture(number))


def prepared(folder: Path, count: int) -> tuple[Path, Path]:
    """The folder of pictures and that of the shards."""
    plain, shards = folder / f"pictures-{count}", folder / f"shards-{count}"
    done = folder / f"made-{count}"
    if not done.exists():
        for label in range(CLASSES):
            (plain / f"class{label}").mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor() as pool:
            list(
                pool.map(partial(make_pictures, plain), [range(i, min(i + 1000, count)) for i in range(0, count, 1000)])
            )
        done.touch()
    pack(ImageFolders(plain, 0.0), shards, HowToPack(shard_bytes=SAMPLE_BYTES * min(SHARD_SAMPLES, count // 4)))
    return plain, shards


# --- decoding


def by_pillow(content: bytes) -> np.ndarray:
    """As the usual transforms do it: decode, resize the shorter side, cut out the middle."""
    with Image.open(io.BytesIO(content)) as opened:
        rgb = opened.convert("RGB")
    scale = SIZE / min(rgb.size)
    width, height = (max(SIZE, round(side * scale)) for side in rgb.size)
    resized = rgb.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - SIZE) // 2, (height - SIZE) // 2
    return np.array(resized.crop((left, top, left + SIZE, top + SIZE)))


def by_gradus(content: bytes) -> np.ndarray:
    return images.pictures([content], 1, SIZE, None, str)[0].transpose(1, 2, 0)


MEANS, DEVIATIONS = torch.tensor(MEAN)[:, None, None], torch.tensor(DEVIATION)[:, None, None]


def normalised(pixels: np.ndarray) -> torch.Tensor:
    """ToTensor and Normalize."""
    tensor = torch.from_numpy(pixels).permute(2, 0, 1).contiguous().float().div_(255)
    return tensor.sub_(MEANS).div_(DEVIATIONS)


# --- the sides


class PlainFolder(Dataset[Any]):
    """As torchvision's ImageFolder: a list of files, opened one by one."""

    def __init__(self, root: Path, decode: Callable[[bytes], np.ndarray]) -> None:
        classes = sorted(entry.name for entry in root.iterdir())
        self.files = [
            (str(file), label) for label, name in enumerate(classes) for file in sorted((root / name).iterdir())
        ]
        self.decode = decode

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        file, label = self.files[index]
        with open(file, "rb") as stream:
            return normalised(self.decode(stream.read())), label


def from_gradus(source: Source, seed: int, libjpeg: bool = True) -> Batches:
    """`libjpeg=False` hides simplejpeg, so that Pillow decodes."""
    sys.modules.pop("simplejpeg", None)
    if not libjpeg:
        sys.modules["simplejpeg"] = None  # type: ignore[assignment]
    slices = Slices(BATCH, BATCH, 1, 0, len(source))
    loader = Loader(Indexed(source), slices, torch.device("cpu"), torch.float32, seed=seed, workers=WORKERS)
    for micro in loader.micro_batches(0, -(-len(source) // BATCH)):
        yield micro.inputs  # type: ignore[misc]


def from_plain(data: PlainFolder, seed: int) -> Batches:
    torch.manual_seed(seed)
    sys.modules.pop("simplejpeg", None)
    return iter(DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, prefetch_factor=AHEAD))


def from_webdataset(shards: Path, decode: Callable[[bytes], np.ndarray], seed: int) -> Batches:
    import webdataset as wds

    sys.modules.pop("simplejpeg", None)

    def sample(parts: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return normalised(decode(parts["jpg"])), int(parts["cls"])

    files = [str(file) for file in sorted(shards.glob("*.tar"))]
    data = wds.WebDataset(files, shardshuffle=len(files), seed=seed).shuffle(BUFFER).map(sample).batched(BATCH)
    return iter(wds.WebLoader(data, batch_size=None, num_workers=WORKERS, prefetch_factor=AHEAD))


def sides(plain: Path, shards: Path) -> dict[str, Callable[[int], Batches]]:
    def source(use: str, path: Path) -> Source:
        return open_source(use, {"path": str(path), "size": SIZE, "validation": 0}, "train", 0)

    packed, folders = source("shards", shards), source("images", plain)
    return {
        "gradus, tar shards": lambda seed: from_gradus(packed, seed),
        "plain DataLoader, folders, Pillow": partial(from_plain, PlainFolder(plain, by_pillow)),
        "WebDataset, tar shards, Pillow": partial(from_webdataset, shards, by_pillow),
        "gradus, folders": lambda seed: from_gradus(folders, seed),
        "gradus, tar shards, Pillow only": lambda seed: from_gradus(packed, seed, False),
        "plain DataLoader with gradus's decoder": partial(from_plain, PlainFolder(plain, by_gradus)),
        "WebDataset with gradus's decoder": partial(from_webdataset, shards, by_gradus),
    }


# --- measuring


def processor_seconds() -> float:
    """Of this process and the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def one_pass(batches: Batches) -> tuple[int, float, float]:
    """Samples, seconds on the clock and seconds of processors for one pass over the data, workers' start included."""
    cpu, begun = processor_seconds(), time.perf_counter()
    count = 0
    for pixels, labels in batches:
        assert pixels.shape[1:] == (3, SIZE, SIZE)
        assert pixels.dtype == torch.float32
        count += len(labels)
    elapsed = time.perf_counter() - begun
    del batches
    return count, elapsed, processor_seconds() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="sides whose name has this in it; the first three by default")
    parser.add_argument("--all", action="store_true", help="also those that say where the difference comes from")
    parser.add_argument("--folder", type=Path, help="where pictures and shards are kept")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        begun = time.perf_counter()
        plain, shards = prepared(given.folder or Path(temporary), given.images)
        print(
            f"{given.images:,} pictures and their shards are there after {time.perf_counter() - begun:.0f} s",
            flush=True,
        )
        chosen = {name: side for name, side in sides(plain, shards).items() if given.only in name}
        chosen = chosen if given.all or given.only else dict(list(chosen.items())[:3])
        table(measured(chosen, given.images, given.rounds))


def measured(
    chosen: dict[str, Callable[[int], Batches]], images: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """For each side, of every round: samples in a second, and seconds of processors for 1,000 samples."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    for number in range(rounds):
        for name, side in chosen.items():
            count, elapsed, cpu = one_pass(side(number))
            assert count == images, f"{name}: {count} of {images} samples"
            found[name].append((count / elapsed, 1000 * cpu / count))
            print(f"round {number + 1}: {name}: {count / elapsed:,.0f} images/s", flush=True)
    return found


def table(found: dict[str, list[tuple[float, float]]]) -> None:
    first = next(iter(found))
    print(f"\nMeasured {date.today()}, torch {torch.__version__}, {os.cpu_count()} cores, {WORKERS} workers\n")
    print(f"| side | images/s | spread | processor seconds for 1,000 | {first} / this |")
    print("|---|---|---|---|---|")
    for name, rows in found.items():
        rates = [rate for rate, _ in rows]
        # Of the same round: what else the machine does changes over minutes.
        ratios = [mine / theirs for (mine, _), (theirs, _) in zip(found[first], rows, strict=True)]
        middle = statistics.median(rates)
        print(
            f"| {name} | {middle:,.0f} | {(max(rates) - min(rates)) / middle:.0%} "
            f"| {statistics.median(cpu for _, cpu in rows):.2f} | {statistics.median(ratios):.2f} |"
        )


if __name__ == "__main__":
    main()
