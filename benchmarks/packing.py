"""How full contexts are: documents packed, padded one by one, or cut out of one long text. And how long a plan takes.

    python benchmarks/packing.py              # the Python sources of this interpreter, one document each
    python benchmarks/packing.py --plan 10    # and plans for ten million made-up documents, in 1.2 GB

A token is a byte here; with a tokenizer documents are several times shorter, which is as if contexts were longer.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path

import numpy as np

from gradus.data.packing import packed
from gradus.data.sources.stdlib import source_files

CONTEXTS = (1024, 2048, 4096, 8192, 16384, 32768)


def corpus() -> np.ndarray:
    root = Path(sysconfig.get_path("stdlib"))
    return np.array([path.stat().st_size + 1 for path in sorted(source_files(root))])  # and the end of each


def torn(lengths: np.ndarray, context: int) -> float:
    """Of documents that would fit into a context, how many are in two windows of one long text."""
    ends = np.cumsum(lengths)
    short = lengths <= context
    return float(((ends - lengths) // context != (ends - 1) // context)[short].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--plan", type=float, metavar="MILLIONS", help="time a plan for so many documents")
    arguments = parser.parse_args()
    lengths = corpus()
    print(f"{len(lengths)} documents, {lengths.sum():,} tokens, median {int(np.median(lengths)):,}\n")
    print("| context | packed | padded | one long text: documents torn apart |\n|---|---|---|---|")
    for context in CONTEXTS:
        packs = packed(lengths, context, seed=1)
        padded = lengths.sum() / (np.ceil(lengths / context).sum() * context)
        print(f"| {context:,} | {packs.efficiency:.2%} | {padded:.1%} | {torn(lengths, context):.0%} |")
    if arguments.plan:
        # As web texts are: a median of 500 tokens, one in a hundred longer than 8,000.
        many = 1 + np.random.default_rng(1).lognormal(6.2, 1.2, round(arguments.plan * 1e6)).astype(np.int64)
        for context in (2048, 8192):
            begin = time.perf_counter()
            packs = packed(many, context, seed=1)
            seconds = time.perf_counter() - begin
            print(f"{len(many):,} documents into {len(packs):,} contexts of {context:,}: {seconds:.1f} s", end="")
            print(f", {packs.efficiency:.3%} full")


if __name__ == "__main__":
    main()
