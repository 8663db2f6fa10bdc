"""What `gradus bench` finds on one GPU: the lines of the OSU lab, the device beside its datasheet, processes that share
it, loader workers and storage.

    python benchmarks/gpu_bench.py --out DIR           # about five minutes on an H200
    python benchmarks/gpu_bench.py --out DIR --small   # tiny, on any machine

Each part is one call of what the command of the same name calls. DIR gets a document for each, which `gradus report`
shows as a page, and bench.md with the tables, which are also printed last. A part that fails, or for which no time is
left (--limit-seconds), is said to be so and costs no other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradus.bench.device import bench_device
from gradus.bench.loader import bench_loader
from gradus.bench.replicas import bench_replicas
from gradus.bench.result import BenchResult
from gradus.bench.storage import Asked, bench_storage
from gradus.bench.synthetic import Synthetic, synthetic
from gradus.schema.recipe import Recipe

HERE = Path(__file__).resolve()
SIDE = 256  # pixels along a side of a picture before it is cut


class Pictures:
    """Noise as pictures, cut, mirrored and normalised by numpy: about as much work as a small JPEG."""

    def __init__(self, samples: int = 4096, side: int = SIDE) -> None:
        self.samples, self.side = samples, side
        self.pixels = np.random.default_rng(1).integers(0, 256, (3, side, side), dtype=np.uint8)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        rng = np.random.default_rng(index)
        size = self.side * 7 // 8
        top, left = rng.integers(0, self.side - size + 1, 2)
        cut = np.roll(self.pixels, int(index), axis=2)[:, top : top + size, left : left + size]
        cut = cut[:, :, ::-1] if rng.random() < 0.5 else cut
        return torch.from_numpy((cut.astype(np.float32) / 255 - 0.45) / 0.225), index % 10


def model(*_: Any) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def parts(small: bool, folder: Path) -> Iterator[tuple[str, Callable[[], BenchResult | None]]]:
    """In the order of what matters most, should time run out."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    times: dict[str, Any] = {"warm_up_batches": 10, "batches": 10, "iterations": 5}
    if small:
        times = {"warm_up_batches": 1, "batches": 1, "iterations": 2}
    tiny = {"image": 32} if small else {}

    def lab(name: str, precision: str, batch: int, options: dict[str, Any], **further: Any) -> BenchResult | None:
        say(f"-- {name}, {precision}")
        return synthetic(
            Synthetic(name, options, 2 if small else batch, precision=precision, nproc=1, **times, **further), say
        )

    precisions = ("fp32", "tf32", "bf16") if cuda else ("fp32", "bf16")
    for precision in precisions:
        yield f"resnet50-{precision}", lambda precision=precision: lab("resnet50", precision, 64, tiny)
    if not small:
        yield (
            "resnet50-bf16-channels-last",
            lambda: lab("resnet50", "bf16", 64, tiny, channels_last=True),
        )
    yield "device", lambda: bench_device(device, **_device_sizes(small), say=say)
    yield (
        "replicas",
        lambda: bench_replicas(
            Synthetic(
                "simple-cnn", {}, 2 if small else 128, **{**times, "batches": times["batches"] * (1 if small else 10)}
            ),
            (1, 2) if small else (1, 2, 4),
            1 if small else 2,
            say=say,
        ),
    )
    for precision in ("fp32", "bf16"):
        yield f"resnet18-{precision}", lambda precision=precision: lab("resnet18", precision, 128, tiny)
    yield "loader", lambda: loader(small)
    yield (
        "storage",
        lambda: bench_storage(str(folder), Asked(4, 20, 20, 1.0, 1) if small else Asked(512, 100, 1000), say=say),
    )
    if not small:
        yield "gpt2-bf16", lambda: lab("gpt2-124m", "bf16", 8, {})


def _device_sizes(small: bool) -> dict[str, Any]:
    return {"size": 64, "memory_mib": 1, "seconds": 0.01, "rounds": 2} if small else {"seconds": 0.6}


def loader(small: bool) -> BenchResult:
    recipe = Recipe.from_document(
        {
            "name": "pictures",
            "model": {"use": f"{HERE}:model"},
            "data": {"use": f"{HERE}:Pictures", **({"samples": 64, "side": 32} if small else {})},
            "loss": "cross-entropy",
            "batch": 8 if small else 128,
            "steps": 10,
            "optimizer": {"lr": 1e-3},
        }
    )
    sizes = (8,) if small else (64, 128)
    counts = (0, 1) if small else (0, 2, 4, 8)
    return bench_loader(recipe, counts, sizes, seconds=0.1 if small else 2.0, rounds=1 if small else 2, say=say)


def table(result: BenchResult, columns: dict[str, str]) -> list[str]:
    """Rows in Markdown; `columns` are keys and how their values are written."""
    lines = [" | ".join(["", *(name.replace("_", " ") for name in columns), ""]).strip()]
    lines.append("|" + "---|" * len(columns))
    for row in result.rows:
        texts = ["" if row.get(name) is None else format(row[name], how) for name, how in columns.items()]
        lines.append(" | ".join(["", *texts, ""]).strip())
    return lines


COLUMNS = {
    "device": {"group": "", "name": "", "value": ",.4g", "unit": "", "spread": ".1%", "quoted": ",.4g", "share": ".0%"},
    "replicas": {"replicas": "", "how": "", "samples_per_second": ",.0f", "spread": ".1%", "against_one": ".2f"},
    "loader": {
        "micro_batch": "",
        "workers": "",
        "samples_per_second": ",.0f",
        "spread": ".0%",
        "first_batch_seconds": ".2f",
    },
    "storage": {"what": "", "megabytes_per_second": ",.0f", "samples_per_second": ",.0f", "against_sequential": ".0%"},
}


def markdown(results: dict[str, BenchResult], left_out: list[str]) -> str:
    lines = ["| benchmark | samples/s | ± | TFLOP/s | of the peak |", "|---|---|---|---|---|"]
    for name, result in results.items():
        if result.kind != "synthetic":
            continue
        found = result.summary
        texts = [
            name,
            f"{found['samples_per_second']:,.1f}",
            f"{found['samples_per_second_plus_minus']:,.1f}",
            "" if found["tflops_each"] is None else f"{found['tflops_each']:.3g}",
            "" if found["mfu"] is None else f"{found['mfu']:.1%}",
        ]
        lines.append("| " + " | ".join(texts) + " |")
    for result in results.values():
        if result.kind in COLUMNS:
            lines += ["", f"{result.title}:", "", *table(result, COLUMNS[result.kind]), *result.notes]
    return "\n".join([*lines, *left_out]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="parts whose name has this in it")
    parser.add_argument("--limit-seconds", type=float, default=330.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, BenchResult] = {}
    left_out: list[str] = []
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, part in parts(given.small, Path(folder)):
            if given.only not in name:
                continue
            if time.monotonic() - begun > given.limit_seconds:
                left_out.append(f"{name}: left out, no time was left")
                continue
            started = time.monotonic()
            try:
                result = part()
            except Exception as error:  # a part that fails must not cost the others
                traceback.print_exc()
                left_out.append(f"{name}: failed: {type(error).__name__}: {error}")
                continue
            assert result is not None
            results[name] = result
            result.save(given.out / f"{name}.json")
            say(f"-- {name}: {time.monotonic() - started:.1f} s")
    text = markdown(results, left_out)
    (given.out / "bench.md").write_text(text, encoding="utf-8")
    print(text)
    if given.small and left_out:
        sys.exit(1)


if __name__ == "__main__":
    main()
