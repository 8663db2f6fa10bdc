"""The planner's model of single operators beside what was measured of them: how good the shares in speeds.yaml are.

python benchmarks/speeds_check.py [benchmarks/measured/h200_speeds.json] [--all]

Prints, for each section of the measurement, how far the model is off: the median, and how much of all is within 25 %.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from gradus.planner.speed.compute import attention_seconds, convolution_seconds, matmul_seconds
from gradus.planner.speed.device import Device, device_of
from gradus.schema.cluster import Cluster

MEASURED = Path(__file__).parent / "measured" / "h200_speeds.json"


def modelled(row: dict[str, Any], device: Device) -> float | None:
    """Seconds of a row that has a shape; None for others."""
    floor = device.speeds.kernel_seconds
    if row["section"] in ("matmul", "bmm", "fp8"):
        if "m" not in row or row.get("fast") is False:
            return None
        precision = row.get("dtype", "fp8")
        return floor + matmul_seconds(row.get("batch", 1), row["m"], row["n"], row["k"], precision, device)
    if row["section"] == "convolution":
        m, n, k = row["matmul"]
        running = device.running(row["dtype"])
        backward = not row["name"].endswith("forward")
        return floor + convolution_seconds(
            row["groups"],
            m,
            n,
            k,
            row["bytes"],
            row["dtype"],
            running,
            backward=backward,
            channels_last=row["channels_last"],
        )
    if row["section"] == "attention" and not row["mask"] and not row["dropout"]:
        backward = row["name"].endswith("backward")
        tokens, width = row["tokens"], row["width"]
        item = 2 if row["dtype"] == "bf16" else 4
        rows = row["batch"] * row["heads"] * tokens
        return floor * (3 if backward else 1) + attention_seconds(
            flops=row["flops"],
            moved=rows * width * item * (8 if backward else 4),
            blocks=row["batch"] * row["heads"] * math.ceil(tokens / 128),
            queries=tokens,
            keys=tokens,
            width=width,
            causal=row["causal"],
            backward=backward,
            speeds=device.speeds.attention[row["name"].split()[0]],
            peak=device.peak_of("bf16" if row["dtype"] == "bf16" else "fp32"),
            precision="16 bit" if row["dtype"] == "bf16" else "fp32",
            device=device,
        )
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="?", type=Path, default=MEASURED)
    parser.add_argument("--all", action="store_true", help="print every row")
    given = parser.parse_args()
    document = json.loads(given.measured.read_text())
    site = Cluster(
        name="measured", gpus_per_node=1, gpu=document["device"].removeprefix("NVIDIA "), cpu_cores=1, memory_gib=1.0
    )
    device = device_of(site)
    assert device is not None, document["device"]
    errors: dict[str, list[float]] = {}
    for row in document["rows"]:
        seconds = modelled(row, device)
        if seconds is None:
            continue
        error = seconds / row["seconds"] - 1
        errors.setdefault(f"{row['section']} {row.get('dtype', '')}", []).append(error)
        if given.all:
            facts = " ".join(
                f"{key}={value}" for key, value in row.items() if key not in ("seconds", "flops", "bytes", "section")
            )
            print(
                f"{row['section']:<11} {row['seconds'] * 1e6:10.1f} us {seconds * 1e6:10.1f} us {error:+6.0%}  {facts}"
            )
    for name, found in errors.items():
        near = sum(abs(error) <= 0.25 for error in found) / len(found)
        words = f"median error {statistics.median(found):+.1%}, of size {statistics.median(map(abs, found)):.1%}"
        print(f"{name:<18} {len(found):4d} rows: {words}; {near:.0%} within 25 %")


if __name__ == "__main__":
    main()
