"""How far losses part because of a number format, and how far two runs part that differ by nothing that matters.

    python benchmarks/loss_spread.py --out F [--model llama-small] [--seeds 1,2,3] [--steps 500] [--set KEY=VALUE ...]
    python benchmarks/loss_spread.py --table F/loss_spread.json ...

Runs that round differently do not stay together, whatever the format. So every seed is trained once in bf16, again in
bf16 with a clipping limit that is larger by a thousandth, and in the formats in question: a gap says something of a
format where it is beyond what the clipping does. The text is real (the sources of Python). After each run, the file is
written anew, so that an interrupt loses nothing, and a second call goes on. A CPU has no products in 8 bits: there they
are emulated, from operands that are rounded as a GPU's are.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from gpu_fp8 import DEVICE, LLAMA_3B, live_run, measured

from gradus.training.float8 import use_float8

# The proportions of LLAMA_3B at the least width that multiplies in 8 bits.
LLAMA_SMALL = LLAMA_3B | {
    "layers": 4,
    "width": 256,
    "heads": 4,
    "kv_heads": 2,
    "inner": 704,
    "context": 128,
    "vocabulary": 4096,
}
MODELS = {"llama-small": (LLAMA_SMALL, 8), "llama-3b": (LLAMA_3B, 2), "gpt-1.3b": ({"use": "gpt-1.3b"}, 2)}
REFERENCE = "bf16"
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {  # what multiplies how, and keys of the recipe
    REFERENCE: ("bf16", ()),
    "bf16, clipped at 1.001": ("bf16", ("optimizer.clip=1.001",)),
    "fp8, tensor": ("tensor", ()),
    "fp8, row": ("row", ()),
}
MEANS_OVER = 50


def losses(model: dict[str, Any], batch: int, steps: int, way: str, changes: Sequence[str]) -> list[float]:
    products, own_changes = WAYS[way]
    emulated = DEVICE.type == "cpu" and products != "bf16"
    with tempfile.TemporaryDirectory() as folder:
        said = "bf16" if emulated else products
        live = live_run(model, batch, steps, said, DEVICE.type == "cuda", Path(folder), [*changes, *own_changes])
        if emulated:
            use_float8(live.model, products)  # type: ignore[arg-type]
        found = measured(live, steps)["losses"]
        live.recorder.close(state="finished")
    del live
    gc.collect()
    torch._dynamo.reset()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
    return [round(float(loss), 5) for loss in found]


def gaps(runs: dict[str, list[float]], way: str) -> Iterator[float]:
    """By how much the means over so many steps are above those in bf16, one after the other."""
    for start in range(0, len(runs[REFERENCE]) - MEANS_OVER + 1, MEANS_OVER):
        ours, reference = (statistics.fmean(runs[name][start : start + MEANS_OVER]) for name in (way, REFERENCE))
        yield ours / reference - 1


def table(document: dict[str, Any]) -> str:
    """The gap at the end for each seed, its mean over the seeds, and the mean over all seeds and the later half."""
    seeds = document["seeds"]
    lines = [
        f"{document['model']}, {document['steps']} steps, {' '.join(document['set']) or 'as it is'}; "
        f"{document['device']}, torch {document['torch']}, {document['date']}",
        "",
        f"| | {' | '.join(f'seed {seed}' for seed in seeds)} | mean | ± | later half |",
        "|---" * (len(seeds) + 4) + "|",
    ]
    for way in WAYS:
        of_seeds = [seeds[seed] for seed in seeds if way in seeds[seed] and REFERENCE in seeds[seed]]
        if not of_seeds:
            continue
        if way == REFERENCE:
            shown = [f"{statistics.fmean(runs[way][-MEANS_OVER:]):.4f}" for runs in of_seeds]
            lines.append(f"| {way} | {' | '.join(shown)} | | | |")
            continue
        each = [list(gaps(runs, way)) for runs in of_seeds]
        ends = [found[-1] for found in each]
        later = statistics.fmean(statistics.fmean(found[len(found) // 2 :]) for found in each)
        spread = statistics.stdev(ends) / len(ends) ** 0.5 if len(ends) > 1 else float("nan")
        shown = [f"{end:+.2%}" for end in ends]
        lines.append(f"| {way} | {' | '.join(shown)} | {statistics.fmean(ends):+.2%} | {spread:.2%} | {later:+.2%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="llama-small")
    parser.add_argument("--seeds", default="1,2,3", help="numbers, with commas")
    parser.add_argument("--ways", default=";".join(WAYS), help=f"of {'; '.join(WAYS)}: with semicolons")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the recipe, for all")
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE")
    asked = parser.parse_args()
    if asked.table:
        print("\n\n".join(table(json.loads(file.read_text())) for file in asked.table))
        return
    if asked.steps < MEANS_OVER:
        parser.error(f"--steps: found {asked.steps}, but means are over {MEANS_OVER}")
    output = asked.out / "loss_spread.json"
    document: dict[str, Any] = {
        "date": str(date.today()),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "model": asked.model,
        "steps": asked.steps,
        "set": asked.set,
        "seeds": {},
    }
    if output.exists():
        before = json.loads(output.read_text())
        if any(before[key] != document[key] for key in ("model", "steps", "set")):
            parser.error(f"{output} has another model, number of steps or --set: give another --out")
        document["seeds"] = before["seeds"]
    model, batch = MODELS[asked.model]
    for seed in asked.seeds.split(","):
        runs = document["seeds"].setdefault(seed, {})
        for way in (way for way in asked.ways.split(";") if way not in runs):
            runs[way] = losses(model, batch, asked.steps, way, [*asked.set, f"seed={seed}"])
            print(f"seed {seed}, {way}: {statistics.fmean(runs[way][-MEANS_OVER:]):.4f}", flush=True)
            output.write_text(json.dumps(document))
    print()
    print(table(document))


if __name__ == "__main__":
    main()
